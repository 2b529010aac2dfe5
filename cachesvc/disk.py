"""The disk tier: blocks in segment files, found through the catalog, kept by the durable index.

Rules it holds

* A block is visible here only after its record is whole in its file (write, then catalog).
* The index is never trusted for content: every read checks position, identity and checksum of the record itself.
* Nothing here raises for a damaged or missing block except `BlockUnreadable`, which callers turn into a miss, and
  nothing raises for a failing disk except `WriteRefused`.
* Expiry and capacity drop whole files. Blocks that are still wanted are written again first, in prefix order.

Locks: `_writing` serialises everything that changes files (append, seal, reclaim); the catalog's lock guards segment
states too and is held for memory operations only, so that look-ups never wait for the disk. `_writing` first.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, takewhile
from operator import attrgetter
from pathlib import Path

from cachesvc.catalog import Catalog
from cachesvc.classes import TrafficClass, TrafficClasses
from cachesvc.clock import Clock
from cachesvc.errors import BlockUnreadable, StoreUnusable, WriteRefused
from cachesvc.index.rocks import IndexDamaged, RocksIndex, StoredEntry, StoredSegment
from cachesvc.index.table import Entry, block_id, split_id
from cachesvc.limits import (
    MAX_KEPT_SHARE,
    MAX_OPEN_WRITERS,
    MAX_READ_BYTES,
    SAVE_TOUCHES_SECONDS,
    WRITE_RETRY_SECONDS,
)
from cachesvc.record import Buffer, RecordHead, check_record
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.segments.format import SUFFIX, ForeignFile, SegmentHead, Shape, footer_bytes
from cachesvc.segments.recover import read_head, read_segment, seal_recovered
from cachesvc.segments.segment import Segment, page_aligned
from cachesvc.segments.writer import SegmentWriter
from cachesvc.store_dir import lock_store, next_epoch, write_atomically

log = logging.getLogger("cachesvc.store")

# Blocks in one write to the durable index, when it is written anew.
_INDEX_BATCH = 4_096


@dataclass(frozen=True)
class NewBlock:
    key: bytes
    shard: int
    payload: Buffer
    checksum: int
    created: float
    used: float


@dataclass(frozen=True)
class Wanted:
    """One payload to read: an entry that has a segment, and the identity that its record must prove."""

    key: bytes
    shard: int
    entry: Entry


class DiskTier:
    def __init__(
        self,
        path: Path,
        catalog: Catalog,
        *,
        budget: int,
        segment_bytes: int,
        classes: TrafficClasses,
        clock: Clock,
        events: Counter[str],
    ) -> None:
        """Opens the store, taking its lock and recovering what a crash left. Raises `StoreLocked`, `StoreUnusable`."""
        self.path = path
        self.budget = budget
        self.catalog = catalog
        self.events = events
        self._segment_bytes = max(1, min(segment_bytes, budget // 16))
        self._classes = classes
        self._clock = clock
        self._lock = catalog.lock
        self._writing = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._writers: OrderedDict[tuple[Shape, str, int], tuple[SegmentWriter, Segment]] = OrderedDict()
        self._used = 0
        self._index_bytes = 0
        self._next_segment = 1
        self._write_fault: str | None = None
        self._retry_at = 0.0
        self._save_at = 0.0
        self._index_fault = False
        self._mend_index_at = 0.0
        self._lock_file = lock_store(path)
        try:
            self._daemon, self._epoch = next_epoch(path)
            self._index = self._open_index()
            try:
                known = self._index.segments()
                entries = list(self._index.entries())
            except IndexDamaged as error:
                self._index.close()
                self._index = self._new_index(error)
                known, entries = {}, []
            self._recover(known, entries)
        except OSError as error:
            os.close(self._lock_file)
            raise StoreUnusable(f"store {path}: {error.strerror}; check the directory and its disk") from error

    # ---- read ----------------------------------------------------------------------------------------------------

    def pin(self, entries: Sequence[Sequence[Entry]]) -> list[Segment]:
        """Keeps the files of entries (by shard and block): the segments to give to `unpin`."""
        found = set(map(attrgetter("segment"), chain.from_iterable(entries)))
        segments = [segment for segment in found if segment is not None]
        with self._lock:
            for segment in segments:
                segment.pins += 1
        return segments

    def unpin(self, segments: Iterable[Segment]) -> None:
        with self._lock:
            for segment in segments:
                segment.pins -= 1

    def read(self, wanted: Sequence[Wanted], payloads: Sequence[memoryview]) -> Iterator[int]:
        """Fills `payloads` in order; yields the checksum of each once it is checked. Neighbours are read together.

        Raises `BlockUnreadable` at the first block that cannot be served; a damaged one is dropped for good.
        """
        position = 0
        while position < len(wanted):
            run = _run_length(wanted, position)
            segment = wanted[position].entry.segment
            assert segment is not None, "a block that is only in the arena was to be read from disk"
            targets = payloads[position : position + run]
            try:
                with segment.reading() as descriptor:
                    trailers = segment.read_records(descriptor, wanted[position].entry.record, targets)
            except BlockUnreadable as error:
                self._unreadable(wanted[position], error)
                raise
            for item, payload, trailer in zip(wanted[position : position + run], targets, trailers, strict=True):
                try:
                    found = check_record(
                        payload,
                        trailer,
                        key=item.key,
                        shard=item.shard,
                        number=item.entry.record,
                        segment_tag=segment.head.tag,
                    )
                    if found != item.entry.checksum:
                        raise BlockUnreadable(f"{item.key.hex()} is not the payload that was committed", corrupt=True)
                except BlockUnreadable as error:
                    self._unreadable(item, error)
                    raise
                yield found
            position += run

    # ---- write ---------------------------------------------------------------------------------------------------

    def accepts_writes(self) -> bool:
        """Whether a write has a chance now: false for a while after the disk failed one."""
        return self._write_fault is None or self._clock.monotonic() >= self._retry_at

    def append(self, shape: Shape, traffic_class: TrafficClass, blocks: Sequence[NewBlock], *, durable: bool) -> None:
        """Writes blocks of the catalog that are not on disk yet (given in prefix order). Raises `WriteRefused`.

        With `durable` the records are synced too, also those that were on disk already.
        """
        with self._writing:
            try:
                unsaved = self.catalog.unsaved([block_id(b.key, b.shard) for b in blocks])
                self._append(shape, traffic_class, [blocks[i] for i in unsaved], make_room=True)
                if durable:
                    for block in blocks:
                        self._sync_block(block_id(block.key, block.shard))
            except WriteRefused as error:
                self._write_failed(error)
                raise
            if unsaved:
                self._write_fault = None

    def namespace_seen(self, digest: str, text: str) -> None:
        """Leaves a namespace's canonical JSON beside its segments, for people and for reports."""
        target = self.path / digest / "namespace.json"
        try:
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target, text.encode())
        except OSError as error:
            log.warning("cannot write %s: %s", target, error.strerror)

    # ---- housekeeping --------------------------------------------------------------------------------------------

    def maintain(self) -> None:
        """One round of housekeeping: seals and expires slices whose time has come, saves use times."""
        with self._writing:
            if self._index_fault and self._clock.monotonic() >= self._mend_index_at:
                self._mend_index()
            now = self._clock.now()
            for key, (_, segment) in list(self._writers.items()):
                if segment.head.slice_end <= now:
                    self._seal(key)
            with self._lock:
                due = [s for s in self._segments.values() if s.head.slice_end <= now and not s.pins]
            for segment in due:
                self._reclaim(segment, MissReason.EXPIRED, kept_share=1.0)
            if self._clock.monotonic() >= self._save_at:
                self._save_at = self._clock.monotonic() + SAVE_TOUCHES_SECONDS
                self._save_touches()
            self._index_bytes = sum(file.stat().st_size for file in self._index.path.glob("*") if file.is_file())

    def close(self) -> None:
        """Seals what is open and closes the index. The store is clean on disk afterwards."""
        with self._writing:
            for key in list(self._writers):
                self._seal(key)
            self._save_touches()
            if self._index_fault:
                self._mend_index()
            self._index.close()
            os.close(self._lock_file)

    # ---- what reports show ---------------------------------------------------------------------------------------

    @property
    def bytes_used(self) -> int:
        """Bytes of all files of the store: segments with headers, padding and dead records, and the index."""
        return self._used + self._index_bytes

    @property
    def health(self) -> str:
        return "ok" if self._write_fault is None else f"writes refused: {self._write_fault}"

    @property
    def segments(self) -> int:
        return len(self._segments)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _unreadable(self, item: Wanted, error: BlockUnreadable) -> None:
        log.warning("block is a miss: %s", error)
        if error.corrupt:
            self.catalog.drop(block_id(item.key, item.shard), item.entry, MissReason.CORRUPT)
        else:
            self.events["read_errors"] += 1

    # ---- inside: files (under `_writing`) ------------------------------------------------------------------------

    def _append(
        self, shape: Shape, traffic_class: TrafficClass, blocks: Sequence[NewBlock], *, make_room: bool
    ) -> None:
        """Writes records in order, in as many segments as they need."""
        done = 0
        while done < len(blocks):
            key = (shape, traffic_class.name, traffic_class.slice_end(blocks[done].used))
            if make_room:
                self._make_room(shape.payload_bytes, len(blocks) - done, opens=key not in self._writers)
            writer, segment = self._writer(key, traffic_class)
            room = max(1, (self._segment_bytes - writer.size) // writer.head.stride)
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
            writer.append([(head, b.payload) for head, b in zip(heads, part, strict=True)])
            entries = [
                (
                    block_id(h.key, h.shard),
                    Entry(shape, segment, h.number, h.checksum, h.created, h.used, traffic_class, h.used),
                )
                for h in heads
            ]
            with self._lock:
                self._used += writer.size - segment.size
                segment.size = writer.size
                segment.records = len(writer.records)
                segment.identities += [identity for identity, _ in entries]
                entries = [(i, e) for i, e in entries if self.catalog.move_locked(i, e)]
                self.events["written_blocks"] += len(heads)
            self._record(put=entries)
            if writer.size + writer.head.stride > self._segment_bytes:
                self._seal(key)
            done += len(part)

    def _writer(self, key: tuple[Shape, str, int], traffic_class: TrafficClass) -> tuple[SegmentWriter, Segment]:
        if key in self._writers:
            self._writers.move_to_end(key)
            return self._writers[key]
        while len(self._writers) >= MAX_OPEN_WRITERS:
            self._seal(next(iter(self._writers)))
        shape, _, slice_end = key
        number = self._next_segment
        name = f"{self._daemon}-{self._epoch:06d}-{number:08d}{SUFFIX}"
        path = self.path / shape.namespace / traffic_class.name / str(slice_end) / name
        head = SegmentHead(
            namespace=shape.namespace,
            payload_bytes=shape.payload_bytes,
            traffic_class=traffic_class.name,
            ttl=traffic_class.ttl,
            slice_end=slice_end,
            created=self._clock.now(),
            tag=secrets.randbits(64),
        )
        writer = SegmentWriter(path, head)
        self._next_segment += 1
        segment = Segment(number, path, head, traffic_class, records=0, size=writer.size, sealed=False)
        with self._lock:
            self._segments[number] = segment
            self._used += segment.size
        self._record(segment=segment)
        self._writers[key] = (writer, segment)
        return writer, segment

    def _seal(self, key: tuple[Shape, str, int]) -> None:
        writer, segment = self._writers.pop(key)
        try:
            size = writer.seal()
        except WriteRefused as error:
            # Its records are whole and stay readable; the next start scans it.
            self._write_failed(error)
            return
        with self._lock:
            self._used += size - segment.size
            segment.size, segment.sealed = size, True
        self._record(segment=segment)

    def _sync_block(self, identity: bytes) -> None:
        """Makes sure that the record of a block is on disk: a sealed segment is, an open one is synced."""
        entry = self.catalog.where(identity)
        if entry is None or entry.segment is None or entry.segment.sealed:
            return
        for writer, segment in self._writers.values():
            if segment is entry.segment:
                if segment.synced < segment.records:
                    writer.sync()
                    segment.synced = segment.records
                return
        raise WriteRefused(f"{entry.segment.path} could not be sealed: its records may not be on the device")

    def _make_room(self, payload_bytes: int, blocks: int, *, opens: bool) -> None:
        """Drops the oldest segments until one more record fits; writing kept blocks again has room of its own."""
        headroom = int(self._segment_bytes * MAX_KEPT_SHARE) + footer_bytes(blocks)
        one = SegmentHead("", payload_bytes, "", 0, 0, 0, 0)
        need = one.offset(1) if opens else one.stride
        while self.bytes_used + need + headroom > self.budget:
            with self._lock:
                writing = {segment.number for _, segment in self._writers.values()}
                idle = [s for s in self._segments.values() if not s.pins and s.number not in writing]
            if idle:
                self._reclaim(min(idle, key=lambda s: s.number), MissReason.EVICTED, kept_share=MAX_KEPT_SHARE)
            elif any(not segment.pins for _, segment in self._writers.values()):
                key = next(key for key, (_, segment) in self._writers.items() if not segment.pins)
                self._seal(key)
            else:
                raise WriteRefused(
                    f"store budget of {self.budget} bytes is used up ({self.bytes_used}) by blocks that are being read"
                )

    def _reclaim(self, segment: Segment, reason: MissReason.ValueType, *, kept_share: float) -> None:
        """Drops a file. Blocks used since they were written go to newer files first, at most `kept_share` of it."""
        with self._lock:
            segment.pins += 1
            now = self._clock.now()
            here = [(i, e) for i, e in self.catalog.live_locked(segment) if e.expires > now]
        kept = [(i, e) for i, e in here if e.touched][: int(segment.records * kept_share)]
        safe = self._write_again(segment, kept)
        with self._lock:
            segment.pins -= 1
            if not safe and reason is MissReason.EXPIRED:
                return  # what is still wanted has no other place: a later round tries again
            for identity, entry in self.catalog.live_locked(segment):
                self.catalog.drop_locked(identity, entry, MissReason.EXPIRED if entry.expires <= now else reason)
            if segment.pins:
                return  # matched meanwhile: its blocks are gone from the table, the file goes in a later round
            del self._segments[segment.number]
            self._used -= segment.size
            dropped = self.catalog.gone_locked(segment.identities)
        try:
            segment.path.unlink(missing_ok=True)
            segment.path.parent.rmdir()
        except OSError:
            pass  # the directory holds other segments, or the disk fails: the next start finds what is left
        self._record(delete=dropped, drop_segment=segment.number)
        self.events["reclaimed_segments"] += 1

    def _write_again(self, segment: Segment, kept: list[tuple[bytes, Entry]]) -> bool:
        """True when the new copies are on the device, so that the old ones may go."""
        if kept and not self.accepts_writes():
            return False
        batch = max(1, MAX_READ_BYTES // segment.head.stride)
        for start in range(0, len(kept), batch):
            for traffic_class, group in _by_class(kept[start : start + batch]).items():
                blocks = []
                for identity, entry in group:
                    key, shard = split_id(identity)
                    (payload,) = page_aligned(segment.head.payload_bytes, 1)
                    try:
                        checksum = next(self.read([Wanted(key, shard, entry)], [payload]))
                    except BlockUnreadable:
                        continue
                    blocks.append(NewBlock(key, shard, payload, checksum, entry.created, entry.used))
                try:
                    self._append(group[0][1].shape, traffic_class, blocks, make_room=False)
                    self.events["rewritten_blocks"] += len(blocks)
                except WriteRefused as error:
                    self._write_failed(error)
                    return False
        try:
            for identity, _ in kept:
                self._sync_block(identity)
        except WriteRefused as error:
            self._write_failed(error)
            return False
        return True

    def _write_failed(self, error: WriteRefused) -> None:
        self.events["write_refusals"] += 1
        self._write_fault = str(error)
        self._retry_at = self._clock.monotonic() + WRITE_RETRY_SECONDS
        log.warning("write refused: %s", error)

    def _save_touches(self) -> None:
        put, delete = self.catalog.take_changed()
        if put or delete:
            self._record(put=put, delete=delete)

    def _record(
        self,
        *,
        put: Sequence[tuple[bytes, Entry]] = (),
        delete: Iterable[bytes] = (),
        segment: Segment | None = None,
        drop_segment: int | None = None,
    ) -> None:
        """Writes to the durable index. A failure is counted, not raised: the files hold the same and more."""
        if self._index_fault:
            return  # it takes nothing any more, and will be written anew
        state = None if segment is None else (segment, str(segment.path.relative_to(self.path)))
        try:
            self._index.write(put=put, delete=delete, segment=state, drop_segment=drop_segment)
        except IndexDamaged as error:
            self.events["index_errors"] += 1
            self._index_fault = True
            self._mend_index_at = self._clock.monotonic() + WRITE_RETRY_SECONDS
            log.warning("the durable index did not take a write, and is written anew when it can be: %s", error)

    def _mend_index(self) -> None:
        """Writes the index anew from what is in memory: after one failed write RocksDB takes no other."""
        self._index.close()
        RocksIndex.destroy(self.path / "index")
        self._mend_index_at = self._clock.monotonic() + WRITE_RETRY_SECONDS
        try:
            self._index = RocksIndex(self.path / "index")
            for segment in list(self._segments.values()):
                with self._lock:
                    live = list(self.catalog.live_locked(segment))
                for start in range(0, len(live), _INDEX_BATCH):
                    self._index.write(put=live[start : start + _INDEX_BATCH])
                # After its blocks: a segment that is recorded as sealed has them all.
                self._index.write(segment=(segment, str(segment.path.relative_to(self.path))))
        except IndexDamaged as error:
            log.warning("the durable index cannot be written anew yet: %s", error)
            return
        self._index_fault = False
        self.events["index_rebuilds"] += 1

    # ---- inside: opening -----------------------------------------------------------------------------------------

    def _open_index(self) -> RocksIndex:
        try:
            return RocksIndex(self.path / "index")
        except IndexDamaged as error:
            return self._new_index(error)

    def _new_index(self, why: IndexDamaged) -> RocksIndex:
        """An empty index in place of one that cannot be used; it is filled from the files."""
        path = self.path / "index"
        log.warning("the index cannot be used and is rebuilt from the segments: %s", why)
        RocksIndex.destroy(path)
        self.events["index_rebuilds"] += 1
        try:
            return RocksIndex(path)
        except IndexDamaged as again:
            raise StoreUnusable(f"no index can be made in {path}: {again}") from again

    def _recover(self, known: dict[str, StoredSegment], entries: list[tuple[bytes, StoredEntry]]) -> None:
        """Fills the table: from the index for segments that it knows as sealed, from the files for all others."""
        started = time.monotonic()
        self._next_segment = 1 + max((s.number for s in known.values()), default=0)
        trusted: dict[int, Segment] = {}
        unknown: list[Path] = []
        files = sorted(self.path.glob(f"*/*/*/*{SUFFIX}"))
        for path in files:
            name = str(path.relative_to(self.path))
            try:
                head, size, records = read_head(path)
            except (ForeignFile, OSError) as error:
                self._foreign(path, error)
                continue
            stored = known.get(name)
            if stored is None or records is None or not (stored.sealed and stored.size == size):
                unknown.append(path)
                continue
            trusted[stored.number] = self._register(stored.number, path, head, records, size, sealed=True)
        untrusted = self._load_entries(trusted, entries)
        for done, path in enumerate(unknown, 1):
            self._recover_file(path, known.get(str(path.relative_to(self.path))), untrusted)
            if done % 100 == 0 or done == len(unknown):
                log.info("recovered %d of %d segments from their files", done, len(unknown))
        gone = [identity for identity in untrusted if self.catalog.where(identity) is None]
        if gone:
            self._record(delete=gone)
        present = {str(segment.path.relative_to(self.path)) for segment in self._segments.values()}
        for name, stored in known.items():
            if name not in present:
                self._record(drop_segment=stored.number)
        log.info(
            "store %s: %d blocks in %d segments, %.2f s",
            self.path,
            len(self.catalog),
            len(self._segments),
            time.monotonic() - started,
        )

    def _register(
        self, number: int, path: Path, head: SegmentHead, records: int, size: int, *, sealed: bool
    ) -> Segment:
        traffic_class = self._classes.of_file(head.traffic_class, head.ttl)
        segment = Segment(number, path, head, traffic_class, records=records, size=size, sealed=sealed)
        self._segments[number] = segment
        self._used += size
        return segment

    def _load_entries(
        self, trusted: dict[int, Segment], entries: list[tuple[bytes, StoredEntry]]
    ) -> dict[bytes, StoredEntry]:
        """Returns those of segments that are not trusted: they tell use times, but not what is there."""
        untrusted: dict[bytes, StoredEntry] = {}
        for identity, stored in entries:
            segment = trusted.get(stored.segment)
            if segment is None or stored.record >= segment.records:
                untrusted[identity] = stored
                continue
            traffic_class = self._classes.of_file(stored.traffic_class, segment.head.ttl)
            entry = Entry(
                segment.shape,
                segment,
                stored.record,
                stored.checksum,
                stored.created,
                stored.used,
                traffic_class,
                -1.0 if stored.touched else stored.used,
            )
            segment.place(identity, stored.record)
            self.catalog.insert_locked(identity, entry)
        return untrusted

    def _recover_file(self, path: Path, stored: StoredSegment | None, uses: Mapping[bytes, StoredEntry]) -> None:
        """Takes the blocks that a file holds; `uses` may know later uses of them than the file does."""
        try:
            found = read_segment(path)
        except (ForeignFile, OSError) as error:
            self._foreign(path, error)
            return
        if not found.sealed:
            self.events["recovered_segments"] += 1
            try:
                found = seal_recovered(path, found)
            except OSError as error:
                # A full disk must not keep its blocks from being served; the next start scans the file again.
                log.warning("cannot seal %s: %s", path, error.strerror)
        number = stored.number if stored is not None else self._next_segment
        self._next_segment = max(self._next_segment, number + 1)
        segment = self._register(number, path, found.head, found.records, found.size, sealed=found.sealed)
        if len(found.heads) < found.records and found.sealed:
            self.events["corrupt_blocks"] += found.records - len(found.heads)
        put = []
        for record in found.heads:
            identity = block_id(record.key, record.shard)
            segment.place(identity, record.number)
            old = self.catalog.where(identity)
            if old is None or old.used < record.used:
                used, traffic_class = record.used, segment.traffic_class
                use = uses.get(identity)
                if use is not None and (use.segment, use.record) == (number, record.number) and use.used > used:
                    used, traffic_class = use.used, self._classes.of_file(use.traffic_class, found.head.ttl)
                entry = Entry(
                    segment.shape,
                    segment,
                    record.number,
                    record.checksum,
                    record.created,
                    used,
                    traffic_class,
                    record.used,
                )
                self.catalog.insert_locked(identity, entry)
                put.append((identity, entry))
        self._record(put=put)
        self._record(segment=segment)

    def _foreign(self, path: Path, error: Exception) -> None:
        self.events["foreign_files"] += 1
        log.warning("%s is left alone: %s", path, error)


def _run_length(wanted: Sequence[Wanted], position: int) -> int:
    """How many payloads from `position` on lie one behind the other in one file, within one request's size."""
    first = wanted[position].entry
    limit = max(1, MAX_READ_BYTES // first.shape.payload_bytes)
    length = 1
    while (
        length < limit
        and position + length < len(wanted)
        and wanted[position + length].entry.segment is first.segment
        and wanted[position + length].entry.record == first.record + length
    ):
        length += 1
    return length


def _in_slice(traffic_class: TrafficClass, slice_end: int, block: NewBlock) -> bool:
    return traffic_class.slice_end(block.used) == slice_end


def _by_class(entries: Iterable[tuple[bytes, Entry]]) -> dict[TrafficClass, list[tuple[bytes, Entry]]]:
    groups: dict[TrafficClass, list[tuple[bytes, Entry]]] = defaultdict(list)
    for identity, entry in entries:
        groups[entry.traffic_class].append((identity, entry))
    return groups
