"""What is acknowledged as durable, or still in use, outlives failing devices, full disks and kills."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Client, Daemon, make_payloads, wait_until

from cachesvc.classes import DEFAULT_TTLS, TrafficClasses
from cachesvc.clock import ManualClock
from cachesvc.disk.fsck import Check
from cachesvc.errors import WriteRefused
from cachesvc.index.rocks import IndexDamaged
from cachesvc.keys import Namespace, chain_keys
from cachesvc.record import checksum
from cachesvc.segments.format import shape_of
from cachesvc.store import Store

DAY = 86_400.0
SIZE = 9_000
SHAPE = shape_of("ab" * 32, SIZE)
CLASSES = TrafficClasses(DEFAULT_TTLS)
AGENT = CLASSES.named("agent")


def make_store(path: Path, clock: ManualClock, segment_bytes: int = 1 << 20) -> Store:
    return Store(
        path,
        budget=1 << 30,
        segment_bytes=segment_bytes,
        arena_bytes=4 << 20,
        slab_bytes=1 << 20,
        arena_policy="lru",
        classes=CLASSES,
        clock=clock,
    )


def save(store: Store, identities: list[bytes]) -> set[bytes]:
    slots = store.reserve(identities, SIZE)
    for slot, payload in zip(slots, make_payloads(len(slots), SIZE), strict=True):
        store.arena.view(slot)[:] = payload
    sums = [checksum(store.arena.view(slot)) for slot in slots]
    return store.commit(slots, sums, SHAPE, AGENT, verified=True, durable=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    # Four records fill a segment: it is sealed within the same call that writes them.
    made = make_store(tmp_path / "store", ManualClock(), segment_bytes=4096 + 4 * 12_288)
    yield made
    made.close()


def test_durable_is_not_said_of_a_segment_that_could_not_be_synced(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    identities = [os.urandom(16) for _ in range(4)]

    def fails(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fails)
        with pytest.raises(WriteRefused, match="may not be on the device"):
            save(store, identities)
    assert "writes refused" in store.disk.health


def test_the_use_of_blocks_is_known_after_a_kill_with_their_segment_still_open(tmp_path: Path) -> None:
    clock = ManualClock()
    store = make_store(tmp_path / "store", clock)
    identities = [os.urandom(16) for _ in range(8)]
    assert save(store, identities) == set()
    clock.advance(2.5 * DAY)
    store.touch([identities], AGENT, None)
    store.maintain()
    shutil.copytree(tmp_path / "store", tmp_path / "killed")  # what a kill at this moment leaves
    store.close()
    clock.advance(0.7 * DAY)  # past the TTL since writing, not since use
    again = make_store(tmp_path / "killed", clock)
    again.maintain()
    found = again.catalog.match([identities], [SHAPE], AGENT).entries
    assert len(found[0]) == 8
    clock.advance(2.5 * DAY)
    again.maintain()
    found = again.catalog.match([identities], [SHAPE], AGENT).entries
    assert len(found[0]) == 0
    again.close()


def test_blocks_in_use_are_kept_when_the_disk_is_full_at_the_end_of_their_slice(
    make_daemon: Callable[..., Daemon], namespace: Namespace, tmp_path: Path
) -> None:
    disk, offset = tmp_path / "disk", tmp_path / "offset"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here, so a full disk cannot be tested: {mounted.stderr!r}")
    offset.write_text("0")
    try:
        daemon = make_daemon("--clock-offset-file", str(offset), "--store-bytes", "500MB", store=disk / "store").start()
        keys, payloads = chain_keys(namespace, range(128 * 8)), make_payloads(8, SIZE)
        with Client(daemon.address) as client:
            client.attach(namespace, SIZE)
            client.save(keys, payloads, durable=True)
            offset.write_text(str(2.5 * DAY))
            assert client.fetch(keys) == payloads
            _fill(disk / "ballast")
            offset.write_text(str(3.5 * DAY))
            wait_until(lambda: client.report().events.get("write_refusals", 0) > 0)
            assert client.fetch(keys) == payloads
            (disk / "ballast").unlink()
            wait_until(lambda: client.report().events.get("reclaimed_segments", 0) > 0)
            assert client.fetch(keys) == payloads
        daemon.kill()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


def test_an_index_that_took_no_write_is_written_anew_and_knows_all_uses(tmp_path: Path) -> None:
    clock = ManualClock()
    store = make_store(tmp_path / "store", clock, segment_bytes=4096 + 4 * 12_288)
    identities = [os.urandom(16) for _ in range(10)]
    assert save(store, identities) == set()
    index = store.disk._durable._index

    def fails(**_: object) -> None:
        raise IndexDamaged("No space left on device")

    assert index is not None
    index.write = fails  # type: ignore[method-assign]
    clock.advance(2.5 * DAY)
    store.touch([identities], AGENT, None)
    store.maintain()
    assert store.events["index_errors"] == 1
    clock.advance(10)
    store.maintain()
    assert store.disk._durable._index is not index and not store.disk._durable.fault
    store.close()
    clock.advance(0.7 * DAY)
    again = make_store(tmp_path / "store", clock)
    again.maintain()
    found = again.catalog.match([identities], [SHAPE], AGENT).entries
    assert len(found[0]) == 10
    again.close()


@pytest.mark.parametrize("now", [-1000.0, -1e9])
def test_blocks_are_stored_with_a_clock_before_1970(tmp_path: Path, now: float) -> None:
    clock = ManualClock(now)
    identities = [os.urandom(16) for _ in range(6)]
    for opened in range(2):
        store = make_store(tmp_path / "store", clock, segment_bytes=4096 + 4 * 12_288)
        if not opened:
            assert save(store, identities) == set()
        store.maintain()
        assert len(store.catalog.match([identities], [SHAPE], AGENT).entries[0]) == 6
        store.close()
    assert not Check(tmp_path / "store").run().counts
