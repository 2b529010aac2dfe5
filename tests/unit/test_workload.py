"""Made traffic: the same for a seed, and what the fits say."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from trace_files import write

from cachesvc.trace.formats import Request, merged, open_trace
from cachesvc.trace.replay import replay, rows, simulations
from cachesvc.trace.workload import Workload, agent_trace, own_trace, sessions


def hit_rates(requests: list[Request]) -> dict[str, tuple[int, float]]:
    (cache,) = simulations(["infinite"], [], [None], 128)
    replay(requests, [cache])
    return {row.traffic_class: (row.hit_tokens, row.hit_rate) for row in rows(cache, sampled=False)}


def test_the_same_seed_makes_the_same_traffic() -> None:
    one, two, other = (list(own_trace(Workload(2, 5, seed, 60.0).requests(), seed)) for seed in (1, 1, 2))
    assert one == two != other
    assert list(sessions("agent", 3, 7))[:2] == list(sessions("agent", 2, 7))


def test_both_formats_hold_the_same_traffic(tmp_path: Path) -> None:
    agent, own = tmp_path / "agent", tmp_path / "own"
    agent.write_text("".join(agent_trace("agent", 4, 5)))
    workload = Workload(4, 0, 5, 60.0)
    own.write_text("".join(own_trace(workload.requests(), 5)))
    read = [list(merged([open_trace(path)], 128, 60.0)) for path in (agent, own)]
    read.append(list(workload.requests()))
    for found in read:
        assert [(request.at, request.input_tokens, len(request.keys)) for request in found] == [
            (pytest.approx(request.at, abs=1e-3), request.input_tokens, len(request.keys)) for request in read[0]
        ]
        assert hit_rates(found) == hit_rates(read[0])
    assert len(list(workload.requests(10))) == 10


def test_agents_hit_96_percent_and_chats_a_third() -> None:
    found = hit_rates(list(Workload(40, 2_000, 0, 60.0).requests()))
    assert 0.94 < found["agent"][1] < 0.98
    assert 0.25 < found["chat"][1] < 0.45


def test_prompts_stay_within_what_the_format_allows(tmp_path: Path) -> None:
    """The reader checks ids, full blocks and times."""
    file = write(tmp_path / "t", [*sessions("agent", 60, 3), *sessions("chat", 200, 3)])
    found = list(merged([open_trace(file)], 64, 1.0))
    assert all(len(request.keys) == request.input_tokens // 64 for request in found)
    assert all(len(set(request.keys)) == len(request.keys) for request in found)


def test_a_packed_file_is_the_same_each_time(typed: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    packed = []
    for name in ("a.gz", "b.gz"):
        assert typed("workload", "--chats", 5, "--seed", 4, "--out", tmp_path / name) == (0, "", "")
        packed.append((tmp_path / name).read_bytes())
    assert packed[0] == packed[1]
    lines = gzip.decompress(packed[0]).decode().splitlines()
    assert typed("workload", "--chats", 5, "--seed", 4, "--out", "-")[1].splitlines() == lines
    assert json.loads(lines[0])["cachesvc_trace"] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        ([], 2, "nothing to make"),
        (["--chats", 1], 2, "one of --out FILE and --play"),
        (["--chats", 1, "--out", "x", "--play"], 2, "one of --out FILE and --play"),
        (["--chats", 1, "--agents", 1, "--out", "x", "--format", "agent"], 2, "of one class"),
        (["--chats", 1, "--out", "x", "--format", "csv"], 2, "'csv' is unknown"),
        (["--chats", 1, "--play", "--clock", "real", "--rate", 5], 2, "goes with neither"),
        (["--chats", 1, "--play", "--clock", "cuckoo"], 2, "'cuckoo' is unknown"),
        (["--chats", 1, "--play", "--payload-bytes", "0"], 2, "payloads have"),
        (["--chats", 1, "--out", "/nowhere/x"], 2, "cannot write"),
        (["--chats", 1, "--play", "--address", "unix:/nowhere/s"], 6, "no answer from a daemon"),
    ],
)
def test_one_line_and_an_exit_code(
    typed: Callable[..., tuple[int, str, str]], arguments: list[object], code: int, why: str
) -> None:
    found, out, err = typed("workload", *arguments)
    assert (found, out, err.count("\n")) == (code, "", 1), err
    assert why in err
