"""25 of the loops of `bench/faults.py`, the flips of `bench/flips.py`, and files cut at every offset."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from faults import ZERO, kill_loops
from flips import flip
from store_bench import Bench, ids

from cachesvc.record import PAGE, RecordHead, checksum, record_bytes
from cachesvc.segments.format import SegmentHead
from cachesvc.segments.recover import read_segment, seal_recovered
from cachesvc.segments.writer import SegmentWriter


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_over_and_over_nothing_durable_is_lost_and_no_byte_is_wrong(tmp_path: Path) -> None:
    loops = 25
    run, faults = kill_loops(loops, seed=25, directory=tmp_path)
    values = {result.name: result.value for result in run.results}
    assert faults == []
    assert {name: values[name] for name in ZERO} == dict.fromkeys(ZERO, 0)
    assert values["loops"] == loops and values["blocks_acknowledged_durable"] > 0
    assert values["blocks_required"] > 100 <= values["blocks_compared"]


def test_a_flipped_bit_is_harmless_or_a_counted_miss(tmp_path: Path) -> None:
    values = {result.name: result.value for result in flip(500, 3, tmp_path).results}
    assert values["neither harmless nor counted"] == 0
    assert values["a counted miss"] > 250 and values["harmless: padding"] > 50


@pytest.mark.parametrize("sealed", [False, True])
def test_a_file_cut_at_any_offset_keeps_exactly_its_whole_records(tmp_path: Path, sealed: bool) -> None:
    size, count = 300, 3
    head = SegmentHead("ab" * 32, size, "agent", 259_200.0, 1_800_000_000, 1_700_000_000.5, tag=77)
    payloads = [os.urandom(size) for _ in range(count)]
    heads = [
        RecordHead(bytes([i]) * 16, i, size, i, 1000.25, 2000.5, head.tag, checksum(payload))
        for i, payload in enumerate(payloads)
    ]
    path = tmp_path / "a.seg"
    writer = SegmentWriter(path, head)
    writer.append(list(zip(heads, payloads, strict=True)))
    if sealed:
        writer.seal()
    for cut in range(path.stat().st_size - 1, PAGE - 1, -1):
        os.truncate(path, cut)
        found = read_segment(path)
        assert found.heads == heads[: min(count, (cut - PAGE) // record_bytes(size))], f"cut at {cut}"
        assert not found.sealed
    assert seal_recovered(path, read_segment(path)).records == 0


def test_a_store_opens_with_a_file_cut_within_its_header(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", scrub_rate=0)
    prompt = ids(8 + 3)
    bench.save(prompt)
    bench.store.close()
    first = min(bench.path.glob("*/*/*/*.seg"))
    for cut in (PAGE - 1, PAGE // 2, 1, 0):  # killed while the file was made: nothing can be in it
        first.write_bytes(bytes(cut))
        bench.open()
        assert bench.stored(prompt) == [False] * 8 + [True] * 3
        assert bench.store.events["torn_files"] == 1 and not first.exists()
        bench.store.close()
