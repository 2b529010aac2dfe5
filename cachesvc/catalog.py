"""What is stored, in memory: what look-ups read, use times, ghosts. Never touches or waits for the disk.

Blocks on disk are rows of a table (`index.blocks`). Those that were written last, and those that are not on disk yet,
are also *hot*: objects in a dict, which small look-ups find sooner. Of a hot block the object knows the uses, and its
row may lag behind; it never says more than is true.

Thread-safe by one lock, `lock`, which the store also holds for the few steps that must change files' states and the
table at once. Methods named ``…_locked`` expect the caller to hold it. No step holds it for more than one look-up or
one segment takes.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cachesvc.classes import TrafficClass
from cachesvc.clock import Clock
from cachesvc.ghosts import Ghosts
from cachesvc.histograms import AGES, bucket
from cachesvc.index.blocks import DiskBlocks, StoredUses, seconds
from cachesvc.index.prefix import Prefix
from cachesvc.index.rows import NO_CLASS, RUN, TOUCHED, Numbers
from cachesvc.index.table import Entry, block_id, words_of
from cachesvc.limits import MAX_HOT_BLOCKS
from cachesvc.record import RecordHead
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.segments.format import FooterEntries, Shape
from cachesvc.segments.segment import Segment
from cachesvc.trace.recorder import Event, Recorder

# Look-ups whose blocks are noted as used before the notes are put together.
_MAX_NOTES: Final = 16

# Blocks that are looked up in the table, or dropped, in one step.
_STEP: Final = 1_024

_NO_ROWS: Final[Numbers] = np.empty(0, np.int64)
_SEGMENT: Final = attrgetter("segment")


class Found(NamedTuple):
    """What a look-up has found."""

    entries: list[Prefix]
    """By shard; of a checkpoint shard the last block only."""
    stored: int
    """Blocks that all shards have, checkpoint shards not looked at."""
    reason: MissReason.ValueType
    """Why the match ends where it does."""
    place: Event | None
    """Of this look-up in the recording, to be filled, if there is one."""


class Catalog:
    def __init__(
        self,
        clock: Clock,
        events: Counter[str],
        on_drop: Callable[[Sequence[bytes]], None] = lambda _: None,
        hot_blocks: int = MAX_HOT_BLOCKS,
    ) -> None:
        """`on_drop` is told, under the lock, of blocks that are forgotten; `hot_blocks` on disk are kept hot."""
        self.lock = threading.Lock()
        self.on_drop = on_drop
        self._clock = clock
        self._events = events
        self._hot: dict[bytes, Entry] = {}
        self._cooling: deque[bytes] = deque()
        """Hot blocks that are on disk, in the order in which they came there."""
        self._hot_blocks = hot_blocks
        self._unsaved = 0
        self._blocks = DiskBlocks()
        self._ghosts = Ghosts()
        self._lifetimes: Counter[int] = Counter()
        self._recorder: Recorder | None = None
        self._used: list[Sequence[bytes]] = []
        """Hot blocks of look-ups, still to be put into `_touched`."""
        self._touched: set[bytes] = set()
        """Hot blocks whose rows lag behind."""

    # ---- look-up -------------------------------------------------------------------------------------------------

    def match(
        self,
        identities: Sequence[Sequence[bytes]],
        shapes: Sequence[Shape],
        traffic_class: TrafficClass,
        checkpoints: int = 0,
        *,
        pin: bool = False,
    ) -> Found:
        """The longest stored prefix, which with checkpoints ends where all of them have a block.

        `identities` are block ids by shard and block, `shapes` those expected by shard: a block of another size or
        namespace is a miss, and so is one that lacks a shard; the last `checkpoints` shards are of the other kind.
        `touch` is to follow for what is used; with `pin`, also `unpin`: until then its files stay.
        """
        prefixes = len(shapes) - checkpoints
        behind = list(zip(identities, shapes, strict=True))[prefixes:]
        found: list[Prefix] = []
        length = len(identities[0])
        reason = MissReason.MISS_REASON_UNSPECIFIED
        with self.lock:
            now = self._clock.now()
            for ids, shape in zip(identities[:prefixes], shapes, strict=False):
                part = self._prefix(ids, length, shape, traffic_class, now)
                if len(part) < length:
                    length = len(part)
                    reason = self._why_not_locked(ids[length], now)
                found.append(part)
            stored = length
            ends = self._stored_at(behind[0][0][:length]) if behind else []
            while behind and length:
                last = [self._prefix([ids[length - 1]], 1, shape, traffic_class, now) for ids, shape in behind]
                if all(last):
                    found += last
                    break
                if length == stored:
                    absent = next(i for i, part in enumerate(last) if not part)
                    reason = self._why_not_locked(behind[absent][0][length - 1], now)
                while ends and ends[-1] >= length:
                    ends.pop()
                length = ends[-1] if ends else 0
            for part in found[:prefixes]:
                part.cut(length)
            for segment in [segment for part in found for segment in part.segments if pin]:
                segment.pins += 1
            place = self._recorder.place() if self._recorder is not None else None
        return Found(found, stored, reason, place)

    def unpin(self, found: Iterable[Prefix]) -> None:
        """Their files may go."""
        with self.lock:
            for part in found:
                for segment in part.segments:
                    segment.pins -= 1

    def touch(
        self, identities: Sequence[Sequence[bytes]], traffic_class: TrafficClass, found: Sequence[Prefix] = ()
    ) -> None:
        """Refreshes the use time of matched blocks, by shard, where they lie by now. `found` saves looking them up."""
        with self.lock:
            now = self._clock.now()
            for shard, ids in enumerate(identities):
                part = found[shard] if shard < len(found) else None
                hot = ids[: len(part.hot)] if part is not None else ids
                if part is not None and len(part.rows) and self._hot:  # some of them may be hot, too
                    hot = [*hot, *filter(self._hot.__contains__, ids[len(hot) :])]
                cold = self._touch_hot(hot, traffic_class, now)
                if part is not None and len(part.rows):
                    rows = part.rows[part.rows >= 0]
                    lies = self._blocks.rows.classes[rows] != NO_CLASS
                    self._blocks.touch(rows[lies], traffic_class, now)
                    cold += [ids[index] for index in part.elsewhere(lies)]
                if cold:
                    rows = self._blocks.find(cold)
                    self._blocks.touch(rows[rows >= 0], traffic_class, now)

    def holds(self, identities: Sequence[bytes], shape: Shape, traffic_class: TrafficClass) -> list[bool]:
        """Which blocks are stored; refreshes their use time. One of another shape is of no use, and is dropped."""
        with self.lock:
            now = self._clock.now()
            held = [identity in self._hot for identity in identities]
            rows = self._blocks.find(identities)
            if True not in held and (rows < 0).all():
                return held
            held_rows, _ = self._blocks.usable(rows, shape, now)
            self._blocks.touch(rows[held_rows], traffic_class, now)
            for index in np.flatnonzero((rows >= 0) & ~held_rows | held).tolist():
                identity = identities[index]
                entry = self._fresh(identity, now)
                if entry is not None and entry.shape != shape:
                    self.drop_locked(identity, entry, MissReason.CORRUPT)
                    entry = None
                if entry is not None:
                    self._touch_hot([identity], traffic_class, now)
                held_rows[index] = entry is not None
            return [bool(held) for held in held_rows]

    def unsaved(self, identities: Sequence[bytes]) -> list[int]:
        """Indices of those that are stored, but not on disk."""
        with self.lock:
            return [
                index
                for index, identity in enumerate(identities)
                if (entry := self._hot.get(identity)) is not None and entry.segment is None
            ]

    def where(self, identity: bytes) -> Entry | None:
        """Where a block lies, whatever its age."""
        with self.lock:
            return self._get(identity)

    def where_all(self, identities: Sequence[bytes]) -> list[Entry | None]:
        """`where`, of many blocks."""
        with self.lock:
            found = list(map(self._hot.get, identities))
            cold = [index for index, entry in enumerate(found) if entry is None]
            if cold:
                rows = self._blocks.find([identities[index] for index in cold])
                there = np.flatnonzero(rows >= 0)
                for index, entry in zip(there.tolist(), self._blocks.entries(rows[there]), strict=True):
                    found[cold[index]] = entry
        return found

    def count_fresh(self, segment: Segment) -> int:
        """Blocks of a segment that have not expired."""
        with self.lock:
            rows = self._blocks.live(segment)
            self._caught_up(rows, segment)
            return int(np.count_nonzero(~self._blocks.expired(rows, self._clock.now())))

    # ---- change --------------------------------------------------------------------------------------------------

    def add(self, blocks: Mapping[bytes, Entry]) -> None:
        """Makes blocks visible that `holds` did not find on disk. What is there already stays: the first writer won."""
        with self.lock:
            hot = self._hot
            if not hot.keys().isdisjoint(blocks):
                now = self._clock.now()
                # One that has expired is replaced, not dropped: its slot is by now the new one's.
                stays = {identity for identity in blocks if (old := hot.get(identity)) and old.expires > now}
                blocks = {identity: entry for identity, entry in blocks.items() if identity not in stays}
                for identity in hot.keys() & blocks.keys():
                    self._forget(identity, hot[identity])
            hot.update(blocks)
            self._unsaved += len(blocks)
            self._ghosts.forget(list(blocks))
            if self._recorder is not None:
                self._recorder.stored(blocks)

    def drop(self, identity: bytes, entry: Entry, reason: MissReason.ValueType) -> None:
        """Forgets a block, unless it lies elsewhere by now, and remembers why."""
        with self.lock:
            self.drop_locked(identity, entry, reason)

    def drop_all(self, segment: Segment, reason: MissReason.ValueType) -> None:
        """Forgets what lies in a segment, step by step; what has expired by now counts as that."""
        left = True
        while left:
            with self.lock:
                rows = self._blocks.live(segment)[:_STEP]
                self._caught_up(rows, segment)
                self._drop_rows(rows, reason)
                left = len(rows) > 0

    def drop_over(self, segment: Segment, reason: MissReason.ValueType, last_use: float) -> bool:
        """Forgets what lies in a segment; nothing, if a block has not expired and was used after `last_use`."""
        with self.lock:
            rows = self._blocks.live(segment)
            self._caught_up(rows, segment)
            fresh = ~self._blocks.expired(rows, self._clock.now())
            if (fresh & (self._blocks.rows.used[rows] > last_use)).any():
                return False
            self._drop_rows(rows, reason)
            return True

    def drop_unused(self, segment: Segment, last_use: float, reason: MissReason.ValueType) -> int:
        """Forgets the blocks of a segment that were used no later than that; how many they were."""
        with self.lock:
            rows = self._blocks.live(segment)
            self._caught_up(rows, segment)
            used = self._blocks.rows.used[rows]
            self._drop_rows(rows[used <= last_use], reason)
            left = used[used > last_use]
            if len(left):  # a file in which nothing is left is to go first: it stays as old as it was
                segment.oldest_use = float(left.min())
        return int(np.count_nonzero(used <= last_use))

    def lost(self, identity: bytes, reason: MissReason.ValueType) -> None:
        """Remembers why a block is not there that was on disk before this start."""
        with self.lock:
            if self._get(identity) is None:
                self._ghosts.remember([identity], reason)

    def load(self, segment: Segment, entries: FooterEntries, uses: StoredUses | None) -> None:
        """Takes the blocks that a segment's footer lists, as far as none was used later elsewhere.

        Segments are given from the oldest to the newest; `settle` is to follow. `uses` is what an earlier run of the
        store noted of them.
        """
        with self.lock:
            self._blocks.load(segment, entries, uses)

    def settle(self) -> None:
        """All segments are loaded."""
        with self.lock:
            self._blocks.settle()

    def take_uses(self) -> Iterator[tuple[Segment, StoredUses]]:
        """What was used or dropped since the last call, by segment, for the durable index."""
        with self.lock:
            self._fold_used()
            touched, self._touched = list(self._touched), set()
        for start in range(0, len(touched), _STEP):
            with self.lock:
                for entry in map(self._hot.get, touched[start : start + _STEP]):
                    if entry is not None and entry.row >= 0:
                        self._blocks.note(entry)
        with self.lock:
            changed, self._blocks.changed = self._blocks.changed, set()
        for number in sorted(changed):
            with self.lock:
                segment = self._blocks.segments.get(number)
                uses = self._blocks.uses(segment) if segment is not None else None
            if segment is not None and uses is not None:
                yield segment, uses

    def all_uses(self) -> Iterator[tuple[Segment, StoredUses]]:
        """`take_uses`, of all segments."""
        with self.lock:
            self._blocks.changed.update(self._blocks.segments)
        return self.take_uses()

    # ---- reports -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._blocks) + self._unsaved

    @property
    def room(self) -> int:
        """Blocks that can still be brought to disk, into whichever segment."""
        return max(0, self._blocks.rows.room - RUN)

    @property
    def nbytes(self) -> int:
        """Bytes of memory taken by blocks on disk."""
        return self._blocks.nbytes

    def lifetimes(self) -> dict[int, int]:
        """Blocks dropped so far, by age (bucket of `histograms.AGES`)."""
        with self.lock:
            return dict(self._lifetimes)

    def record(self, recorder: Recorder | None) -> None:
        """From here on tells it what is stored, asked and dropped, beginning with what is there. Raises `OSError`."""
        with self.lock:
            self._recorder = None
            if recorder is not None:
                recorder.start([identity for identity, entry in self._hot.items() if entry.row < 0])
                for keys, shard in self._blocks.packed_keys():
                    recorder.stored_keys(keys, shard)
                self._recorder = recorder

    def census(self) -> dict[str, tuple[int, int]]:
        """Blocks and payload bytes by traffic class."""
        rows: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        found = self._blocks.census()
        with self.lock:
            hot = list(self._hot.values())
        for entry in hot:  # look-ups do not wait for that
            if entry.row < 0:
                found[entry.traffic_class.name, entry.shape.payload_bytes] += 1
        for (name, size), blocks in found.items():
            rows[name][0] += blocks
            rows[name][1] += blocks * size
        return {name: (blocks, size) for name, (blocks, size) in rows.items()}

    # ---- under the lock ------------------------------------------------------------------------------------------

    def moved_locked(self, segment: Segment, heads: Sequence[RecordHead]) -> None:
        """These records were written behind those of the segment that are known: their blocks lie there now.

        Uses while they were being written count. A block that was dropped meanwhile stays dropped.
        """
        identities = [block_id(head.key, head.shard) for head in heads]
        words, shards = words_of(identities)
        used = np.array([head.used for head in heads])
        created = np.array([seconds(head.created) for head in heads], np.uint32)
        rows = self._blocks.append(segment, words, shards, [head.checksum for head in heads], created, used)
        entries = list(map(self._hot.get, identities))
        if None in entries:
            on_disk = self._blocks.find(identities)
            for index, old in zip(*self._on_disk(on_disk), strict=True):
                entries[index] = entries[index] or old
        kinds = self._blocks.rows.classes
        lies: list[int] = []
        for head, identity, row, entry in zip(heads, identities, rows.tolist(), entries, strict=True):
            if entry is None:
                segment.dead += 1
                continue
            lies.append(row)
            kinds[row] = self._blocks.number(entry.traffic_class)
            if entry.used > head.used:
                self._blocks.use(row, entry.used)
            if entry.segment is None:
                entry.record, entry.checksum, entry.placed, entry.row = head.number, head.checksum, head.used, row
                entry.segment = segment  # last: whoever sees it finds the rest
                self._unsaved -= 1
                self._cooling.append(identity)
            elif self._hot.get(identity) is entry:
                self._hot[identity] = Entry(
                    entry.shape,
                    segment,
                    head.number,
                    head.checksum,
                    entry.created,
                    entry.used,
                    entry.traffic_class,
                    head.used,
                    row,
                )
        self._blocks.insert(np.array(lies, np.int64))
        self._cool()

    def drop_locked(self, identity: bytes, entry: Entry, reason: MissReason.ValueType) -> None:
        now = self._get(identity)
        if now is not None and (now is entry or (now.row >= 0 and now.row == entry.row)):
            self._forget(identity, now)
            self._note_dropped([identity], np.array([now.created]), reason)

    def insert_locked(self, identity: bytes, entry: Entry) -> None:
        """Puts back a block of a segment that was dropped and still lies where `entry` says."""
        self._blocks.put_back(entry)
        self._ghosts.forget([identity])

    def live_locked(self, segment: Segment) -> Iterator[tuple[bytes, Entry]]:
        """The blocks that lie in a segment, in the order of its records."""
        rows = self._blocks.live(segment)
        return zip(self._caught_up(rows, segment), self._blocks.entries(rows), strict=True)

    def fresh_locked(self, segment: Segment, *, touched: bool) -> tuple[list[tuple[bytes, Entry]], float]:
        """Those that have not expired; with `touched` only those that were used after they were written there, and the
        last use of the others (-1: there are none)."""
        rows = self._blocks.live(segment)
        self._caught_up(rows, segment)
        rows = rows[~self._blocks.expired(rows, self._clock.now())]
        again = self._blocks.rows.flags[rows] & TOUCHED > 0 if touched else np.ones(len(rows), np.bool_)
        last_use = float(self._blocks.rows.used[rows[~again]].max(initial=-1.0))
        rows = rows[again]
        return list(zip(self._blocks.rows.identities(rows), self._blocks.entries(rows), strict=True)), last_use

    def changed_locked(self, segment: Segment) -> None:
        """The durable index is to know of it."""
        self._blocks.changed.add(segment.number)

    def free_locked(self, segment: Segment) -> None:
        """The segment is gone, and nothing in it is stored."""
        self._blocks.free(segment)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _prefix(
        self, ids: Sequence[bytes], length: int, shape: Shape, traffic_class: TrafficClass, now: float
    ) -> Prefix:
        """Blocks up to the first that is not there, has another shape, or has expired."""
        hot: list[Entry] = []
        append = hot.append
        surely_fresh = now - traffic_class.ttl
        for entry in map(self._hot.get, ids if length == len(ids) else ids[:length]):
            # The first line says the same as the second, cheaply, for nearly all: look-ups ask for thousands.
            if (
                entry is None
                or entry.shape is not shape
                or entry.traffic_class is not traffic_class
                or (entry.used <= surely_fresh)
            ) and (entry is None or entry.shape != shape or entry.expires <= now):
                break
            append(entry)
        segments: set[Segment | None] = set(map(_SEGMENT, hot))
        other: dict[int, Entry] = {}
        parts: list[Numbers] = []
        at = len(hot)
        whole = len(self._blocks) > 0 or (at < length and ids[at] in self._hot)
        while whole and at < length:
            some = ids[at : min(at + _STEP, length)]
            rows = self._blocks.find(some)
            good, numbers = self._blocks.usable(rows, shape, now)
            if not good.all():
                for index in np.flatnonzero(~good).tolist():
                    entry = self._hot.get(some[index])
                    if entry is None or entry.shape != shape or entry.expires <= now:
                        rows, whole = rows[:index], False
                        break
                    rows[index] = -1
                    other[at + index] = entry
                    segments.add(entry.segment)
            parts.append(rows)
            segments.update(map(self._blocks.segments.__getitem__, numbers))
            at += len(rows)
        files = [segment for segment in segments if segment is not None]
        return Prefix(shape, hot, np.concatenate(parts) if parts else _NO_ROWS, other, files, self._blocks)

    def _stored_at(self, ids: Sequence[bytes]) -> list[int]:
        """Lengths of the prefixes whose last block is there."""
        there = self._blocks.find(ids) >= 0
        return [index for index, identity in enumerate(ids, 1) if there[index - 1] or identity in self._hot]

    def _get(self, identity: bytes) -> Entry | None:
        entry = self._hot.get(identity)
        if entry is None and len(self._blocks):
            row = self._blocks.find([identity])
            return self._blocks.entries(row)[0] if row[0] >= 0 else None
        return entry

    def _on_disk(self, rows: Numbers) -> tuple[list[int], list[Entry]]:
        """Of the rows that are not -1: which they are, and what they say."""
        there = np.flatnonzero(rows >= 0)
        return there.tolist(), self._blocks.entries(rows[there]) if len(there) else []

    def _fresh(self, identity: bytes, now: float) -> Entry | None:
        entry = self._get(identity)
        if entry is not None and entry.expires <= now:
            self.drop_locked(identity, entry, MissReason.EXPIRED)
            return None
        return entry

    def _why_not_locked(self, identity: bytes, now: float) -> MissReason.ValueType:
        self._fresh(identity, now)
        return self._ghosts.reason(identity)

    def _forget(self, identity: bytes, entry: Entry) -> None:
        self._hot.pop(identity, None)
        if entry.row >= 0:
            self._blocks.remove(np.array([entry.row]))
        else:
            self._unsaved -= 1

    def _drop_rows(self, rows: Numbers, reason: MissReason.ValueType) -> None:
        now = self._clock.now()
        expired = self._blocks.expired(rows, now)
        for why, some in ((MissReason.EXPIRED, rows[expired]), (reason, rows[~expired])):
            identities = self._blocks.rows.identities(some)
            self._blocks.remove(some)
            for identity in identities:
                self._hot.pop(identity, None)
            self._note_dropped(identities, self._blocks.rows.created[some], why)

    def _note_dropped(
        self, identities: Sequence[bytes], created: NDArray[np.generic], reason: MissReason.ValueType
    ) -> None:
        if not identities:
            return
        self.on_drop(identities)
        self._ghosts.remember(identities, reason)
        now = self._clock.now()
        self._lifetimes.update(bucket(AGES, now - float(at)) for at in created.tolist())
        if self._recorder is not None:
            self._recorder.dropped(identities, reason)
        self._events[f"{MissReason.Name(reason).lower()}_blocks"] += len(identities)

    # ---- inside: uses --------------------------------------------------------------------------------------------

    def _touch_hot(self, identities: Sequence[bytes], traffic_class: TrafficClass, now: float) -> list[bytes]:
        """Notes the use of those that are hot; the others."""
        cold: list[bytes] = []
        for index, entry in enumerate(map(self._hot.get, identities)):
            if entry is None:
                cold.append(identities[index])
            elif entry.traffic_class is traffic_class and entry.used < now:
                entry.used = now
            else:
                known = entry.traffic_class
                entry.touch(traffic_class, now)
                if entry.row >= 0 and entry.traffic_class is not known:
                    self._blocks.note(entry)  # what is counted by class does not lag behind
        # They are noted as a whole: a look-up has no time to put thousands into a set.
        self._used.append(identities)
        if len(self._used) > _MAX_NOTES:
            self._fold_used()
        return cold

    def _fold_used(self) -> None:
        self._touched.update(*self._used)
        self._used.clear()

    def _caught_up(self, rows: Numbers, segment: Segment) -> list[bytes]:
        """The blocks of these rows of a segment, whose rows now know all uses."""
        identities = self._blocks.rows.identities(rows)
        for entry in map(self._hot.get, identities):
            if entry is not None and entry.segment is segment and entry.row >= 0:
                self._blocks.note(entry)
        return identities

    def _cool(self) -> None:
        """The hot blocks that came to disk first are rows only from now on, if they are too many."""
        while len(self._cooling) > self._hot_blocks:
            identity = self._cooling.popleft()
            entry = self._hot.get(identity)
            if entry is not None and entry.row >= 0:
                if entry.used != entry.placed:
                    self._blocks.note(entry)
                del self._hot[identity]
