"""What is stored, in memory: the table that look-ups read, use times, ghosts. Never touches or waits for the disk.

Thread-safe by one lock, `lock`, which the store also holds for the few steps that must change files' states and the
table at once. Methods named ``…_locked`` expect the caller to hold it.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from cachesvc.classes import TrafficClass
from cachesvc.clock import Clock
from cachesvc.ghosts import Ghosts
from cachesvc.index.table import Entry, Table, block_id
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.segments.segment import Segment

Row = tuple[Entry, ...]
"""The entries of one block, by shard."""


class Catalog:
    def __init__(self, clock: Clock, events: Counter[str]) -> None:
        self.lock = threading.Lock()
        self._clock = clock
        self._events = events
        self._table: Table = {}
        self._ghosts = Ghosts()
        self._dirty: set[bytes] = set()

    # ---- look-up -------------------------------------------------------------------------------------------------

    def match(
        self, namespace: str, keys: Sequence[bytes], payload_bytes: Sequence[int], traffic_class: TrafficClass
    ) -> tuple[list[Row], MissReason.ValueType]:
        """The longest stored prefix of `keys` and why the next block is missing.

        `payload_bytes` are the sizes by shard: a block of another size or namespace is a miss. Refreshes the use time
        of what it returns, tail first, so that a head is never older than its tail.
        """
        found: list[Row] = []
        reason = MissReason.MISS_REASON_UNSPECIFIED
        with self.lock:
            now = self._clock.now()
            for key in keys:
                row = []
                for shard, size in enumerate(payload_bytes):
                    identity = block_id(key, shard)
                    entry = self._fresh(identity, now)
                    if entry is None or not entry.segment.head.holds(namespace, size):
                        reason = self._ghosts.reason(identity)
                        break
                    row.append(entry)
                if len(row) < len(payload_bytes):
                    break
                found.append(tuple(row))
            for index in range(len(found) - 1, -1, -1):
                for shard, entry in enumerate(found[index]):
                    self._touch(block_id(keys[index], shard), entry, traffic_class, now)
        return found, reason

    def holds(self, identity: bytes, traffic_class: TrafficClass) -> bool:
        """Whether the block is stored; refreshes its use time."""
        with self.lock:
            now = self._clock.now()
            entry = self._fresh(identity, now)
            if entry is not None:
                self._touch(identity, entry, traffic_class, now)
        return entry is not None

    def missing(self, identities: Sequence[bytes]) -> list[int]:
        """Indices of those that are not stored; use times stay as they are."""
        with self.lock:
            now = self._clock.now()
            return [index for index, identity in enumerate(identities) if self._fresh(identity, now) is None]

    def where(self, identity: bytes) -> Entry | None:
        """Where a block lies, whatever its age."""
        with self.lock:
            return self._table.get(identity)

    # ---- change --------------------------------------------------------------------------------------------------

    def drop(self, identity: bytes, entry: Entry, reason: MissReason.ValueType) -> None:
        """Forgets a block, unless it lies elsewhere by now, and remembers why."""
        with self.lock:
            self.drop_locked(identity, entry, reason)

    def take_changed(self) -> tuple[list[tuple[bytes, Entry]], list[bytes]]:
        """What was used and what was dropped since the last call, for the durable index."""
        with self.lock:
            changed, self._dirty = self._dirty, set()
            put = [(i, e) for i in changed if (e := self._table.get(i)) is not None]
            return put, [i for i in changed if i not in self._table]

    # ---- reports -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._table)

    def census(self) -> dict[str, tuple[int, int]]:
        """Blocks and payload bytes by traffic class."""
        rows: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        with self.lock:
            for entry in self._table.values():
                row = rows[entry.traffic_class.name]
                row[0] += 1
                row[1] += entry.segment.head.payload_bytes
        return {name: (blocks, size) for name, (blocks, size) in rows.items()}

    # ---- under the lock ------------------------------------------------------------------------------------------

    def insert_locked(self, identity: bytes, entry: Entry) -> None:
        self._table[identity] = entry
        self._ghosts.forget(identity)

    def drop_locked(self, identity: bytes, entry: Entry, reason: MissReason.ValueType) -> None:
        if self._table.get(identity) is entry:
            del self._table[identity]
            self._ghosts.remember(identity, reason)
            self._dirty.add(identity)
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

    def _touch(self, identity: bytes, entry: Entry, traffic_class: TrafficClass, now: float) -> None:
        entry.used = max(entry.used, now)
        entry.touched = True
        if traffic_class.ttl > entry.traffic_class.ttl:
            entry.traffic_class = traffic_class
        self._dirty.add(identity)
