"""What is stored, in memory: the cases in which a block is there twice, or is gone meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cachesvc.catalog import Catalog
from cachesvc.classes import TrafficClass
from cachesvc.clock import ManualClock
from cachesvc.index.table import Entry
from cachesvc.record import RecordHead
from cachesvc.segments.format import FOOTER_ENTRY, SegmentHead, footer_entries, shape_of
from cachesvc.segments.segment import Segment

SHAPE = shape_of("ab" * 32, 4096)
AGENT = TrafficClass("agent", 100.0)
KEY = b"k" * 16
OTHER = b"o" * 16


def entry(now: float, checksum: int) -> Entry:
    return Entry(SHAPE, None, 0, checksum, now, now, AGENT, now)


def test_an_expired_block_that_is_stored_again_keeps_its_new_slot() -> None:
    clock, dropped = ManualClock(), list[Sequence[bytes]]()
    catalog = Catalog(clock, Counter(), dropped.append)
    catalog.add({KEY: entry(clock.now(), 1)})
    catalog.add({KEY: entry(clock.now(), 2)})
    assert catalog.where(KEY).checksum == 1, "the first writer won"  # type: ignore[union-attr]
    clock.advance(200)
    catalog.add({KEY: entry(clock.now(), 3)})
    assert catalog.where(KEY).checksum == 3 and dropped == []  # type: ignore[union-attr]
    assert len(catalog) == 1


def segment(number: int) -> Segment:
    head = SegmentHead(SHAPE.namespace, SHAPE.payload_bytes, AGENT.name, AGENT.ttl, 0, 0.0, number)
    return Segment(number, Path("none"), head, AGENT, records=1, size=0, sealed=True)


def record(key: bytes, used: float, checksum: int) -> RecordHead:
    return RecordHead(key, 0, SHAPE.payload_bytes, 0, used, used, 0, checksum)


def test_the_use_of_a_block_is_known_when_it_is_not_kept_hot_any_more() -> None:
    clock = ManualClock(1_000.0)
    catalog = Catalog(clock, Counter(), hot_blocks=1)
    catalog.add({KEY: entry(clock.now(), 1), OTHER: entry(clock.now(), 2)})
    with catalog.lock:
        catalog.moved_locked(segment(1), [record(KEY, clock.now(), 1)])
    clock.advance(10)
    catalog.touch([[KEY]], AGENT)
    with catalog.lock:
        catalog.moved_locked(segment(2), [record(OTHER, 1_000.0, 2)])
    assert list(catalog._hot) == [OTHER]
    known = catalog.where(KEY)
    assert known is not None and known.used == 1_010.0 and known.touched


def test_of_two_copies_of_a_block_the_one_used_last_counts_and_of_equals_the_newer() -> None:
    for uses, winner in (((5.0, 9.0), 2), ((9.0, 5.0), 1), ((5.0, 5.0), 2)):
        catalog = Catalog(ManualClock(10.0), Counter())
        for number, used in enumerate(uses, 1):
            entries = np.frombuffer(footer_entries([record(KEY, used, number)]), FOOTER_ENTRY)
            catalog.load(segment(number), entries, None)
        known = catalog.where(KEY)
        assert known is not None and known.checksum == winner and len(catalog) == 1
        assert {name: count for name, (count, _) in catalog.census().items()} == {"agent": 1}


def test_a_large_prefix_is_found_in_parts() -> None:
    clock = ManualClock(1_000.0)
    catalog = Catalog(clock, Counter(), hot_blocks=10)
    keys = [number.to_bytes(16, "little") for number in range(3_000)]
    catalog.add({key: entry(clock.now(), 1) for key in keys})
    heads = [RecordHead(key, 0, SHAPE.payload_bytes, i, 0.0, 1_000.0, 0, 1) for i, key in enumerate(keys[:2_500])]
    with catalog.lock:
        catalog.moved_locked(segment(1), heads)
    for asked in (keys, keys[2_490:], [*keys[:1_500], b"unknown".ljust(16), *keys[:100]], keys[:1_024], keys[:1_025]):
        length = asked.index(b"unknown".ljust(16)) if b"unknown".ljust(16) in asked else len(asked)
        found = catalog.match([asked], [SHAPE], AGENT).entries[0]
        assert len(found) == length
        places = [(e.segment is not None, e.record) for e in found.entries(slice(0, length))]
        numbers = [keys.index(key) for key in asked[:length]]
        assert places == [(number < 2_500, number if number < 2_500 else 0) for number in numbers]
