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
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from cachesvc.catalog import Catalog
from cachesvc.classes import TrafficClass, TrafficClasses
from cachesvc.clock import Clock
from cachesvc.disk.durable import DurableIndex
from cachesvc.disk.files import NewBlock, SegmentFiles
from cachesvc.disk.health import WriteHealth
from cachesvc.disk.opening import Opening
from cachesvc.disk.pace import Pace
from cachesvc.disk.place import Place
from cachesvc.disk.reading import Reader, Wanted
from cachesvc.disk.reclaim import Reclaimer
from cachesvc.disk.scrub import Scrubber
from cachesvc.errors import StoreUnusable, WriteRefused
from cachesvc.index.table import block_id
from cachesvc.limits import (
    DEFAULT_REWRITE_RATE,
    DEFAULT_SCRUB_RATE,
    HOUSEKEEPING_SECONDS,
    SAVE_TOUCHES_SECONDS,
)
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.segments.format import Shape
from cachesvc.store_dir import next_epoch, write_atomically

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
        rewrite_rate: int = DEFAULT_REWRITE_RATE,
        scrub_rate: int = DEFAULT_SCRUB_RATE,
    ) -> None:
        """Opens the store, taking its lock and recovering what a crash left. Raises `StoreLocked`, `StoreUnusable`.

        The rates, in bytes per second, bound what housekeeping writes again, and what it reads to find damage.
        """
        self.path = path
        self.budget = budget
        self.catalog = catalog
        self._clock = clock
        self._events = events
        self._lock = catalog.lock
        self._writing = threading.Lock()
        self._index_bytes = 0
        self._save_at = 0.0
        self._health = WriteHealth(clock, events)
        self._place = Place(path)
        try:
            names = next_epoch(path)
            self._durable = DurableIndex(path, clock, events)
            self._files = SegmentFiles(
                path,
                names,
                max(1, min(segment_bytes, budget // 16)),
                catalog=catalog,
                health=self._health,
                classes=classes,
                clock=clock,
                events=events,
            )
            self._index_bytes = self._durable.measure()
            Opening(path, catalog, self._files, self._durable, classes, events).run()
        except OSError as error:
            self._place.close()
            raise StoreUnusable(f"store {path}: {error.strerror}; check the directory and its disk") from error
        self._reader = Reader(catalog, events)
        self._reclaimer = Reclaimer(
            budget,
            lambda: self.bytes_used + self._index_bytes,  # while it is compacted, the index is there twice
            catalog=catalog,
            files=self._files,
            reader=self._reader,
            durable=self._durable,
            health=self._health,
            clock=clock,
            events=events,
        )
        self._scrubber = Scrubber(path, catalog, self._files, self._reader, clock, events)
        self._rewrite_pace = Pace(clock, rewrite_rate)
        self._scrub_pace = Pace(clock, scrub_rate)

    # ---- read ----------------------------------------------------------------------------------------------------

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

    def maintain(self) -> float:
        """One round of housekeeping. Returns the seconds until the next is wanted: few while work waits for its pace.

        Seals and expires slices whose time has come, makes room before writers need it, saves use times, looks for
        damage, and mends what failed.
        """
        with self._writing:
            if not self._place.is_ours() and not self._begin_anew():
                return HOUSEKEEPING_SECONDS  # what lies there may be another daemon's
            self._health.probe(self.path)
            if self._health.accepts():
                self._files.seal_again()
            if self._durable.mend_is_due():
                self._mend_index()
            now = self._clock.now()
            for key, (_, segment) in list(self._files.writers.items()):
                if segment.head.slice_end <= now:
                    self._files.seal(key)
            if self._clock.monotonic() >= self._save_at:
                self._save_at = self._clock.monotonic() + SAVE_TOUCHES_SECONDS
                self._save_touches()
            self._index_bytes = self._durable.measure()
        return min(self._reclaim(), self._scrub(), HOUSEKEEPING_SECONDS)

    def close(self) -> None:
        """Seals what is open and closes the index. The store is clean on disk afterwards."""
        with self._writing:
            self._scrubber.save(always=True)
            self._reclaimer.stop()
            for key in list(self._files.writers):
                self._files.seal(key)
            self._save_touches()
            if self._durable.fault:
                self._mend_index()
            self._durable.close()
            self._place.close()

    # ---- what reports show ---------------------------------------------------------------------------------------

    @property
    def bytes_used(self) -> int:
        """Bytes of all files of the store: segments with headers, padding and dead records, and the index."""
        return self._files.used + self._index_bytes + self._durable.grown

    @property
    def dead_bytes(self) -> int:
        """Bytes of records that nobody can ask for any more, in files that are still there."""
        with self._lock:
            return sum(segment.dead * segment.head.stride for segment in self._files.segments.values())

    @property
    def write_amplification(self) -> float:
        """Bytes of records written since the start, by those of new blocks."""
        written, again = self._events["written_bytes"], self._events["rewritten_bytes"]
        return written / (written - again) if written > again else 1.0

    @property
    def health(self) -> str:
        return str(self._health)

    @property
    def segments(self) -> int:
        return len(self._files.segments)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _reclaim(self) -> float:
        """Takes steps of expiry and of making room, as many as the pace allows: seconds until there may be more."""
        while not (wait := self._rewrite_pace.wait()):
            with self._writing:
                written = self._reclaimer.step()
            if written is None:
                return HOUSEKEEPING_SECONDS
            self._rewrite_pace.spend(written)
        return wait

    def _scrub(self) -> float:
        while not (wait := self._scrub_pace.wait()):
            read = self._scrubber.step()
            if not read:
                wait = HOUSEKEEPING_SECONDS
                break
            self._scrub_pace.spend(read)
        self._scrubber.save()
        return wait

    # ---- inside, under `_writing` --------------------------------------------------------------------------------

    def _begin_anew(self) -> bool:
        """The directory was deleted underneath: what is gone is forgotten, and a new one is begun where it was."""
        self._health.failed(WriteRefused(f"the store's directory {self.path} was deleted or replaced"))
        if not self._place.take_again():
            return False
        lost = [segment for segment in list(self._files.segments.values()) if not segment.path.exists()]
        log.warning("the store's directory was deleted: %d of its files are gone, it is begun anew", len(lost))
        for segment in lost:
            self.catalog.drop_all(segment, MissReason.CORRUPT)
            self._files.forget(segment)
        self._mend_index()
        return True

    def _mend_index(self) -> None:
        self._durable.mend(self.catalog)

    def _save_touches(self) -> None:
        self._durable.save(self.catalog.take_uses())
