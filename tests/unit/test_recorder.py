"""The recording on a disk that takes no more, with a salt that was lost, and switched by many at once."""

from __future__ import annotations

import hashlib
import json
import resource
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachesvc.catalog import Catalog
from cachesvc.clock import ManualClock
from cachesvc.observer import Observer
from cachesvc.trace.recorder import Recorder

KEYS = [bytes([number]) * 16 for number in range(40)]


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """Writes behind that fail for real, after a part of them was written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def events(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for file in sorted(path.glob("*.jsonl")) for line in file.read_text().splitlines()]


def test_a_full_disk_costs_events_and_no_line_is_cut_off(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 1 << 20, ManualClock())
    recorder.start([])
    recorder.stop()
    with no_file_longer_than(1_000):
        for _ in range(3):
            for key in KEYS:
                recorder.note({"event": "boot", "filler": key.hex() * 3})
            recorder._write()
    assert recorder.lost == 3 * len(KEYS)
    recorder.note({"event": "boot", "filler": "after it"})
    recorder._write()
    found = events(tmp_path)
    assert [event.get("filler") for event in found if event.get("event") == "boot"] == [None, "after it"]
    assert [event["count"] for event in found if event.get("event") == "lost"] == [3 * len(KEYS)]
    recorder._write()
    assert len(events(tmp_path)) == len(found), "a loss is said once"


def test_a_line_that_a_kill_cut_off_is_removed_when_recording_goes_on(tmp_path: Path) -> None:
    for _ in range(2):
        recorder = Recorder(tmp_path, 1 << 20, ManualClock())
        recorder.start(KEYS)
        recorder.stop()
        (newest,) = sorted(tmp_path.glob("*.jsonl"))[-1:]
        newest.write_bytes(newest.read_bytes()[:-7])
    newest.unlink()
    assert len(events(tmp_path)) == 2  # header and boot: the line of stored blocks was the one cut off


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 65])
def test_a_salt_that_is_none_is_made_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "salt").write_bytes(content)
    recorder = Recorder(tmp_path, 1 << 20, ManualClock())
    recorder.start(KEYS[:1])
    recorder.stop()
    salt = (tmp_path / "salt").read_bytes()
    assert len(salt) == 16 and (tmp_path / "salt").stat().st_mode & 0o777 == 0o600
    plain = hashlib.blake2b(KEYS[0], digest_size=8).digest()
    assert recorder._digest(KEYS[0]) != plain
    again = Recorder(tmp_path, 1 << 20, ManualClock())
    again.start([])
    again.stop()
    assert again._digest(KEYS[0]) == recorder._digest(KEYS[0])


def test_many_switch_it_at_once(tmp_path: Path) -> None:
    clock = ManualClock()
    observer = Observer(tmp_path, Catalog(clock, Counter()), clock, dict)
    failed: list[BaseException] = []

    def switch() -> None:
        try:
            for number in range(30):
                observer.record(on=number % 2 == 0)
        except BaseException as error:  # noqa: BLE001  to be seen by the test
            failed.append(error)

    threads = [threading.Thread(target=switch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    observer.record(on=False)
    assert failed == []
    assert all(event.get("cachesvc_trace") or event["event"] == "boot" for event in events(tmp_path / "trace"))
