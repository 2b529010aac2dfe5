"""Expiry, room, and looking for damage, as housekeeping does them: at their pace, in whole files, heads last."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import wait_until
from store_bench import AGENT, CHAT, DAY, SEGMENT, SHAPE, STRIDE, Bench, ids

from cachesvc.errors import WriteRefused
from cachesvc.limits import STEP_BYTES
from cachesvc.record import PAGE
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.segments.writer import SegmentWriter


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "store", scrub_rate=0)
    yield made
    made.store.close()


def test_blocks_in_use_are_written_again_at_the_pace_that_is_set(tmp_path: Path) -> None:
    rate = 10 * STEP_BYTES
    bench = Bench(tmp_path / "store", segment_bytes=1 << 22, rewrite_rate=rate, scrub_rate=0)
    prompt = ids(800)  # 9.8 MB
    bench.save(prompt)
    bench.clock.advance(2.9 * DAY)
    bench.use(prompt)
    bench.clock.advance(0.3 * DAY)
    started, events = bench.clock.monotonic(), bench.store.events
    bench.store.maintain()
    assert 0 < events["rewritten_bytes"] <= 2 * STEP_BYTES, "not all at once"
    while bench.store.maintain() < 1.0:
        bench.clock.advance(0.002)
        assert events["rewritten_bytes"] <= 2 * STEP_BYTES + rate * (bench.clock.monotonic() - started)
    assert events["rewritten_blocks"] == 800 and bench.matched(prompt) == 800
    assert events["rewritten_bytes"] / (bench.clock.monotonic() - started) >= 0.8 * rate
    bench.store.close()


def test_blocks_used_while_others_are_written_again_are_kept_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", segment_bytes=1 << 22, rewrite_rate=STEP_BYTES, scrub_rate=0)
    first, second = ids(200), ids(100)
    bench.save(first)
    bench.save(second, CHAT)
    bench.clock.advance(2.9 * DAY)
    bench.use(first)
    bench.clock.advance(0.3 * DAY)
    bench.store.maintain()
    assert bench.store.maintain() < 1.0, "there is more to do"
    bench.use(first[:150])
    bench.settle()
    assert bench.matched(first) == 200 and bench.matched(second) == 100
    bench.store.close()


@pytest.mark.parametrize("others", [12, 18])
def test_blocks_in_use_are_written_again_within_the_budget(tmp_path: Path, others: int) -> None:
    """All of a slice is still in use when it is over, and there is less room than it takes."""
    budget = 40 * SEGMENT
    bench = Bench(tmp_path / "store", budget=budget, rewrite_rate=1 << 20, scrub_rate=0, background=False)
    prompt = ids(8 * 16)
    bench.save(prompt)
    bench.clock.advance(2.5 * DAY)
    for _ in range(others):
        bench.save(ids(8), CHAT)
        bench.settle()
    for block in prompt:
        bench.use([block])
        bench.clock.advance(30)
    bench.clock.advance(0.7 * DAY)
    largest = 0
    while bench.store.maintain() < 1.0:
        largest = max(largest, sum(path.stat().st_size for path in bench.path.rglob("*") if path.is_file()))
        bench.clock.advance(0.01)
    assert largest <= budget
    assert bench.store.events["rewritten_blocks"] == len(prompt) == bench.matched(prompt)
    bench.store.close()


@pytest.mark.long
def test_expiring_a_slice_of_10_000_blocks_costs_few_file_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "store", segment_bytes=32 << 20, scrub_rate=0)
    bench.save(ids(10_000))
    assert bench.store.disk.segments == 4  # of 256 MiB it would be 5 with blocks of 113,920 bytes
    bench.reopen()  # seals what is open
    bench.clock.advance(3.5 * DAY)
    operations: list[str] = []
    for name in ("open", "unlink", "rmdir", "rename", "fsync", "fdatasync", "pwritev", "pwrite", "preadv", "ftruncate"):
        monkeypatch.setattr(os, name, counting(name, operations))
    index = bench.store.disk._durable._index
    assert index is not None
    monkeypatch.setattr(index, "write", counting_call(index.write, operations))
    bench.settle()
    assert len(bench.store.catalog) == 0 == bench.store.disk.segments
    assert bench.store.events["expired_blocks"] == 10_000
    assert operations.count("unlink") >= 4 and len(operations) < 10, operations
    assert list((tmp_path / "store").glob("*/*/*")) == [], "the slice's directory is gone too"
    bench.store.close()


def counting(name: str, operations: list[str]) -> Callable[..., object]:
    original = getattr(os, name)

    def call(*arguments: object, **named: object) -> object:
        operations.append(name)
        return original(*arguments, **named)

    return call


def counting_call(original: Callable[..., None], operations: list[str]) -> Callable[..., None]:
    def call(**named: object) -> None:
        operations.append("index write")
        original(**named)

    return call


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
def test_a_prefix_never_loses_its_head_before_its_tail(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    bench = Bench(tmp_path / "store", budget=40 * SEGMENT, scrub_rate=0)
    prompts = [ids(source.randrange(1, 20)) for _ in range(60)]
    for _ in range(300 if seed else 100):
        prompt = source.choice(prompts) if source.random() < 0.7 else source.choice(prompts[:6])
        upto = source.randrange(1, len(prompt) + 1)
        matched = bench.matched(prompt[:upto])
        bench.use(prompt[:upto])
        bench.save(prompt[matched:upto])
        bench.clock.advance(source.random() * 600)
        bench.settle()
        assert bench.store.disk.bytes_used <= bench.store.disk.budget
        for number, each in enumerate(prompts):
            there = bench.stored(each)
            assert there == sorted(there, reverse=True), f"prompt {number} has a hole: {there}"
    assert bench.store.events["evicted_blocks"] > 50 and bench.store.events["rewritten_blocks"] > 0
    bench.store.close()


def test_room_is_made_before_writers_need_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", budget=32 * SEGMENT, scrub_rate=0)
    for _ in range(60):
        bench.save(ids(8))
        bench.settle()
        assert bench.store.disk.bytes_used <= 31 * SEGMENT, "room for what comes"
    bench.store.close()


def test_dead_bytes_and_write_amplification_are_reported(bench: Bench) -> None:
    prompt = ids(16)
    bench.save(prompt)
    assert (bench.store.disk.dead_bytes, bench.store.disk.write_amplification) == (0, 1.0)
    entry = bench.store.catalog.where(prompt[3])
    assert entry is not None
    bench.store.catalog.drop(prompt[3], entry, MissReason.CORRUPT)
    assert bench.store.disk.dead_bytes == STRIDE
    bench.reopen()
    assert bench.store.disk.dead_bytes == STRIDE
    bench.clock.advance(2.9 * DAY)
    bench.use(prompt[:3])
    bench.clock.advance(0.3 * DAY)
    bench.settle()
    assert bench.store.events["rewritten_bytes"] == 3 * STRIDE and bench.store.disk.dead_bytes == 0
    bench.save(ids(6))
    assert bench.store.disk.write_amplification == pytest.approx(1.5)


# ---- looking for damage ----------------------------------------------------------------------------------------------


def damage(path: Path, record: int) -> None:
    with path.open("r+b") as file:
        file.seek(PAGE + record * STRIDE + 100)
        file.write(b"damage")


def segments(bench: Bench) -> list[Path]:
    return sorted(bench.path.glob("*/*/*/*.seg"))


def test_the_scrubber_finds_damage_that_nobody_asked_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", scrub_rate=20 * STRIDE)
    prompt = ids(40)
    bench.save(prompt)
    bench.reopen()
    damage(segments(bench)[2], 5)
    for second in range(10):
        read = bench.store.events["scrubbed_blocks"]
        assert read <= STEP_BYTES // STRIDE + 20 * (second + 1), "no faster than it may"
        bench.store.maintain()
        bench.clock.advance(1)
    assert bench.store.events["corrupt_blocks"] == 1
    there = bench.stored(prompt)
    assert there.count(False) == 1 and not there[2 * 8 + 5], "the rest of the file stays in use"
    assert bench.store.catalog.match([prompt[21:]], [SHAPE], AGENT).reason == MissReason.CORRUPT
    bench.store.close()


def test_the_scrubber_goes_on_where_it_was(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", scrub_rate=4 * STRIDE)
    bench.save(ids(80))
    bench.reopen()
    while bench.store.events["scrubbed_blocks"] < 40:
        bench.clock.advance(1)
        bench.store.maintain()
    bench.reopen()
    while bench.store.events["scrub_rounds"] == 0:
        bench.clock.advance(1)
        bench.store.maintain()
        assert bench.store.events["scrubbed_blocks"] < 60
    bench.store.close()


def test_a_damaged_record_of_an_unsealed_segment_is_known_as_corrupt_and_the_rest_is_sealed(bench: Bench) -> None:
    prompt = ids(6)
    bench.save(prompt)
    killed = bench.path.with_name("killed")
    shutil.copytree(bench.path, killed)
    (path,) = killed.glob("*/*/*/*.seg")
    damage(path, 2)
    again = Bench(killed, scrub_rate=0)
    assert again.stored(prompt) == [True, True, False, True, True, True]
    assert again.store.events["corrupt_blocks"] == 1
    assert again.store.catalog.match([prompt], [SHAPE], AGENT).reason == MissReason.CORRUPT
    again.reopen()
    assert again.store.events["recovered_segments"] == 0, "it was sealed, with the damaged record marked"
    assert again.stored(prompt) == [True, True, False, True, True, True]
    shutil.rmtree(killed / "index")
    again.reopen()
    assert again.stored(prompt) == [True, True, False, True, True, True]
    again.store.close()


# ---- devices that fail -----------------------------------------------------------------------------------------------


def fails(code: int) -> Callable[..., object]:
    def call(*_: object, **__: object) -> object:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.ENOSPC])
def test_a_disk_that_takes_no_writes_is_said_and_recovers_without_traffic(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    prompt, more = ids(5), ids(5)
    bench.save(prompt)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwritev", fails(code))
        broken.setattr(os, "pwrite", fails(code))
        with pytest.raises(WriteRefused, match=os.strerror(code)):
            bench.save(more)
        assert os.strerror(code) in bench.store.disk.health and bench.store.events["write_refusals"] == 1
        assert bench.matched(prompt) == 5
        assert not bench.store.disk.accepts_writes()
        bench.clock.advance(6)
        bench.store.maintain()
        assert "writes refused" in bench.store.disk.health
    bench.clock.advance(6)
    bench.store.maintain()
    assert bench.store.disk.health == "ok"
    bench.save(more)
    assert bench.matched(more) == 5


def test_a_file_that_cannot_be_removed_still_counts_and_goes_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.save(ids(20))
    used = bench.store.disk._files.used
    bench.clock.advance(3.5 * DAY)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", fails(errno.EROFS))
        bench.settle()
        assert bench.store.disk._files.used >= used and bench.store.events["unlink_errors"] >= 1
    bench.clock.advance(6)
    bench.settle()
    assert bench.store.disk.segments == 0 and segments(bench) == []


def test_a_sync_that_failed_once_is_never_taken_for_done(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ids(3)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fails(errno.EIO))
        with pytest.raises(WriteRefused):
            bench.save(prompt)
    more = ids(2)
    bench.clock.advance(6)
    bench.save(more)  # in another file
    assert len(segments(bench)) == 2
    bench.reopen()
    assert bench.stored(more) == [True, True]


def test_a_segment_that_could_not_be_sealed_is_sealed_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ids(12)
    with monkeypatch.context() as broken:
        broken.setattr(SegmentWriter, "seal", fails_like(WriteRefused("cannot seal: No space left on device")))
        bench.save(prompt[:8], durable=False)
        wait_until(lambda: bench.store.arena.bytes_unflushed == 0)
    assert bench.store.events["write_refusals"] == 1
    assert bench.stored(prompt[:8]) == [True] * 8
    bench.clock.advance(6)
    bench.store.maintain()
    shutil.copytree(bench.path, bench.path.with_name("killed"))
    again = Bench(bench.path.with_name("killed"), scrub_rate=0)
    assert again.store.events["recovered_segments"] == 0 and again.stored(prompt[:8]) == [True] * 8
    again.store.close()


def fails_like(error: Exception) -> Callable[..., object]:
    def call(*_: object, **__: object) -> object:
        raise error

    return call


def test_every_new_directory_is_synced_in_its_parent_before_a_block_is_durable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    original = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    bench.save(ids(2))
    (path,) = segments(bench)
    assert {str(parent) for parent in path.parents[:4]} <= set(synced)
    assert path.parents[3] == bench.path


def test_blocks_in_the_arena_that_changed_are_found_when_a_reader_complains(bench: Bench) -> None:
    prompt = ids(4)
    bench.save(prompt)
    (slot,) = bench.store.arena.pin([prompt[2]])
    assert slot is not None
    bench.store.arena.view(slot)[5] ^= 1
    bench.store.arena.unpin([slot])
    bench.store.recheck(prompt[1:])
    assert bench.store.events["arena_corrupt_blocks"] == 1
    assert bench.store.arena.resident(prompt[1]) and not bench.store.arena.resident(prompt[2])
    assert bench.matched(prompt) == 4, "it is still on disk"
