"""Dropping whole files, for expiry and for room; what is still wanted is written again first, in prefix order.

Every method expects the tier's write lock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from cachesvc.catalog import Catalog
from cachesvc.classes import TrafficClass
from cachesvc.clock import Clock
from cachesvc.disk.durable import DurableIndex
from cachesvc.disk.files import NewBlock, SegmentFiles
from cachesvc.disk.health import WriteHealth
from cachesvc.disk.reading import Reader, Wanted
from cachesvc.errors import BlockUnreadable, WriteRefused
from cachesvc.index.table import Entry, split_id
from cachesvc.limits import MAX_KEPT_SHARE, MAX_READ_BYTES
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.segments.format import SegmentHead, footer_bytes
from cachesvc.segments.segment import Segment, page_aligned


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

    def make_room(self, payload_bytes: int, blocks: int, *, opens: bool) -> None:
        """Drops the oldest segments until one more record fits; writing kept blocks again has room of its own."""
        headroom = int(self._files.segment_bytes * MAX_KEPT_SHARE) + footer_bytes(blocks)
        one = SegmentHead("", payload_bytes, "", 0, 0, 0, 0)
        need = one.offset(1) if opens else one.stride
        while self._bytes_used() + need + headroom > self._budget:
            with self._lock:
                writing = {segment.number for _, segment in self._files.writers.values()}
                idle = [s for s in self._files.segments.values() if not s.pins and s.number not in writing]
            if idle:
                self.reclaim(min(idle, key=lambda s: s.number), MissReason.EVICTED, kept_share=MAX_KEPT_SHARE)
            elif any(not segment.pins for _, segment in self._files.writers.values()):
                key = next(key for key, (_, segment) in self._files.writers.items() if not segment.pins)
                self._files.seal(key)
            else:
                raise WriteRefused(
                    f"store budget of {self._budget} bytes is used up ({self._bytes_used()}) "
                    "by blocks that are being read"
                )

    def reclaim(self, segment: Segment, reason: MissReason.ValueType, *, kept_share: float) -> None:
        """Drops a file. Blocks used since they were written go to newer files first, at most `kept_share` of it."""
        with self._lock:
            segment.pins += 1
            now = self._clock.now()
            here = [(i, e) for i, e in self._catalog.live_locked(segment) if e.expires > now]
        kept = [(i, e) for i, e in here if e.touched][: int(segment.records * kept_share)]
        safe = self._write_again(segment, kept)
        with self._lock:
            segment.pins -= 1
            if not safe and reason is MissReason.EXPIRED:
                return  # what is still wanted has no other place: a later round tries again
            for identity, entry in self._catalog.live_locked(segment):
                self._catalog.drop_locked(identity, entry, MissReason.EXPIRED if entry.expires <= now else reason)
            if segment.pins:
                return  # matched meanwhile: its blocks are gone from the table, the file goes in a later round
            del self._files.segments[segment.number]
            self._files.used -= segment.size
            dropped = self._catalog.gone_locked(segment.identities)
        try:
            segment.path.unlink(missing_ok=True)
            segment.path.parent.rmdir()
        except OSError:
            pass  # the directory holds other segments, or the disk fails: the next start finds what is left
        self._durable.record(delete=dropped, drop_segment=segment.number)
        self._events["reclaimed_segments"] += 1

    def _write_again(self, segment: Segment, kept: list[tuple[bytes, Entry]]) -> bool:
        """True when the new copies are on the device, so that the old ones may go."""
        if kept and not self._health.accepts():
            return False
        batch = max(1, MAX_READ_BYTES // segment.head.stride)
        for start in range(0, len(kept), batch):
            for traffic_class, group in _by_class(kept[start : start + batch]).items():
                blocks = []
                for identity, entry in group:
                    key, shard = split_id(identity)
                    (payload,) = page_aligned(segment.head.payload_bytes, 1)
                    try:
                        checksum = next(self._reader.read([Wanted(key, shard, entry)], [payload]))
                    except BlockUnreadable:
                        continue
                    blocks.append(NewBlock(key, shard, payload, checksum, entry.created, entry.used))
                try:
                    self._files.append(group[0][1].shape, traffic_class, blocks, make_room=None)
                    self._events["rewritten_blocks"] += len(blocks)
                except WriteRefused as error:
                    self._health.failed(error)
                    return False
        try:
            for identity, _ in kept:
                self._files.sync_block(identity)
        except WriteRefused as error:
            self._health.failed(error)
            return False
        return True


def _by_class(entries: Iterable[tuple[bytes, Entry]]) -> dict[TrafficClass, list[tuple[bytes, Entry]]]:
    groups: dict[TrafficClass, list[tuple[bytes, Entry]]] = defaultdict(list)
    for identity, entry in entries:
        groups[entry.traffic_class].append((identity, entry))
    return groups
