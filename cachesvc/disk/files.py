"""The segment files of a store as they are, and appending blocks to them. Methods expect the tier's write lock."""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from cachesvc.catalog import Catalog
from cachesvc.classes import TrafficClass, TrafficClasses
from cachesvc.clock import Clock
from cachesvc.disk.health import WriteHealth
from cachesvc.errors import WriteRefused
from cachesvc.limits import MAX_OPEN_WRITERS
from cachesvc.record import PAGE, Buffer, RecordHead, record_bytes
from cachesvc.segments.format import SUFFIX, SegmentHead, Shape, footer_bytes
from cachesvc.segments.segment import Segment
from cachesvc.segments.writer import SegmentWriter

WriterKey = tuple[Shape, str, int]
"""What the records of an open segment share: shape, name of the class, end of the slice."""


@dataclass(frozen=True)
class NewBlock:
    key: bytes
    shard: int
    payload: Buffer
    checksum: int
    created: float
    used: float


class SegmentFiles:
    """`segments` by number, and `used`, their bytes, change under the catalog's lock, too.

    An open segment counts with the footer that it is to have.
    """

    def __init__(
        self,
        path: Path,
        names: tuple[str, int],
        segment_bytes: int,
        *,
        catalog: Catalog,
        health: WriteHealth,
        classes: TrafficClasses,
        clock: Clock,
        events: Counter[str],
    ) -> None:
        """`names` are the daemon's id and epoch, which make names of files unique."""
        self.segment_bytes = segment_bytes
        self.segments: dict[int, Segment] = {}
        self.writers: OrderedDict[WriterKey, tuple[SegmentWriter, Segment]] = OrderedDict()
        self.used = 0
        self.next_segment = 1
        self._unsealed: list[tuple[SegmentWriter, Segment]] = []
        self._path = path
        self._daemon, self._epoch = names
        self._catalog = catalog
        self._health = health
        self._classes = classes
        self._clock = clock
        self._events = events
        self._lock = catalog.lock

    def append(
        self,
        shape: Shape,
        traffic_class: TrafficClass,
        blocks: Sequence[NewBlock],
        *,
        make_room: Callable[..., None] | None,
    ) -> set[Segment]:
        """Writes records in order, in as many segments as they need, which it returns. Raises `WriteRefused`."""
        done = 0
        touched: set[Segment] = set()
        while done < len(blocks):
            key = (shape, traffic_class.name, traffic_class.slice_end(blocks[done].used))
            if make_room is not None:
                fit = self._fit(shape, self.writers[key][0].size if key in self.writers else PAGE)
                make_room(shape.payload_bytes, min(fit, len(blocks) - done), opens=key not in self.writers)
            writer, segment = self._writer(key, traffic_class)
            room = self._fit(shape, writer.size)
            part = list(takewhile(partial(_in_slice, traffic_class, key[2]), blocks[done : done + room]))
            heads = [
                RecordHead(
                    b.key,
                    b.shard,
                    shape.payload_bytes,
                    len(writer.records) + i,
                    b.created,
                    b.used,
                    writer.head.tag,
                    b.checksum,
                )
                for i, b in enumerate(part)
            ]
            if self._catalog.room < len(part):
                raise WriteRefused("the index is full")
            touched.add(segment)
            writer.append([(head, b.payload) for head, b in zip(heads, part, strict=True)])
            with self._lock:
                size = writer.size + footer_bytes(len(writer.records))
                self.used += size - segment.size
                segment.size = size
                oldest = min(block.used for block in part)
                segment.oldest_use = min(oldest, segment.oldest_use) if segment.records else oldest
                segment.records = len(writer.records)
                self._catalog.moved_locked(segment, heads)
                self._events["written_blocks"] += len(heads)
                self._events["written_bytes"] += len(heads) * writer.head.stride
            if writer.size + writer.head.stride > self.segment_bytes:
                self.seal(key)
            done += len(part)
        return touched

    def _fit(self, shape: Shape, size: int) -> int:
        """How many more records a segment of that size takes; a fresh one takes any."""
        return max(1, (self.segment_bytes - size) // record_bytes(shape.payload_bytes))

    def seal(self, key: WriterKey) -> None:
        """Seals an open segment. One that the disk does not let be sealed stays as it is, and is tried again."""
        self._seal(*self.writers.pop(key))

    def seal_again(self) -> None:
        """Tries again what could not be sealed."""
        waiting, self._unsealed = self._unsealed, []
        for writer, segment in waiting:
            if segment.number in self.segments:
                self._seal(writer, segment)
            else:
                writer.abandon()

    def _seal(self, writer: SegmentWriter, segment: Segment) -> None:
        try:
            size = writer.seal()
        except WriteRefused as error:
            # Its records are whole and stay readable; at the latest the next start scans it.
            if writer.broken:
                writer.abandon()
            else:
                self._unsealed.append((writer, segment))
            self._health.failed(error)
            return
        with self._lock:
            self.used += size - segment.size
            segment.size, segment.sealed = size, True
            self._catalog.changed_locked(segment)

    def sync_block(self, identity: bytes) -> None:
        """Makes sure that the record of a block is on disk: a sealed segment is, an open one is synced."""
        entry = self._catalog.where(identity)
        if entry is not None and entry.segment is not None:
            self.sync(entry.segment)

    def sync(self, segment: Segment) -> None:
        """Makes sure that all records of a segment are on disk. Raises `WriteRefused`."""
        if segment.sealed or segment.synced == segment.records:
            return
        for key, (writer, open_segment) in self.writers.items():
            if open_segment is segment:
                try:
                    writer.sync()
                except WriteRefused:
                    # What the system failed to write once it may forget: a later sync would succeed and mean nothing.
                    del self.writers[key]
                    writer.abandon()
                    raise
                segment.synced = segment.records
                return
        raise WriteRefused(f"{segment.path} could not be sealed: its records may not be on the device")

    def forget(self, segment: Segment) -> None:
        """A file that is gone. Its blocks were dropped from the catalog."""
        for key, (writer, open_segment) in list(self.writers.items()):
            if open_segment is segment:
                del self.writers[key]
                writer.abandon()
        with self._lock:
            if self.segments.pop(segment.number, None) is not None:
                self.used -= segment.size
            self._catalog.free_locked(segment)

    def register(self, number: int, path: Path, head: SegmentHead, records: int, size: int, *, sealed: bool) -> Segment:
        traffic_class = self._classes.of_file(head.traffic_class, head.ttl)
        segment = Segment(number, path, head, traffic_class, records=records, size=size, sealed=sealed)
        self.segments[number] = segment
        self.used += size
        return segment

    def _writer(self, key: WriterKey, traffic_class: TrafficClass) -> tuple[SegmentWriter, Segment]:
        if key in self.writers:
            self.writers.move_to_end(key)
            return self.writers[key]
        while len(self.writers) >= MAX_OPEN_WRITERS:
            self.seal(next(iter(self.writers)))
        shape, _, slice_end = key
        number = self.next_segment
        name = f"{self._daemon}-{self._epoch:06d}-{number:08d}{SUFFIX}"
        path = self._path / shape.namespace / traffic_class.name / str(slice_end) / name
        head = SegmentHead(
            namespace=shape.namespace,
            payload_bytes=shape.payload_bytes,
            traffic_class=traffic_class.name,
            ttl=traffic_class.ttl,
            slice_end=slice_end,
            created=self._clock.now(),
            tag=secrets.randbits(64),
        )
        writer = SegmentWriter(path, head, self._path)
        self.next_segment += 1
        size = writer.size + footer_bytes(0)
        segment = Segment(number, path, head, traffic_class, records=0, size=size, sealed=False)
        with self._lock:
            self.segments[number] = segment
            self.used += segment.size
        self.writers[key] = (writer, segment)
        return writer, segment


def _in_slice(traffic_class: TrafficClass, slice_end: int, block: NewBlock) -> bool:
    return traffic_class.slice_end(block.used) == slice_end
