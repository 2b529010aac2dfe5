"""Readers of traces: what they read, and the one line that says why they cannot."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trace_files import HEADER, ask, mooncake, session, write

from cachesvc.errors import ConfigError, TraceError
from cachesvc.trace.formats import Request, common_block, merged, open_trace


def read(*files: Path, block: int | None = None, gap: float = 60.0) -> list[Request]:
    traces = [open_trace(file) for file in files]
    return list(merged(traces, common_block(traces, block), gap))


def test_mooncake_has_full_blocks_only(tmp_path: Path) -> None:
    file = write(tmp_path / "m", [mooncake(1500, 1024, [7, 8]), mooncake(2000, 1500, [7, 8, 9])])
    first, second = read(file)
    assert first == Request(1.5, "chat", 1024, [7, 8])
    assert second.keys == [7, 8]
    assert [request.keys for request in read(file, block=1024)] == [[8], [8]]


def test_agent_sessions_are_merged_by_time_and_apart_from_each_other(tmp_path: Path) -> None:
    rows = [
        session((0, 300, [[1, 4]]), (90, 320, [[1, 3], [8, 2]])),
        session((0, 130, [[1, 2]]), (5, 64, [[1, 1]])),
    ]
    found = read(write(tmp_path / "a", rows), block=64)
    assert [request.at for request in found] == [0, 60, 65, 90]
    assert found[0].keys == [1, 2, 3, 4] and found[3].keys == [1, 2, 3, 8, 9]
    assert found[1].keys[0] == found[2].keys[0] and not {1, 2} & set(found[1].keys)
    assert [request.keys for request in read(tmp_path / "a", block=128)][::3] == [[2, 4], [2, 8]]
    assert read(tmp_path / "a", gap=10)[1].at == 10


def test_a_coarser_block_of_an_agent_file_runs_over_its_ranges(tmp_path: Path) -> None:
    file = write(tmp_path / "a", [session((0, 64 * 11, [[1, 1], [5, 1], [10, 6], [30, 3]]))])
    flat = [1, 5, 10, 11, 12, 13, 14, 15, 30, 31, 32]
    for step in range(1, 12):
        assert read(file, block=64 * step)[0].keys == flat[step - 1 :: step]


def test_our_own_format_skips_what_is_no_first_ask(tmp_path: Path) -> None:
    rows = [HEADER, {"event": "stored", "at": 1}, ask(5, [2**63, 3], tokens=300), ask(6, [3], again=True)]
    rows.append(ask(7, [2**63], **{"class": "chat", "unheard": 1, "local": 100}))
    file = tmp_path / "own.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    first, second = read(file)
    assert (first.at, first.traffic_class, first.input_tokens) == (5, "agent", 300)
    assert second.traffic_class == "chat" and second.keys == first.keys[:1]
    assert (first.local_tokens, second.local_tokens) == (0, 100)
    assert [len(request.keys) for request in read(file, block=256)] == [1, 0]


def test_files_are_merged_by_time_and_their_ids_kept_apart(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [mooncake(0, 512, [1]), mooncake(9_000, 512, [1])])
    two = write(tmp_path / "two", [mooncake(4_000, 512, [1])])
    found = read(one, two)
    assert [request.at for request in found] == [0, 4, 9]
    assert found[0].keys == found[2].keys != found[1].keys


def test_the_block_is_128_where_it_can_be(tmp_path: Path) -> None:
    own = open_trace(write(tmp_path / "own", [HEADER, ask(0, [1], block=32)]))
    agent = open_trace(write(tmp_path / "agent", [session((0, 64, [[1, 1]]))]))
    conversation = open_trace(write(tmp_path / "m", [mooncake(0, 512, [1])]))
    assert common_block([own, agent], None) == 128
    assert common_block([conversation], None) == 512
    assert common_block([own, agent, conversation], 1024) == 1024
    with pytest.raises(TraceError, match="mixed block sizes"):
        common_block([agent, conversation], None)
    with pytest.raises(ConfigError, match="finer"):
        common_block([conversation], 128)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "is empty"),
        ([HEADER, {"event": "stored"}], "is empty"),
        ([{"what": 1}], "unknown format"),
        ([[1, 2]], "unknown format"),
        ([{"cachesvc_trace": 2}], "version 2"),
        ([mooncake(-1, 512, [1])], "negative"),
        ([mooncake(float("nan"), 512, [1])], "negative"),
        ([mooncake(0, 512, [1]), mooncake(0, 5_000, [1, 2])], "line 2: 2 hash_ids for 5000 tokens"),
        ([mooncake(0, 512, [-1])], "malformed .* negative"),
        ([mooncake(0, 512, [1]) | {"hash_ids": None}], "malformed"),
        ([{"hash_ids": []}], "lacks 'timestamp'"),
        ([session((-1, 64, [[1, 1]]))], "negative"),
        ([session((0, 64, [[1, 2]]))], "2 full blocks in 64 tokens"),
        ([session((0, 64, [[1, 1]])), session((0, 96, [[1, 1]]), block=96)], "line 2: mixed block sizes"),
        ([session((0, 64, [[1, 1]]), block=0)], "at least 1"),
        ([{"reqs": []}], "lacks 'block_size'"),
        ([HEADER, ask(-5, [1])], "negative"),
        ([HEADER, ask(0, [1]), ask(0, [1], block=96)], "line 3: mixed block sizes"),
        ([HEADER, ask(0, [1], tokens=64)], "1 full blocks of 128 in 64 tokens"),
        ([HEADER, ask(0, [1]) | {"keys": "AAA"}], "malformed"),
        ([HEADER, ask(0, [1], local=129)], "129 local tokens of 128"),
        ([HEADER, ask(0, [1]) | {"class": "No such class"}], "class 'No such class'"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path, rows: list[Any], why: str) -> None:
    file = write(tmp_path / "trace", rows)
    with pytest.raises(TraceError, match=why) as error:
        read(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:-20], "line 2 is cut off"),
        (lambda data: data.replace(b"}\n{", b"\n{"), "unknown format, its first line"),
        (lambda data: gzip.compress(data)[:-20], "is cut off or damaged"),
        (lambda data: gzip.compress(data)[:12] + b"\xff" * 30, "is cut off or damaged"),
    ],
)
def test_damage_is_said_in_one_line(tmp_path: Path, damage: Callable[[bytes], bytes], why: str) -> None:
    file = write(tmp_path / "trace", [mooncake(0, 512, [1]), mooncake(0, 1024, [1, 2])])
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(TraceError, match=why):
        read(file)


def test_a_missing_file_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot read"):
        read(tmp_path / "missing")
