"""The catalog beside a dict: whatever is stored, used, written, moved, dropped and loaded again, look-ups say the same.

Few blocks are kept hot, so that every step meets blocks of each kind: not on disk, on disk and hot, on disk only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cachesvc.catalog import Catalog
from cachesvc.classes import TrafficClass
from cachesvc.clock import ManualClock
from cachesvc.index.blocks import StoredUses
from cachesvc.index.table import Entry, block_id
from cachesvc.record import RecordHead
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.segments.format import FOOTER_ENTRY, SegmentHead, footer_entries, shape_of
from cachesvc.segments.segment import Segment

SHAPES = [shape_of("ab" * 32, 4096), shape_of("cd" * 32, 8192)]
AGENT, CHAT = TrafficClass("agent", 100.0), TrafficClass("chat", 250.0)
KEYS = [number.to_bytes(16, "big") for number in range(40)]
SHARDS = 2
HOT = 6

classes = st.sampled_from([AGENT, AGENT, CHAT])
shapes = st.sampled_from([SHAPES[0]] * 5 + SHAPES)
starts = st.sampled_from([0, 0, 0, 4, 20])
counts = st.integers(1, 12)


@dataclass
class Known:
    """What must be known of a block. `place` is the number of its segment and of its record, once it is on disk."""

    shape: Any
    checksum: int
    used: float
    traffic_class: TrafficClass
    placed: float = 0.0
    place: tuple[int, int] | None = None

    @property
    def expires(self) -> float:
        return self.used + self.traffic_class.ttl


class CatalogMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.clock = ManualClock()
        self.sums = iter(range(1, 1 << 40))
        self.number = 0
        self.segments: dict[int, tuple[Segment, list[RecordHead]]] = {}
        self.model: dict[bytes, Known] = {}
        self.gone: dict[bytes, int] = {}
        self.steps = 0
        self.reopen_with({})

    def reopen_with(self, uses: dict[int, StoredUses]) -> None:
        self.dropped: set[bytes] = set()
        self.catalog = Catalog(self.clock, Counter(), self.dropped.update, HOT)
        for segment, heads in self.segments.values():
            entries = np.frombuffer(footer_entries(heads), FOOTER_ENTRY)
            self.catalog.load(segment, entries, uses.get(segment.number))
        self.catalog.settle()

    def forget(self, identity: bytes, reason: int) -> None:
        del self.model[identity]
        self.gone[identity] = reason

    # ---- what a store does ---------------------------------------------------------------------------------------

    @rule(start=starts, count=counts, shape=shapes, traffic_class=classes)
    def commit(self, start: int, count: int, shape: Any, traffic_class: TrafficClass) -> None:
        some = [(key, shard) for shard in range(SHARDS) for key in KEYS[start : start + count]]
        now = self.clock.now()
        added = {}
        self.holds([block_id(*block) for block in some], shape, traffic_class)
        for key, shard in some:
            total = next(self.sums)
            identity = block_id(key, shard)
            if (known := self.model.get(identity)) is not None and known.place is not None:
                continue  # no slot was reserved for it
            added[identity] = Entry(shape, None, 0, total, now, now, traffic_class, now)
            if known is None:
                self.model[identity] = Known(shape, total, now, traffic_class, now)
                self.gone.pop(identity, None)
        self.catalog.add(added)

    @rule(data=st.data(), all_of_them=st.sampled_from([True, True, False]))
    def flush(self, data: st.DataObject, all_of_them: bool) -> None:
        waiting = [identity for identity, known in self.model.items() if known.place is None]
        assert self.catalog.unsaved(waiting) == list(range(len(waiting)))
        if waiting:
            some = st.lists(st.sampled_from(waiting), min_size=1, max_size=8, unique=True)
            self.write(waiting if all_of_them else data.draw(some))

    @precondition(lambda self: self.segments)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """What was used goes to a newer segment, the rest is dropped, the file goes."""
        segment, _ = self.segments[data.draw(st.sampled_from(sorted(self.segments)))]
        now = self.clock.now()
        here = {i: k for i, k in self.model.items() if k.place is not None and k.place[0] == segment.number}
        wanted = sorted(
            (i for i, k in here.items() if k.used > k.placed and k.expires > now), key=lambda i: here[i].place
        )
        with self.catalog.lock:
            assert [i for i, _ in self.catalog.live_locked(segment)] == sorted(here, key=lambda i: here[i].place)
            kept, unused = self.catalog.fresh_locked(segment, touched=True)
        others = [k.used for k in here.values() if k.used <= k.placed and k.expires > now]
        assert unused == max(others, default=-1)
        assert [identity for identity, _ in kept] == wanted
        for identity, entry in kept:
            self.same(identity, entry)
        if wanted:
            self.write(wanted)
        left = [k for k in here.values() if k.place is not None and k.place[0] == segment.number]
        if fresh := [k.used for k in left if k.expires > now]:
            assert not self.catalog.drop_over(segment, MissReason.EVICTED, max(fresh) - 1)
        assert self.catalog.drop_over(segment, MissReason.EVICTED, max(fresh, default=0))
        with self.catalog.lock:
            assert list(self.catalog.live_locked(segment)) == []
            self.catalog.free_locked(segment)
        del self.segments[segment.number]
        for identity, known in here.items():
            if known.place is not None and known.place[0] == segment.number:
                self.forget(identity, MissReason.EXPIRED if known.expires <= now else MissReason.EVICTED)

    def write(self, identities: list[bytes]) -> None:
        for shape in SHAPES:
            ours = [i for i in identities if self.model[i].shape == shape]
            if not ours:
                continue
            self.number += 1
            head = SegmentHead(shape.namespace, shape.payload_bytes, "agent", 100.0, 0, 0.0, self.number)
            segment = Segment(self.number, Path("none"), head, AGENT, len(ours), 0, sealed=True)
            heads = []
            for record, identity in enumerate(ours):
                known, shard = self.model[identity], int.from_bytes(identity[16:], "big")
                total = known.checksum
                heads.append(RecordHead(identity[:16], shard, shape.payload_bytes, record, 0.0, known.used, 0, total))
                known.place, known.placed = (self.number, record), known.used
            with self.catalog.lock:
                self.catalog.moved_locked(segment, heads)
            self.segments[self.number] = segment, heads

    @rule(start=starts, count=counts, traffic_class=classes)
    def use(self, start: int, count: int, traffic_class: TrafficClass) -> None:
        """A prompt of both shards, all of the first shape."""
        keys = KEYS[start : start + count]
        ids = [[block_id(key, shard) for key in keys] for shard in range(SHARDS)]
        now = self.clock.now()
        length, reason = len(keys), 0
        for part in ids:
            for index, identity in enumerate(part[:length]):
                known = self.model.get(identity)
                if known is not None and known.expires <= now:
                    self.forget(identity, MissReason.EXPIRED)
                    known = None
                if known is None or known.shape != SHAPES[0]:
                    length = index
                    reason = self.gone.get(identity, MissReason.NEVER_SEEN)
                    break
        found = self.catalog.match(ids, [SHAPES[0]] * SHARDS, traffic_class, pin=True)
        assert [len(part) for part in found.entries] == [length] * SHARDS
        assert found.reason == reason, (found.reason, reason, keys[length])
        for part, shard_ids in zip(found.entries, ids, strict=True):
            entries = part.entries(slice(0, length))
            for identity, entry in zip(shard_ids[:length], entries, strict=True):
                place = None if entry.segment is None else (entry.segment.number, entry.record)
                assert (place, entry.checksum) == (self.model[identity].place, self.model[identity].checksum)
            assert sum(blocks for _, blocks in part.ages(now)) == length
            ages = [age for age, blocks in part.ages(now) for _ in range(blocks)]
            # Of a block that is hot, too, the row may not know the last use yet.
            assert all(a >= now - self.model[i].used for a, i in zip(ages, shard_ids[:length], strict=True))
            assert {entry.segment for entry in entries} - {None} <= set(part.segments)
            assert all(segment.pins > 0 for segment in part.segments)
        used = [part[:length] for part in ids]
        self.catalog.touch(used, traffic_class, found.entries)
        self.catalog.unpin(found.entries)
        for identity in [identity for part in used for identity in part]:
            self.touch(identity, traffic_class)

    @rule(start=starts, count=counts, shard=st.integers(0, SHARDS - 1), shape=shapes, traffic_class=classes)
    def reserve(self, start: int, count: int, shard: int, shape: Any, traffic_class: TrafficClass) -> None:
        self.holds([block_id(key, shard) for key in KEYS[start : start + count]], shape, traffic_class)

    def holds(self, ids: list[bytes], shape: Any, traffic_class: TrafficClass) -> None:
        now = self.clock.now()
        expected = []
        for identity in ids:
            known = self.model.get(identity)
            if known is not None and known.expires <= now:
                self.forget(identity, MissReason.EXPIRED)
            elif known is not None and known.shape != shape:
                self.forget(identity, MissReason.CORRUPT)
            expected.append(identity in self.model)
        assert self.catalog.holds(ids, shape, traffic_class) == expected
        for identity in ids:
            if identity in self.model:
                self.touch(identity, traffic_class)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        identity = data.draw(st.sampled_from(sorted(self.model)))
        entry = self.catalog.where(identity)
        assert entry is not None
        self.catalog.drop(identity, entry, MissReason.CORRUPT)
        self.forget(identity, MissReason.CORRUPT)
        self.catalog.drop(identity, entry, MissReason.EVICTED)  # it is gone: nothing happens

    @rule(seconds=st.sampled_from([1, 1, 1, 30, 120]))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.segments and self.steps > 8)
    @rule()
    def restart(self) -> None:
        """A clean one: what is on disk is there again, and its uses."""
        uses = {segment.number: some for segment, some in self.catalog.all_uses()}
        assert list(self.catalog.take_uses()) == []
        self.steps = 0
        self.model = {identity: known for identity, known in self.model.items() if known.place is not None}
        self.gone.clear()
        for segment, _ in self.segments.values():
            segment.pins = 0
        self.reopen_with(uses)

    # ---- what must hold ------------------------------------------------------------------------------------------

    @invariant()
    def the_catalog_says_what_the_model_says(self) -> None:
        self.steps += 1
        assert len(self.catalog) == len(self.model)
        ids = [block_id(key, shard) for key in KEYS for shard in range(SHARDS)]
        for identity, entry in zip(ids, self.catalog.where_all(ids), strict=True):
            if entry is None:
                assert identity not in self.model and self.catalog.where(identity) is None
            else:
                self.same(identity, entry)
        assert len(self.catalog._cooling) <= HOT
        for segment, _ in self.segments.values():
            lie_here = [k for k in self.model.values() if k.place is not None and k.place[0] == segment.number]
            assert segment.dead == segment.records - len(lie_here)
        census = Counter[str]()
        for known in self.model.values():
            census[known.traffic_class.name] += 1
        assert {name: count for name, (count, _) in self.catalog.census().items()} == dict(census)

    def same(self, identity: bytes, entry: Entry) -> None:
        known = self.model[identity]
        assert (entry.shape, entry.checksum, entry.used) == (known.shape, known.checksum, known.used)
        assert entry.traffic_class == known.traffic_class
        place = None if entry.segment is None else (entry.segment.number, entry.record)
        assert place == known.place
        if known.used > known.placed:
            assert entry.touched

    def touch(self, identity: bytes, traffic_class: TrafficClass) -> None:
        known = self.model[identity]
        known.used = max(known.used, self.clock.now())
        if traffic_class.ttl > known.traffic_class.ttl:
            known.traffic_class = traffic_class


TestCatalog = CatalogMachine.TestCase
TestCatalog.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
