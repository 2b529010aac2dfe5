"""Dropping whole files, for expiry and for room; what is still wanted is written again first, in prefix order.

Work is a job over the files of one slice, done in steps: a step writes again what fits into `STEP_BYTES`, and the last
one drops the files. Housekeeping takes steps at its pace; a writer that finds no room takes all that are needed.

A prefix never loses its head before its tail. Whoever uses a tail uses its head at the same time, so a head's last use
is never earlier: what is evicted is the least recently used of a file, and what was last used no later than that goes
with it, in whatever file it lies.

Every method expects the tier's write lock.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cachesvc.catalog import Catalog
from cachesvc.classes import TrafficClass
from cachesvc.clock import Clock
from cachesvc.disk.durable import DurableIndex
from cachesvc.disk.files import NewBlock, SegmentFiles
from cachesvc.disk.health import WriteHealth
from cachesvc.disk.reading import Reader, Wanted
from cachesvc.errors import WriteRefused
from cachesvc.index.rows import RUN
from cachesvc.index.table import Entry, split_id
from cachesvc.limits import (
    HIGH_WATER_SEGMENTS,
    LOW_WATER_SEGMENTS,
    MAX_KEPT_SHARE,
    STEP_BYTES,
    WRITE_RETRY_SECONDS,
)
from cachesvc.record import PAGE
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.segments.format import SegmentHead, footer_bytes
from cachesvc.segments.segment import Segment, page_aligned

log = logging.getLogger("cachesvc.store")

Placed = tuple[bytes, Entry]

# Files of a slice that are dropped together.
_MAX_JOB_SEGMENTS = 64

# Files that are looked at when one is to go.
_CANDIDATES = 8


@dataclass
class _Job:
    """Files of one slice, on their way out. Each is pinned by the job."""

    segments: list[Segment]
    reason: MissReason.ValueType
    room: int
    """Records that may still be written again."""
    left: deque[Placed] = field(default_factory=deque)
    last_use: float = -1.0
    """Of the blocks that are to go."""
    tried: set[bytes] = field(default_factory=set)
    targets: set[Segment] = field(default_factory=set)
    """Where what was kept lies now."""


class Reclaimer:
    def __init__(
        self,
        budget: int,
        bytes_used: Callable[[], int],
        *,
        catalog: Catalog,
        files: SegmentFiles,
        reader: Reader,
        durable: DurableIndex,
        health: WriteHealth,
        clock: Clock,
        events: Counter[str],
    ) -> None:
        """`bytes_used` tells the bytes of all files of the store, which `budget` bounds."""
        self._budget = budget
        self._bytes_used = bytes_used
        self._catalog = catalog
        self._files = files
        self._reader = reader
        self._durable = durable
        self._health = health
        self._clock = clock
        self._events = events
        self._lock = catalog.lock
        self._job: _Job | None = None
        self._trimming = False
        self._later: dict[int, float] = {}
        """Segments that could not go, and when that is tried again (monotonic seconds)."""
        self._stuck = False
        """A file could not be removed."""

    # ---- for writers ---------------------------------------------------------------------------------------------

    def make_room(self, payload_bytes: int, blocks: int, *, opens: bool) -> None:
        """Drops the oldest segments until so many records fit; writing kept blocks again has room of its own.

        Raises `WriteRefused` when no room can be made.
        """
        need = self._need(payload_bytes, blocks, opens=opens)
        while (used := self._bytes_used()) + need > self._budget or self._catalog.room < blocks:
            job = self._job if self._job is not None and self._job.reason is MissReason.EVICTED else self._eviction()
            job = job or self._job
            if job is self._job:
                self._job = None
            if job is not None:
                while self._advance(job):
                    pass
                if self._stuck:
                    raise WriteRefused(f"store budget of {self._budget} bytes is used up ({used}): no file can go")
            elif not self._seal_one():
                raise WriteRefused(
                    f"store budget of {self._budget} bytes is used up ({used}) by blocks that are being read"
                )

    def _need(self, payload_bytes: int, blocks: int, *, opens: bool) -> int:
        """Free bytes with which records are written: what an eviction keeps must still find room after them."""
        head = SegmentHead("", payload_bytes, "", 0, 0, 0, 0)
        records = head.offset(blocks) if opens else blocks * head.stride
        return records + footer_bytes(blocks) + int(self._files.segment_bytes * MAX_KEPT_SHARE)

    def _make_room_to_keep(self, payload_bytes: int, blocks: int, *, opens: bool) -> None:
        """The same for a block that is written again because its slice is over: its file stays until then."""
        need = self._need(payload_bytes, blocks, opens=opens)
        while (used := self._bytes_used()) + need > self._budget or self._catalog.room < blocks:
            job = self._eviction()
            while job is not None and self._advance(job):
                pass
            if job is None or self._stuck:
                raise WriteRefused(f"store budget of {self._budget} bytes is used up ({used}): what expires waits")

    # ---- for housekeeping ----------------------------------------------------------------------------------------

    def step(self) -> int | None:
        """One bounded piece of work: bytes that were written again, or None when there is nothing to do now."""
        if self._job is None:
            self._job = self._expiry() or self._trim()
        if self._job is None:
            return None
        before = self._events["rewritten_bytes"]
        if not self._advance(self._job):
            self._job = None
        return self._events["rewritten_bytes"] - before

    def stop(self) -> None:
        """Gives up what is under way; it is begun again at the next start."""
        if self._job is not None:
            self._release(self._job)
            self._job = None

    # ---- inside: what goes next ----------------------------------------------------------------------------------

    def _expiry(self) -> _Job | None:
        """The files of the first slice that is over."""
        now = self._clock.now()
        with self._lock:
            due = [s for s in self._files.segments.values() if s.head.slice_end <= now and self._may_go(s)]
            if not due:
                return None
        first = _slice(min(due, key=lambda s: (s.head.slice_end, s.number)))
        return self._begin(self._fitting([s for s in due if _slice(s) == first]), MissReason.EXPIRED)

    def _fitting(self, files: list[Segment]) -> list[Segment]:
        """As many of them as leave room for what is kept of them, those that cost the least first; one at least."""
        kept = {segment.number: self._catalog.count_fresh(segment) for segment in files[:_MAX_JOB_SEGMENTS]}
        room = self._mark(HIGH_WATER_SEGMENTS) - self._bytes_used()
        chosen: list[Segment] = []
        for segment in sorted(files[:_MAX_JOB_SEGMENTS], key=lambda s: (kept[s.number], s.number)):
            count = kept[segment.number]
            room -= PAGE + count * segment.head.stride + footer_bytes(count)
            if chosen and count and room < 0:
                break
            chosen.append(segment)
        return sorted(chosen, key=lambda s: s.number)

    def _trim(self) -> _Job | None:
        """The next file to go between the high and the low water mark."""
        water = LOW_WATER_SEGMENTS if self._trimming else HIGH_WATER_SEGMENTS
        self._trimming = self._bytes_used() > self._mark(water)
        return self._eviction() if self._trimming else None

    def _mark(self, segments: float) -> int:
        """Bytes in use that leave room for so many segments."""
        return self._budget - int(segments * self._files.segment_bytes)

    def _eviction(self) -> _Job | None:
        """One of the files whose blocks were used the longest ago: the first of them that gains enough room.

        While the disk takes no writes, one of which nothing is to be kept.
        """
        with self._lock:
            writing = {segment.number for _, segment in self._files.writers.values()}
            idle = [s for s in self._files.segments.values() if self._may_go(s) and s.number not in writing]
        writable = self._health.accepts()
        best: _Job | None = None
        for segment in heapq.nsmallest(
            _CANDIDATES if writable else len(idle), idle, key=lambda s: (s.oldest_use, s.number)
        ):
            job = self._begin([segment], MissReason.EVICTED)
            if best is None or len(job.left) < len(best.left):
                best, job = job, best
            if job is not None:
                self._release(job)
            if len(best.left) <= (MAX_KEPT_SHARE * segment.records if writable else 0):
                break
        if best is not None and best.left and not writable:
            self._release(best)
            return None
        if best is not None and len(best.left) > best.room:  # all are in use: the less recently used half of one goes
            order = sorted(range(len(best.left)), key=lambda i: (-best.left[i][1].used, i))
            best.last_use = max(best.last_use, best.left[order[best.room]][1].used)
            best.left = deque(best.left[i] for i in sorted(order[: best.room]))
        return best

    def _may_go(self, segment: Segment) -> bool:
        """Nobody reads it, and it did not fail to go just now."""
        return not segment.pins and self._later.get(segment.number, 0.0) <= self._clock.monotonic()

    def _begin(self, segments: list[Segment], reason: MissReason.ValueType) -> _Job:
        records = sum(segment.records for segment in segments)
        job = _Job(segments, reason, records)
        with self._lock:
            for segment in segments:
                segment.pins += 1
        fresh, job.last_use = self._fresh(job)
        job.left.extend(_used_after(job.last_use, fresh))
        if reason is MissReason.EVICTED:
            stride, files = segments[0].head.stride, self._files_of(job)
            room = int(MAX_KEPT_SHARE * records) * stride - files * (PAGE + footer_bytes(0))
            room //= stride + footer_bytes(1) - footer_bytes(0)
            job.room = max(0, min(room, self._catalog.room - files * RUN))
        return job

    def _files_of(self, job: _Job) -> int:
        """How many files are opened for what it keeps, at most: one for each class and slice."""
        return len({(e.traffic_class.name, e.traffic_class.slice_end(e.used)) for _, e in job.left})

    def _seal_one(self) -> bool:
        key = next((key for key, (_, segment) in self._files.writers.items() if not segment.pins), None)
        if key is not None:
            self._files.seal(key)
        return key is not None

    def _fresh(self, job: _Job) -> tuple[list[Placed], float]:
        """What may be written again, in prefix order: for expiry all that is fresh, for room what was used since. And
        the last use of the others."""
        found: list[Placed] = []
        last_use = -1.0
        for segment in job.segments:
            with self._lock:  # for one file at a time: look-ups wait for it
                fresh, unused = self._catalog.fresh_locked(segment, touched=job.reason is not MissReason.EXPIRED)
            found += [(identity, entry) for identity, entry in fresh if identity not in job.tried]
            last_use = max(last_use, unused)
        return found, last_use

    # ---- inside: carrying it out ---------------------------------------------------------------------------------

    def _advance(self, job: _Job) -> bool:
        """One step; False when the job is over."""
        if job.left:
            stride = job.segments[0].head.stride
            batch = [job.left.popleft() for _ in range(min(len(job.left), max(1, STEP_BYTES // stride)))]
            job.tried.update(identity for identity, _ in batch)
            job.room -= len(batch)
            if self._write_again(job, batch):
                return True
            self._put_off(job)  # what is still wanted has no other place
            return False
        if self._health.accepts():
            job.left.extend(_used_after(job.last_use, self._fresh(job)[0])[: max(0, job.room)])
        if job.left:
            return True  # used meanwhile
        if self._sync(job.targets):
            self._drop(job)
        else:
            self._put_off(job)
        return False

    def _write_again(self, job: _Job, batch: list[Placed]) -> bool:
        """False when the disk refuses."""
        if not self._health.accepts():
            return False
        make_room = self._make_room_to_keep if job.reason is MissReason.EXPIRED else None
        for traffic_class, group in _by_class(batch).items():
            payloads = page_aligned(job.segments[0].head.payload_bytes, len(group))
            wanted = [Wanted(*split_id(identity), entry) for identity, entry in group]
            blocks = [
                NewBlock(item.key, item.shard, payload, total, item.entry.created, item.entry.used)
                for item, payload, total in zip(wanted, payloads, self._reader.read_each(wanted, payloads), strict=True)
                if total is not None
            ]
            try:
                job.targets |= self._files.append(group[0][1].shape, traffic_class, blocks, make_room=make_room)
            except WriteRefused as error:
                self._health.failed(error)
                return False
            self._events["rewritten_blocks"] += len(blocks)
            self._events["rewritten_bytes"] += len(blocks) * job.segments[0].head.stride
        return True

    def _sync(self, segments: Iterable[Segment]) -> bool:
        """True when the new copies are on the device, so that the old ones may go."""
        try:
            for segment in segments:
                self._files.sync(segment)
        except WriteRefused as error:
            self._health.failed(error)
            return False
        return True

    def _drop(self, job: _Job) -> None:
        self._release(job)
        # A file in which something was used meanwhile, or could not be read just now, stays as it is.
        over = [s for s in job.segments if self._catalog.drop_over(s, job.reason, job.last_use)]
        with self._lock:  # matched meanwhile: its blocks are gone from the table, the file goes in a later round
            idle = [segment for segment in over if not segment.pins]
        gone = [segment for segment in idle if self._unlink(segment.path)]
        self._stuck = len(gone) < len(idle)
        self._try_later([s for s in job.segments if s not in over or (s in idle and s not in gone)])
        for segment in gone:
            self._files.forget(segment)
        with self._lock:
            others = list(self._files.segments.values())
        where = _slice(job.segments[0])
        if gone and not any(_slice(other) == where for other in others):
            _remove_directory(job.segments[0].path.parent)
        self._durable.forget([segment.head.tag for segment in gone])
        self._events["reclaimed_segments"] += len(gone)
        if job.reason is MissReason.EVICTED and over:
            self._drop_tails(job.last_use)

    def _drop_tails(self, last_use: float) -> None:
        """Drops what was used no later than what has just gone, in other files: the ends of prefixes that were cut."""
        with self._lock:
            others = [s for s in self._files.segments.values() if s.oldest_use <= last_use and s.dead < s.records]
        for segment in others:
            self._events["dropped_tails"] += self._catalog.drop_unused(segment, last_use, MissReason.EVICTED)

    def _unlink(self, path: Path) -> bool:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._events["unlink_errors"] += 1
            log.warning("cannot remove %s: %s", path, error.strerror)
            return False
        return True

    def _put_off(self, job: _Job) -> None:
        self._release(job)
        self._try_later(job.segments)

    def _try_later(self, segments: Iterable[Segment]) -> None:
        now = self._clock.monotonic()
        self._later = {number: at for number, at in self._later.items() if at > now}
        self._later.update((segment.number, now + WRITE_RETRY_SECONDS) for segment in segments)

    def _release(self, job: _Job) -> None:
        with self._lock:
            for segment in job.segments:
                segment.pins -= 1


def _used_after(last_use: float, blocks: Iterable[Placed]) -> list[Placed]:
    """Those that do not go with what was used no later than that."""
    return [(identity, entry) for identity, entry in blocks if entry.used > last_use]


def _slice(segment: Segment) -> tuple[str, str, int]:
    """What the files of one directory share."""
    return segment.head.namespace, segment.head.traffic_class, segment.head.slice_end


def _remove_directory(path: Path) -> None:
    with contextlib.suppress(OSError):  # somebody else's file lies there, or the disk fails: it does no harm
        path.rmdir()


def _by_class(entries: Iterable[Placed]) -> dict[TrafficClass, list[Placed]]:
    groups: dict[TrafficClass, list[Placed]] = defaultdict(list)
    for identity, entry in entries:
        groups[entry.traffic_class].append((identity, entry))
    return groups
