"""What is stored, in memory: the cases in which a block is there twice, or is gone meanwhile."""

from __future__ import annotations

from collections import Counter

from cachesvc.catalog import Catalog
from cachesvc.classes import TrafficClass
from cachesvc.clock import ManualClock
from cachesvc.index.table import Entry
from cachesvc.segments.format import shape_of

SHAPE = shape_of("ab" * 32, 4096)
AGENT = TrafficClass("agent", 100.0)
KEY = b"k" * 16


def entry(now: float, checksum: int) -> Entry:
    return Entry(SHAPE, None, 0, checksum, now, now, AGENT, now)


def test_an_expired_block_that_is_stored_again_keeps_its_new_slot() -> None:
    clock, dropped = ManualClock(), list[bytes]()
    catalog = Catalog(clock, Counter(), dropped.append)
    catalog.add([(KEY, entry(clock.now(), 1))])
    catalog.add([(KEY, entry(clock.now(), 2))])
    assert catalog.where(KEY).checksum == 1, "the first writer won"  # type: ignore[union-attr]
    clock.advance(200)
    catalog.add([(KEY, entry(clock.now(), 3))])
    assert catalog.where(KEY).checksum == 3 and dropped == []  # type: ignore[union-attr]


def test_a_block_that_was_dropped_while_it_was_written_stays_dropped() -> None:
    clock = ManualClock()
    catalog = Catalog(clock, Counter())
    catalog.add([(KEY, entry(clock.now(), 1))])
    with catalog.lock:
        assert catalog.move_locked(KEY, entry(clock.now(), 1))
        assert not catalog.move_locked(b"other".ljust(16), entry(clock.now(), 1))
    assert len(catalog) == 1
