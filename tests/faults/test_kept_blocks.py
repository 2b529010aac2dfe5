"""What housekeeping keeps when files go: blocks in use, whatever fails meanwhile, and within the byte budget."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import store_bench
from store_bench import CHAT, DAY, SEGMENT, Bench, ids

from cachesvc.classes import TrafficClasses
from cachesvc.disk import opening
from cachesvc.errors import StoreLocked, WriteRefused
from cachesvc.index import blocks as table
from cachesvc.segments import writer

BUDGET = 40 * SEGMENT
QUIET: dict[str, Any] = {"scrub_rate": 0, "background": False}


def failing(code: int) -> Callable[..., Any]:
    def call(*arguments: object) -> Any:
        raise OSError(code, os.strerror(code))

    return call


def full(path: Path) -> tuple[Bench, list[list[bytes]]]:
    """A store in which housekeeping is about to make room, and its prompts from the oldest on."""
    bench, prompts = Bench(path, budget=BUDGET, **QUIET), []
    disk = bench.store.disk
    while disk.bytes_used + disk._index_bytes <= BUDGET - 1.5 * SEGMENT:
        prompts.append(ids(8))
        bench.save(prompts[-1])
        bench.clock.advance(1)
    return bench, prompts


def count(bench: Bench, prompts: Sequence[Sequence[bytes]]) -> int:
    return sum(sum(bench.stored(prompt)) for prompt in prompts)


def test_a_look_up_in_a_file_that_is_going_does_not_take_the_store_with_it(tmp_path: Path) -> None:
    bench, prompts = full(tmp_path / "store")
    for prompt in prompts:
        bench.use(prompt)
        bench.clock.advance(1)
    before = count(bench, prompts)
    bench.store.disk._reclaimer.step()
    job = bench.store.disk._reclaimer._job
    assert job is not None
    rows = bench.store.catalog._blocks
    bench.use(rows.rows.identities(rows.live(job.segments[0]))[-1:])
    bench.clock.advance(1)
    bench.settle()
    assert before - 40 < count(bench, prompts) < before


def test_a_disk_that_takes_no_writes_costs_no_block_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, prompts = full(tmp_path / "store")
    hot = [prompt[0] for prompt in prompts]
    random.Random(3).shuffle(hot)
    for block in hot:
        bench.use([block])
        bench.clock.advance(60)
    before = count(bench, prompts)
    monkeypatch.setattr(writer, "_write", failing(errno.ENOSPC))
    for _ in range(20):
        bench.store.maintain()
        bench.clock.advance(1)
    assert count(bench, prompts) == before
    monkeypatch.undo()
    bench.clock.advance(10)
    bench.settle()
    assert all(bench.stored(hot)) and before - 40 < count(bench, prompts) < before


def test_room_is_made_on_a_full_disk_by_files_of_which_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, prompts = full(tmp_path / "store")
    for prompt in prompts[:10]:
        bench.use(prompt[:1])
        bench.clock.advance(1)
    monkeypatch.setattr(writer, "_write", failing(errno.ENOSPC))
    bench.store.disk._reclaimer._budget = BUDGET - 4 * SEGMENT
    for _ in range(20):
        bench.store.maintain()
        bench.clock.advance(1)
    assert all(bench.stored([prompt[0] for prompt in prompts[:10]]))
    assert bench.store.events["reclaimed_segments"] >= 3


def test_what_cannot_be_read_when_its_slice_is_over_stays_for_a_later_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "store", **QUIET)
    prompt, over = ids(8), ids(8)
    bench.save(prompt)
    bench.clock.advance(0.2 * DAY)
    bench.save(over)
    bench.clock.advance(2.7 * DAY)
    bench.use(prompt)
    bench.clock.advance(0.6 * DAY)
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    for _ in range(5):
        bench.store.maintain()
        bench.clock.advance(1)
    assert all(bench.stored(prompt)), "an error of the device is no reason to drop a block"
    assert not any(bench.stored(over)), "other slices are not held up by it"
    monkeypatch.undo()
    bench.clock.advance(10)
    bench.settle()
    assert bench.store.events["rewritten_blocks"] == 8 == bench.matched(prompt)


def test_one_start_without_a_file_forgets_no_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, prompt = used_long_after_it_was_written(tmp_path / "store")
    monkeypatch.setattr(opening, "read_sealed", failing(errno.EIO))
    bench.reopen()
    assert bench.matched(prompt) == 0
    monkeypatch.undo()
    bench.reopen()
    bench.clock.advance(0.2 * DAY)
    assert bench.matched(prompt) == 8


def test_a_kill_while_one_index_replaces_another_forgets_no_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, prompt = used_long_after_it_was_written(tmp_path / "store")

    class Killed(BaseException):
        pass

    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name == "index.new":
            raise Killed
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    bench.store.disk._durable.fault = True
    with pytest.raises(Killed):
        bench.store.maintain()
    monkeypatch.undo()
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    other = Bench(tmp_path / "killed", **QUIET)
    other.clock.advance(3.1 * DAY)
    assert other.matched(prompt) == 8


def used_long_after_it_was_written(path: Path) -> tuple[Bench, list[bytes]]:
    """Only the index knows that the prompt has not expired."""
    bench, prompt = Bench(path, **QUIET), ids(8)
    bench.save(prompt)
    bench.clock.advance(2.9 * DAY)
    bench.use(prompt)
    bench.clock.advance(30)
    bench.settle()
    return bench, prompt


def test_a_class_that_is_not_configured_any_more_keeps_its_ttl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = TrafficClasses({"agent": 3 * DAY, "longer": 30 * DAY})
    monkeypatch.setattr(store_bench, "CLASSES", before)
    bench = Bench(tmp_path / "store", **QUIET)
    first, second = ids(8), ids(8)
    bench.save(first, before.named("agent"))
    bench.save(second, before.named("longer"))
    monkeypatch.setattr(store_bench, "CLASSES", TrafficClasses({"agent": 3 * DAY}))
    bench.reopen()
    bench.clock.advance(4 * DAY)
    assert (bench.matched(first), bench.matched(second)) == (0, 8)


def test_a_full_index_loses_no_block_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_BLOCKS", 64 * 12)
    monkeypatch.setattr(table, "_LEAST", 1)
    bench, prompts = Bench(tmp_path / "store", **QUIET), [ids(8) for _ in range(12)]
    for prompt in prompts:
        bench.save(prompt)
        bench.clock.advance(1)
    bench.clock.advance(2.9 * DAY)
    for prompt in prompts:
        bench.use(prompt)
    held = count(bench, prompts)
    bench.clock.advance(0.4 * DAY)
    for _ in range(30):
        bench.store.maintain()
        bench.clock.advance(1)
    assert count(bench, prompts) == held >= 80


@pytest.mark.parametrize("seed", [1, 3])
def test_blocks_kept_of_many_classes_stay_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Each goes into a file of its class."""
    classes = TrafficClasses({"agent": 3 * DAY, **{f"c{number}": (4 + number) * DAY for number in range(60)}})
    monkeypatch.setattr(store_bench, "CLASSES", classes)
    bench, source, budget, prompts = Bench(tmp_path / "store", budget=20 * SEGMENT, **QUIET), random.Random(seed), 0, []
    largest, write = 0, writer._write

    def watched(*arguments: Any) -> None:
        nonlocal largest
        write(*arguments)
        largest = max(largest, sum(path.stat().st_size for path in bench.path.rglob("*.seg")))

    monkeypatch.setattr(writer, "_write", watched)
    budget = 20 * SEGMENT - bench.store.disk._index_bytes
    for _ in range(80):
        prompts.append(ids(source.choice([1, 3, 8])))
        bench.save(prompts[-1], classes.named("agent"))
        bench.clock.advance(10)
        for prompt in prompts[-30:]:
            for block in prompt[:4]:
                if bench.store.catalog.where(block):
                    bench.store.touch([[block]], classes.named(f"c{source.randrange(60)}"), None)
    assert budget / 2 < largest <= budget


def test_a_file_with_no_room_in_the_index_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_BLOCKS", 64 * 2)
    monkeypatch.setattr(table, "_LEAST", 1)
    bench = Bench(tmp_path / "store", **QUIET)
    bench.save(ids(8))
    with pytest.raises(WriteRefused):
        for _ in range(8):
            bench.save(ids(8), CHAT)
            for segment in bench.store.disk._files.segments.values():
                segment.pins += 1
    for segment in bench.store.disk._files.segments.values():
        assert len(bench.store.catalog._blocks.rows.of(segment.number)) == segment.records


def test_a_store_whose_lock_was_removed_is_not_opened_twice(tmp_path: Path) -> None:
    bench, prompt = used_long_after_it_was_written(tmp_path / "store")
    (tmp_path / "store" / "LOCK").unlink()
    with pytest.raises(StoreLocked, match="another process has its index open"):
        Bench(tmp_path / "store", **QUIET)
    bench.clock.advance(3.3 * DAY)
    bench.store.maintain()
    assert bench.store.disk.segments == 1, "the lock is another's now: nothing is removed"
    assert bench.matched(prompt) == 0
