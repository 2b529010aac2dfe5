"""Blocks on disk: what look-ups read of them, thousands at once, and 55 bytes of memory each.

`rows` knows each block, `hashes` finds its row. What the blocks of a segment share is the segment's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cachesvc.classes import TrafficClass
from cachesvc.errors import BlockUnreadable
from cachesvc.index.hashes import KeyIndex
from cachesvc.index.rows import NO_CLASS, TOUCHED, Numbers, Rows
from cachesvc.index.table import Entry, words_of
from cachesvc.limits import MAX_BLOCKS, MAX_CLASSES
from cachesvc.segments.format import FooterEntries, Shape
from cachesvc.segments.segment import Segment

# Where the system gives no addresses without memory behind them: this many blocks at least.
_LEAST: Final = 1 << 20


class StoredUses(NamedTuple):
    """What changes of a segment's blocks, by record."""

    classes: Sequence[TrafficClass]
    """By the numbers in `kinds`."""
    used: NDArray[np.float64]
    """Last use, seconds since the epoch."""
    kinds: NDArray[np.uint8]
    """Number of the class; `NO_CLASS` where the block is not stored any more."""
    flags: NDArray[np.uint8]
    """`TOUCHED` where it was used after it was written."""


class DiskBlocks:
    """Not thread-safe: the catalog's lock covers it."""

    def __init__(self) -> None:
        self.rows = _rows()
        self.index = KeyIndex(self.rows)
        self.segments: dict[int, Segment] = {}
        self.changed: set[int] = set()
        """Segments whose uses are to be saved."""
        self._classes: list[TrafficClass] = []
        self._ttls: NDArray[np.float64] = np.zeros(256, np.float64)
        self._ttls[NO_CLASS] = -np.inf

    def __len__(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.rows.nbytes + self.index.nbytes

    # ---- look-up -------------------------------------------------------------------------------------------------

    def find(self, identities: Sequence[bytes]) -> Numbers:
        """The row of each block, -1 where it is not there."""
        return self.index.find(*words_of(identities))

    def usable(self, rows: Numbers, shape: Shape, now: float) -> tuple[NDArray[np.bool_], set[int]]:
        """Which of the rows (-1: none) hold a block of this shape that has not expired, and the segments of all."""
        classes = self.rows.classes.take(rows, mode="wrap")
        good = self.rows.used.take(rows, mode="wrap") + self._ttls.take(classes) > now
        good &= rows >= 0
        numbers = self.rows.segments(rows)
        # Blocks of a prefix lie together: where a segment ends are few places.
        ends = np.flatnonzero(numbers[1:] != numbers[:-1])
        segments = set(numbers[ends].tolist()).union(numbers[-1:].tolist()) & self.segments.keys()
        other = [number for number in segments if self.segments[number].shape != shape]
        if other:
            good &= ~np.isin(numbers, other)
            segments.difference_update(other)
        return good, segments

    def entries(self, rows: Numbers) -> list[Entry]:
        """What is known of these rows; of one that is not stored any more, where it lay."""
        numbers, records = self.rows.place(rows)
        columns = (self.rows.checksums, self.rows.created, self.rows.used, self.rows.classes, self.rows.flags)
        found = []
        for number, record, row, total, created, used, kind, flags in zip(
            numbers.tolist(),
            records.tolist(),
            rows.tolist(),
            *(column[rows].tolist() for column in columns),
            strict=True,
        ):
            segment = self.segments.get(number)
            if segment is None:
                raise BlockUnreadable(f"segment {number} was removed while blocks of it were leased", corrupt=False)
            traffic_class = self._classes[kind] if kind != NO_CLASS else segment.traffic_class
            placed = -1.0 if flags & TOUCHED else float(used)
            found.append(
                Entry(segment.shape, segment, record, total, float(created), float(used), traffic_class, placed, row)
            )
        return found

    # ---- change --------------------------------------------------------------------------------------------------

    def number(self, traffic_class: TrafficClass) -> int:
        """Of a class, in rows."""
        if traffic_class not in self._classes:
            if len(self._classes) == MAX_CLASSES:
                return int(self._ttls[:MAX_CLASSES].argmax())
            self._ttls[len(self._classes)] = traffic_class.ttl
            self._classes.append(traffic_class)
        return self._classes.index(traffic_class)

    def append(
        self,
        segment: Segment,
        words: NDArray[np.uint64],
        shards: NDArray[np.uint16] | int,
        checksums: NDArray[np.uint64] | Sequence[int],
        created: NDArray[np.uint32],
        used: NDArray[np.float64],
    ) -> Numbers:
        """Rows for the next records of a segment, of no use until they are given a class and `insert`ed."""
        rows = self.rows.append(segment.number, len(words))
        self.segments[segment.number] = segment
        self.rows.keys[rows] = words
        self.rows.shards[rows] = shards
        self.rows.checksums[rows] = checksums
        self.rows.created[rows] = created
        self.rows.used[rows] = used
        return rows

    def insert(self, rows: Numbers) -> None:
        """These blocks lie here from now on, and no longer where they lay before."""
        self._bury(self.index.insert(rows))

    def remove(self, rows: Numbers) -> None:
        """These blocks are not stored any more."""
        if len(rows):
            self.index.remove(rows)
            self._bury(rows)

    def put_back(self, entry: Entry) -> None:
        """The reverse for one of them, while its file is there."""
        assert entry.segment is not None, "a block that is not on disk was to be put back there"
        self.rows.classes[entry.row] = self.number(entry.traffic_class)
        entry.segment.dead -= 1
        self.insert(np.array([entry.row]))

    def free(self, segment: Segment) -> None:
        """The file is gone: so are its blocks."""
        self.index.remove(self.live(segment))
        self.rows.free(segment.number)
        self.changed.discard(segment.number)
        self.segments.pop(segment.number, None)

    def _bury(self, rows: Numbers) -> None:
        """What lay in these rows is not there any more."""
        self.rows.classes[rows] = NO_CLASS
        for number, count in zip(*np.unique(self.rows.segments(rows), return_counts=True), strict=True):
            self.segments[int(number)].dead += int(count)
            self.changed.add(int(number))

    def touch(self, rows: Numbers, traffic_class: TrafficClass, now: float) -> None:
        """A use by a request of that class."""
        later = rows[self.rows.used[rows] < now]
        self.rows.used[later] = now
        self.rows.flags[later] |= TOUCHED
        shorter = self._ttls[self.rows.classes[rows]] < traffic_class.ttl
        if shorter.any():
            self.rows.classes[rows[shorter]] = self.number(traffic_class)
        self.changed.update(self.rows.segments(rows).tolist())

    def use(self, row: int, used: float) -> None:
        """A use after it was written."""
        self.rows.used[row] = used
        self.rows.flags[row] |= TOUCHED
        self.changed.add(int(self.rows.segments(np.array([row]))[0]))

    def note(self, entry: Entry) -> None:
        """Takes over the use of a block that is also kept as an object."""
        row = entry.row
        self.rows.used[row] = entry.used
        self.rows.classes[row] = self.number(entry.traffic_class)
        if entry.touched:
            self.rows.flags[row] |= TOUCHED
        if entry.segment is not None:
            self.changed.add(entry.segment.number)

    # ---- by segment ----------------------------------------------------------------------------------------------

    def live(self, segment: Segment) -> Numbers:
        """Rows of the blocks that lie in a segment, in the order of its records."""
        rows = self.rows.of(segment.number)
        found: Numbers = rows[self.rows.classes[rows] != NO_CLASS]
        return found

    def expired(self, rows: Numbers, now: float) -> NDArray[np.bool_]:
        expires: NDArray[np.float64] = self.rows.used[rows] + self._ttls[self.rows.classes[rows]]
        return expires <= now

    def uses(self, segment: Segment) -> StoredUses:
        rows = self.rows.of(segment.number)
        return StoredUses(tuple(self._classes), self.rows.used[rows], self.rows.classes[rows], self.rows.flags[rows])

    def load(self, segment: Segment, entries: FooterEntries, uses: StoredUses | None) -> None:
        """See `Catalog.load`."""
        created, used = entries["created"] // 1_000_000, entries["used"] / 1e6
        words, shards = np.ascontiguousarray(entries["key"]), entries["shard"].astype(np.uint16)
        kinds = np.full(len(entries), self.number(segment.traffic_class), np.uint8)
        flags = np.zeros(len(entries), np.uint8)
        if uses is not None:
            number = np.full(256, NO_CLASS, np.uint8)
            number[: len(uses.classes)] = [self.number(traffic_class) for traffic_class in uses.classes]
            n = min(len(entries), len(uses.kinds))  # what was written since is not in it
            kinds[:n], flags[:n] = number[uses.kinds[:n]], uses.flags[:n]
            used[:n] = np.maximum(used[:n], uses.used[:n])
        stays = (kinds != NO_CLASS) & (entries["damaged"] == 0)
        rows = self.append(segment, words, shards, entries["checksum"], created.astype(np.uint32), used)
        rows, kinds, flags = rows[stays], kinds[stays], flags[stays]
        self.rows.classes[rows] = kinds
        self.rows.flags[rows] = flags
        self._bury(self.index.insert(rows, self.rows.used))
        if uses is None or len(uses.kinds) > len(entries):  # the file ends earlier than it did
            self.changed.add(segment.number)

    def settle(self) -> None:
        """Counts what lies in each segment, when all are loaded."""
        for segment in self.segments.values():
            rows = self.live(segment)
            segment.dead = segment.records - len(rows)
            if len(rows):
                segment.oldest_use = float(self.rows.used[rows].min())

    def packed_keys(self) -> Iterator[tuple[bytes, int]]:
        """All keys, packed, with their shard; some thousand at once."""
        for segment in self.segments.values():
            rows = self.live(segment)
            shards = self.rows.shards[rows]
            for shard in np.unique(shards).tolist():
                yield self.rows.keys[rows[shards == shard]].tobytes(), shard

    def census(self) -> Counter[tuple[str, int]]:
        """Blocks by class and payload size. Needs no lock: it may count a block that just moves twice or not."""
        found: Counter[tuple[str, int]] = Counter()
        for segment in list(self.segments.values()):
            kinds = np.bincount(self.rows.classes[self.rows.of(segment.number)], minlength=256)
            for kind in np.flatnonzero(kinds[:NO_CLASS]).tolist():
                found[self._classes[kind].name, segment.shape.payload_bytes] += int(kinds[kind])
        return found


def seconds(time: float) -> int:
    """The time of a block's creation, as rows keep it."""
    return min(max(0, math.ceil(time)), 2**32 - 1)


def _rows() -> Rows:
    limit = MAX_BLOCKS
    while True:
        try:
            return Rows(limit)
        except OSError:  # the system gives no addresses that have no memory behind them
            if limit <= _LEAST:
                raise
            limit //= 4
