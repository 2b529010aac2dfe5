"""What is stored, in memory: the table that look-ups read, use times, ghosts. Never touches or waits for the disk.

Thread-safe by one lock, `lock`, which the store also holds for the few steps that must change files' states and the
table at once. Methods named ``…_locked`` expect the caller to hold it.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from cachesvc.classes import TrafficClass
from cachesvc.clock import Clock
from cachesvc.ghosts import Ghosts
from cachesvc.histograms import AGES, bucket
from cachesvc.index.table import Entry, Table
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.segments.format import Shape
from cachesvc.segments.segment import Segment
from cachesvc.trace.recorder import Event, Recorder

# Look-ups whose blocks are noted as used before the notes are put together.
_MAX_NOTES: Final = 16


class Found(NamedTuple):
    """What a look-up has found."""

    entries: list[list[Entry]]
    """By shard and block; of a checkpoint shard one, for the last block."""
    stored: int
    """Blocks that all shards have, checkpoint shards not looked at."""
    reason: MissReason.ValueType
    """Why the match ends where it does."""
    place: Event | None
    """Of this look-up in the recording, to be filled, if there is one."""


class Catalog:
    def __init__(self, clock: Clock, events: Counter[str], on_drop: Callable[[bytes], None] = lambda _: None) -> None:
        """`on_drop` is told, under the lock, of each block that is forgotten."""
        self.lock = threading.Lock()
        self.on_drop = on_drop
        self._clock = clock
        self._events = events
        self._table: Table = {}
        self._ghosts = Ghosts()
        self._dirty: set[bytes] = set()
        self._lifetimes: Counter[int] = Counter()
        self._recorder: Recorder | None = None
        self._used: list[Sequence[bytes]] = []
        """Blocks of look-ups, still to be put into `_dirty`."""

    # ---- look-up -------------------------------------------------------------------------------------------------

    def match(
        self,
        identities: Sequence[Sequence[bytes]],
        shapes: Sequence[Shape],
        traffic_class: TrafficClass,
        checkpoints: int = 0,
    ) -> Found:
        """The longest stored prefix, which with checkpoints ends where all of them have a block.

        `identities` are block ids by shard and block, `shapes` those expected by shard: a block of another size or
        namespace is a miss, and so is one that lacks a shard; the last `checkpoints` shards are of the other kind.
        `touch` is to follow for what is used.
        """
        prefixes = len(shapes) - checkpoints
        behind = list(zip(identities, shapes, strict=True))[prefixes:]
        found: list[list[Entry]] = []
        length = len(identities[0])
        reason = MissReason.MISS_REASON_UNSPECIFIED
        with self.lock:
            now = self._clock.now()
            for ids, shape in zip(identities[:prefixes], shapes, strict=False):
                entries = self._prefix(ids[:length], shape, traffic_class, now)
                if len(entries) < length:
                    length = len(entries)
                    reason = self._why_not_locked(ids[length], now)
                found.append(entries)
            stored = length
            while prefixes < len(shapes) and length:
                last = [self._prefix([ids[length - 1]], shape, traffic_class, now) for ids, shape in behind]
                if all(last):
                    found += last
                    break
                if length == stored:
                    reason = self._why_not_locked(behind[last.index([])][0][length - 1], now)
                length = next((n for n in range(length - 1, 0, -1) if behind[0][0][n - 1] in self._table), 0)
            place = self._recorder.place() if self._recorder is not None else None
        for entries in found[:prefixes]:
            del entries[length:]
        return Found(found, stored, reason, place)

    def touch(self, identities: Sequence[Sequence[bytes]], traffic_class: TrafficClass) -> None:
        """Refreshes the use time of matched blocks, by shard, where they lie by now."""
        with self.lock:
            now = self._clock.now()
            for ids in identities:
                for entry in map(self._table.get, ids):
                    if entry is None:
                        continue
                    if entry.traffic_class is traffic_class and entry.used < now:
                        entry.used = now
                    else:
                        entry.touch(traffic_class, now)
                self._note_used(ids)

    def _prefix(self, ids: Sequence[bytes], shape: Shape, traffic_class: TrafficClass, now: float) -> list[Entry]:
        """Entries up to the first block that is not there, has another shape, or has expired."""
        entries: list[Entry] = []
        append = entries.append
        surely_fresh = now - traffic_class.ttl
        for entry in map(self._table.get, ids):
            # The first line says the same as the second, cheaply, for nearly all: look-ups ask for thousands.
            if (
                entry is None
                or entry.shape is not shape
                or entry.traffic_class is not traffic_class
                or (entry.used <= surely_fresh)
            ) and (entry is None or entry.shape != shape or entry.expires <= now):
                break
            append(entry)
        return entries

    def _why_not_locked(self, identity: bytes, now: float) -> MissReason.ValueType:
        self._fresh(identity, now)
        return self._ghosts.reason(identity)

    def holds(self, identities: Sequence[bytes], shape: Shape, traffic_class: TrafficClass) -> list[bool]:
        """Which blocks are stored; refreshes their use time. One of another shape is of no use, and is dropped."""
        with self.lock:
            now = self._clock.now()
            held = [identity in self._table for identity in identities]
            if True not in held:
                return held
            for index, identity in enumerate(identities):
                entry = self._fresh(identity, now)
                if entry is not None and entry.shape != shape:
                    self.drop_locked(identity, entry, MissReason.CORRUPT)
                    entry = None
                if entry is not None:
                    entry.touch(traffic_class, now)
                    self._dirty.add(identity)
                held[index] = entry is not None
        return held

    def unsaved(self, identities: Sequence[bytes]) -> list[int]:
        """Indices of those that are stored, but not on disk."""
        with self.lock:
            return [
                index
                for index, identity in enumerate(identities)
                if (entry := self._table.get(identity)) is not None and entry.segment is None
            ]

    def where(self, identity: bytes) -> Entry | None:
        """Where a block lies, whatever its age."""
        with self.lock:
            return self._table.get(identity)

    # ---- change --------------------------------------------------------------------------------------------------

    def add(self, blocks: Iterable[tuple[bytes, Entry]]) -> None:
        """Makes blocks visible. What is there already stays: the first writer won."""
        with self.lock:
            now = self._clock.now()
            table = self._table
            added: list[bytes] = []
            for identity, entry in blocks:
                old = table.get(identity)
                # One that has expired is replaced, not dropped: its slot is by now the new one's.
                if old is None or old.expires <= now:
                    if old is not None and old.segment is not None:
                        old.segment.dead += 1
                    table[identity] = entry
                    self._ghosts.forget(identity)
                    added.append(identity)
            if self._recorder is not None:
                self._recorder.stored(added)

    def drop(self, identity: bytes, entry: Entry, reason: MissReason.ValueType) -> None:
        """Forgets a block, unless it lies elsewhere by now, and remembers why."""
        with self.lock:
            self.drop_locked(identity, entry, reason)

    def lost(self, identity: bytes, reason: MissReason.ValueType) -> None:
        """Remembers why a block is not there that was on disk before this start."""
        with self.lock:
            if identity not in self._table:
                self._ghosts.remember(identity, reason)

    def take_changed(self) -> tuple[list[tuple[bytes, Entry]], list[bytes]]:
        """What was used and what was dropped since the last call, for the durable index."""
        with self.lock:
            self._fold_used()
            changed, self._dirty = self._dirty, set()
            known = [(i, e) for i in changed if (e := self._table.get(i)) is not None]
            put = [(i, e) for i, e in known if e.segment is not None]
            return put, [i for i in changed if i not in self._table]

    # ---- reports -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._table)

    def lifetimes(self) -> dict[int, int]:
        """Blocks dropped so far, by age (bucket of `histograms.AGES`)."""
        with self.lock:
            return dict(self._lifetimes)

    def record(self, recorder: Recorder | None) -> None:
        """From here on tells it what is stored, asked and dropped, beginning with what is there. Raises `OSError`."""
        with self.lock:
            self._recorder = None
            if recorder is not None:
                recorder.start(self._table)
                self._recorder = recorder

    def census(self) -> dict[str, tuple[int, int]]:
        """Blocks and payload bytes by traffic class."""
        rows: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        with self.lock:
            entries = list(self._table.values())
        for entry in entries:  # look-ups do not wait for that
            row = rows[entry.traffic_class.name]
            row[0] += 1
            row[1] += entry.shape.payload_bytes
        return {name: (blocks, size) for name, (blocks, size) in rows.items()}

    # ---- under the lock ------------------------------------------------------------------------------------------

    def insert_locked(self, identity: bytes, entry: Entry) -> None:
        self._table[identity] = entry
        self._ghosts.forget(identity)

    def move_locked(self, identity: bytes, entry: Entry) -> bool:
        """Where a block lies now. Uses while it was being written count. False when it was dropped meanwhile."""
        old = self._table.get(identity)
        if old is None:
            if entry.segment is not None:
                entry.segment.dead += 1
            return False
        if old.segment is not None:
            old.segment.dead += 1
        entry.touch(old.traffic_class, old.used)
        self._table[identity] = entry
        return True

    def drop_locked(self, identity: bytes, entry: Entry, reason: MissReason.ValueType) -> None:
        if self._table.get(identity) is entry:
            del self._table[identity]
            if entry.segment is not None:
                entry.segment.dead += 1
            self.on_drop(identity)
            self._ghosts.remember(identity, reason)
            self._dirty.add(identity)
            self._lifetimes[bucket(AGES, self._clock.now() - entry.created)] += 1
            if self._recorder is not None:
                self._recorder.dropped(identity, reason)
            self._events[f"{MissReason.Name(reason).lower()}_blocks"] += 1

    def live_locked(self, segment: Segment) -> Iterator[tuple[bytes, Entry]]:
        """The blocks that lie in a segment, in the order of its records."""
        for number, identity in enumerate(segment.identities):
            entry = self._table.get(identity)
            if entry is not None and entry.segment is segment and entry.record == number:
                yield identity, entry

    def gone_locked(self, identities: Iterable[bytes]) -> list[bytes]:
        """Those that are not stored; their drop needs no further note."""
        gone = [identity for identity in identities if identity not in self._table]
        self._dirty.difference_update(gone)
        return gone

    def _fresh(self, identity: bytes, now: float) -> Entry | None:
        entry = self._table.get(identity)
        if entry is not None and entry.expires <= now:
            self.drop_locked(identity, entry, MissReason.EXPIRED)
            return None
        return entry

    def _note_used(self, identities: Sequence[bytes]) -> None:
        """They are noted as a whole: a look-up has no time to put thousands into a set."""
        self._used.append(identities)
        if len(self._used) > _MAX_NOTES:
            self._fold_used()

    def _fold_used(self) -> None:
        self._dirty.update(*self._used)
        self._used.clear()
