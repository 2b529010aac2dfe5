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
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path

from cachesvc.catalog import Catalog
from cachesvc.classes import TrafficClass, TrafficClasses
from cachesvc.clock import Clock
from cachesvc.disk.durable import DurableIndex
from cachesvc.disk.files import NewBlock, SegmentFiles
from cachesvc.disk.health import WriteHealth
from cachesvc.disk.opening import Opening
from cachesvc.disk.reading import Reader, Wanted
from cachesvc.disk.reclaim import Reclaimer
from cachesvc.errors import StoreUnusable, WriteRefused
from cachesvc.index.table import Entry, block_id
from cachesvc.limits import SAVE_TOUCHES_SECONDS
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.segments.format import Shape
from cachesvc.segments.segment import Segment
from cachesvc.store_dir import lock_store, next_epoch, write_atomically

log = logging.getLogger("cachesvc.store")


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
        self._clock = clock
        self._lock = catalog.lock
        self._writing = threading.Lock()
        self._index_bytes = 0
        self._save_at = 0.0
        self._health = WriteHealth(clock, events)
        self._lock_file = lock_store(path)
        try:
            names = next_epoch(path)
            self._durable = DurableIndex(path, clock, events)
            self._files = SegmentFiles(
                path,
                names,
                max(1, min(segment_bytes, budget // 16)),
                catalog=catalog,
                durable=self._durable,
                health=self._health,
                classes=classes,
                clock=clock,
                events=events,
            )
            known, entries = self._durable.load()
            Opening(path, catalog, self._files, self._durable, classes, events).run(known, entries)
        except OSError as error:
            os.close(self._lock_file)
            raise StoreUnusable(f"store {path}: {error.strerror}; check the directory and its disk") from error
        self._reader = Reader(catalog, events)
        self._reclaimer = Reclaimer(
            budget,
            lambda: self.bytes_used,
            catalog=catalog,
            files=self._files,
            reader=self._reader,
            durable=self._durable,
            health=self._health,
            clock=clock,
            events=events,
        )

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
        """See `Reader.read`."""
        return self._reader.read(wanted, payloads)

    # ---- write ---------------------------------------------------------------------------------------------------

    def accepts_writes(self) -> bool:
        """Whether a write has a chance now: false for a while after the disk failed one."""
        return self._health.accepts()

    def append(self, shape: Shape, traffic_class: TrafficClass, blocks: Sequence[NewBlock], *, durable: bool) -> None:
        """Writes blocks of the catalog that are not on disk yet (given in prefix order). Raises `WriteRefused`.

        With `durable` the records are synced too, also those that were on disk already.
        """
        with self._writing:
            try:
                unsaved = self.catalog.unsaved([block_id(b.key, b.shard) for b in blocks])
                self._files.append(
                    shape, traffic_class, [blocks[i] for i in unsaved], make_room=self._reclaimer.make_room
                )
                if durable:
                    for block in blocks:
                        self._files.sync_block(block_id(block.key, block.shard))
            except WriteRefused as error:
                self._health.failed(error)
                raise
            if unsaved:
                self._health.succeeded()

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
            if self._durable.mend_is_due():
                self._mend_index()
            now = self._clock.now()
            for key, (_, segment) in list(self._files.writers.items()):
                if segment.head.slice_end <= now:
                    self._files.seal(key)
            with self._lock:
                due = [s for s in self._files.segments.values() if s.head.slice_end <= now and not s.pins]
            for segment in due:
                self._reclaimer.reclaim(segment, MissReason.EXPIRED, kept_share=1.0)
            if self._clock.monotonic() >= self._save_at:
                self._save_at = self._clock.monotonic() + SAVE_TOUCHES_SECONDS
                self._save_touches()
            self._index_bytes = self._durable.measure()

    def close(self) -> None:
        """Seals what is open and closes the index. The store is clean on disk afterwards."""
        with self._writing:
            for key in list(self._files.writers):
                self._files.seal(key)
            self._save_touches()
            if self._durable.fault:
                self._mend_index()
            self._durable.close()
            os.close(self._lock_file)

    # ---- what reports show ---------------------------------------------------------------------------------------

    @property
    def bytes_used(self) -> int:
        """Bytes of all files of the store: segments with headers, padding and dead records, and the index."""
        return self._files.used + self._index_bytes

    @property
    def health(self) -> str:
        return str(self._health)

    @property
    def segments(self) -> int:
        return len(self._files.segments)

    # ---- inside, under `_writing` --------------------------------------------------------------------------------

    def _mend_index(self) -> None:
        self._durable.mend(list(self._files.segments.values()), self.catalog)

    def _save_touches(self) -> None:
        put, delete = self.catalog.take_changed()
        if put or delete:
            self._durable.record(put=put, delete=delete)
