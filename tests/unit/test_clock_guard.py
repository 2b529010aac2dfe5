"""A clock that jumps: what time is told meanwhile, when it is believed, and over a restart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cachesvc.classes import DEFAULT_TTLS, TrafficClasses
from cachesvc.clock import ManualClock
from cachesvc.clock_guard import GuardedClock
from cachesvc.limits import CLOCK_TRUST_SECONDS
from cachesvc.record import checksum
from cachesvc.segments.format import shape_of
from cachesvc.store import Store

DAY, YEAR = 86_400.0, 365 * 86_400.0


@pytest.mark.parametrize("jump", [YEAR, 4 * DAY, -YEAR, -3600.0])
def test_a_single_jump_changes_nothing_and_is_said(jump: float, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    guard = GuardedClock(clock)
    start = guard.now()
    clock.jump(jump)
    for _ in range(50):
        clock.advance(60)
        guard.now()
    assert guard.now() == pytest.approx(start + 3000)
    assert "has jumped by" in caplog.text and len(caplog.records) == 1
    clock.jump(-jump)
    assert guard.now() == pytest.approx(start + 3000) and not guard.doubted
    assert "trusted again" in caplog.text


@pytest.mark.parametrize("jump", [YEAR, -YEAR])
def test_a_jump_that_stays_is_believed_in_the_end(jump: float) -> None:
    clock = ManualClock()
    guard = GuardedClock(clock)
    clock.jump(jump)
    guard.now()
    clock.advance(CLOCK_TRUST_SECONDS + 1)
    assert guard.now() == clock.now() and not guard.doubted


def test_a_clock_that_keeps_jumping_is_never_believed() -> None:
    clock = ManualClock()
    guard = GuardedClock(clock)
    start = guard.now()
    for number in range(100):
        clock.jump(YEAR if number % 2 else 2 * YEAR)
        clock.advance(CLOCK_TRUST_SECONDS / 2)
        guard.now()
    assert guard.now() == pytest.approx(start + 50 * CLOCK_TRUST_SECONDS)


def test_small_steps_are_followed_and_never_go_back() -> None:
    clock = ManualClock()
    guard = GuardedClock(clock)
    clock.jump(30)
    later = guard.now()
    assert later == clock.now()
    clock.jump(-20)
    assert guard.now() == later
    clock.advance(40)
    assert guard.now() == clock.now() > later


@pytest.mark.parametrize(("away", "doubted"), [(-DAY, True), (-30.0, False), (10 * DAY, False), (YEAR, True)])
def test_over_a_restart_the_last_time_is_known(tmp_path: Path, away: float, doubted: bool) -> None:
    clock = ManualClock()
    GuardedClock(clock, tmp_path / "CLOCK").save(always=True)
    before = clock.now()
    clock.jump(away)
    guard = GuardedClock(clock, tmp_path / "CLOCK")
    assert guard.doubted is doubted
    assert guard.now() == (min(before, clock.now()) if doubted else clock.now())


def test_behind_the_last_run_nothing_expires_by_it_until_the_clock_has_caught_up(tmp_path: Path) -> None:
    clock = ManualClock()
    GuardedClock(clock, tmp_path / "CLOCK").save(always=True)
    kept = (tmp_path / "CLOCK").read_bytes()
    clock.jump(-20 * YEAR)
    guard = GuardedClock(clock, tmp_path / "CLOCK")
    for _ in range(10):
        clock.advance(60)
        assert guard.now() == clock.now() and guard.doubted
        guard.save(always=True)
    assert (tmp_path / "CLOCK").read_bytes() == kept  # whoever starts next doubts it too
    clock.jump(20 * YEAR + DAY)
    assert guard.now() == clock.now() and not guard.doubted


def test_a_clock_that_stays_behind_the_last_run_is_believed_in_the_end(tmp_path: Path) -> None:
    clock = ManualClock()
    GuardedClock(clock, tmp_path / "CLOCK").save(always=True)
    clock.jump(-YEAR)
    guard = GuardedClock(clock, tmp_path / "CLOCK")
    clock.advance(CLOCK_TRUST_SECONDS + 1)
    assert guard.now() == clock.now() and not guard.doubted
    guard.save(always=True)
    assert not GuardedClock(clock, tmp_path / "CLOCK").doubted
    clock.jump(YEAR)  # it is a jump like any other now
    assert guard.now() == clock.now() - YEAR and guard.doubted


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\xff", "²".encode(), b"-3", b"99999999999999999", b"1500000000\n", b"1500000000 0\n"]
)
def test_a_damaged_file_is_no_time(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "CLOCK").write_bytes(content)
    clock = ManualClock()
    guard = GuardedClock(clock, tmp_path / "CLOCK")
    assert not guard.doubted and guard.now() == clock.now()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'CLOCK'} is damaged and ignored, the clock is believed"
    ]


def test_no_flipped_bit_and_no_cut_of_the_file_moves_time(tmp_path: Path) -> None:
    clock = ManualClock()
    GuardedClock(clock, tmp_path / "CLOCK").save(always=True)
    whole = (tmp_path / "CLOCK").read_bytes()
    flipped = [
        whole[:at] + bytes([whole[at] ^ (1 << bit)]) + whole[at + 1 :] for at in range(len(whole)) for bit in range(8)
    ]
    for content in [*flipped, *(whole[:size] for size in range(len(whole)))]:
        (tmp_path / "CLOCK").write_bytes(content)
        assert GuardedClock(clock, tmp_path / "CLOCK").now() == clock.now()


@pytest.mark.parametrize("jump", [YEAR, -YEAR])
def test_a_store_drops_nothing_on_a_single_jump(tmp_path: Path, jump: float) -> None:
    clock, classes = ManualClock(), TrafficClasses(DEFAULT_TTLS)
    store = Store(
        tmp_path / "store",
        budget=1 << 30,
        segment_bytes=1 << 20,
        arena_bytes=4 << 20,
        slab_bytes=1 << 20,
        arena_policy="lru",
        classes=classes,
        clock=GuardedClock(clock),
    )
    shape, agent = shape_of("ab" * 32, 9_000), classes.named("agent")
    identities = [os.urandom(16) for _ in range(6)]
    slots = store.reserve(identities, 9_000)
    sums = [checksum(store.arena.view(slot)) for slot in slots]
    store.commit(slots, sums, shape, agent, verified=True, durable=True)

    def matched() -> int:
        return len(store.catalog.match([identities], [shape], agent).entries[0])

    clock.jump(jump)
    for _ in range(10):
        store.maintain()
        clock.advance(60)
        assert matched() == 6
    clock.jump(-jump)
    store.maintain()
    assert matched() == 6 and store.disk.segments == 1
    clock.advance(3.5 * DAY)  # time that really passes
    store.maintain()
    assert matched() == 0 and store.disk.segments == 0
    store.close()
