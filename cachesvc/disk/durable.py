"""The durable index as the disk tier uses it: what fails is counted and mended, and nothing is lost by it.

Every method expects the tier's write lock.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from cachesvc.catalog import Catalog
from cachesvc.clock import Clock
from cachesvc.errors import StoreUnusable
from cachesvc.index.rocks import IndexDamaged, IndexUnwritable, RocksIndex, StoredEntry, StoredSegment
from cachesvc.index.table import Entry
from cachesvc.limits import WRITE_RETRY_SECONDS
from cachesvc.segments.segment import Segment

log = logging.getLogger("cachesvc.store")

# Blocks in one write to the durable index, when it is written anew.
_INDEX_BATCH = 4_096

# What a block's row takes in its log, at most.
_ROW_BYTES = 128


class DurableIndex:
    def __init__(self, path: Path, clock: Clock, events: Counter[str]) -> None:
        """Opens the index of the store at `path`; one that cannot be used is replaced. Raises `StoreUnusable`."""
        self.fault = False
        """It failed a write, and is to be mended."""
        self.grown = 0
        """Bytes that were put into it since it was measured."""
        self._path = path
        self._directory = path / "index"
        self._clock = clock
        self._events = events
        self._mend_at = 0.0
        self._index: RocksIndex | None = self._open()

    def load(self) -> tuple[dict[str, StoredSegment], list[tuple[bytes, StoredEntry]]]:
        """All it knows: segments by path relative to the store, and blocks. Nothing when it is damaged."""
        try:
            if self._index is not None:
                return self._index.segments(), list(self._index.entries())
        except IndexDamaged as error:
            self.close()
            self._index = self._renew(error)
        return {}, []

    def record(
        self,
        *,
        put: Sequence[tuple[bytes, Entry]] = (),
        delete: Iterable[bytes] = (),
        segment: Segment | None = None,
        drop_segments: Iterable[int] = (),
    ) -> None:
        """Writes to the durable index. A failure is counted, not raised: the files hold the same and more."""
        if self.fault or self._index is None:
            return  # it takes nothing any more, and will be written anew
        state = None if segment is None else (segment, str(segment.path.relative_to(self._path)))
        delete = list(delete)
        self.grown += _ROW_BYTES * (len(put) + len(delete) + 4)
        try:
            self._index.write(put=put, delete=delete, segment=state, drop_segments=drop_segments)
        except IndexDamaged as error:
            self._events["index_errors"] += 1
            self.fault = True
            self._mend_at = self._clock.monotonic() + WRITE_RETRY_SECONDS
            log.warning("the durable index did not take a write, and is written anew when it can be: %s", error)

    def mend_is_due(self) -> bool:
        return self.fault and self._clock.monotonic() >= self._mend_at

    def mend(self, segments: Iterable[Segment], catalog: Catalog) -> None:
        """Writes the index anew from what is in memory: after one failed write RocksDB takes no other."""
        fresh = self._directory.with_name("index.new")
        self._mend_at = self._clock.monotonic() + WRITE_RETRY_SECONDS
        RocksIndex.destroy(fresh)
        try:
            index = RocksIndex(fresh)
            for segment in segments:
                with catalog.lock:
                    live = list(catalog.live_locked(segment))
                for start in range(0, len(live), _INDEX_BATCH):
                    index.write(put=live[start : start + _INDEX_BATCH])
                # After its blocks: a segment that is recorded as sealed has them all.
                index.write(segment=(segment, str(segment.path.relative_to(self._path))))
            index.close()
            self.close()
            RocksIndex.destroy(self._directory)
            fresh.rename(self._directory)
            self._index = RocksIndex(self._directory)
        except (IndexDamaged, OSError) as error:
            log.warning("the durable index cannot be written anew yet: %s", error)
            return
        self.fault = False
        self._events["index_rebuilds"] += 1

    def measure(self) -> int:
        """Bytes of its files. Raises `OSError`."""
        self.grown = 0
        size = 0
        for file in self._directory.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # compaction has removed it
                size += file.stat().st_size
        return size

    def close(self) -> None:
        if self._index is not None:
            self._index.close()
        self._index = None

    def _open(self) -> RocksIndex | None:
        try:
            try:
                return RocksIndex(self._directory)
            except IndexUnwritable as error:
                self._unwritable(error)
                return RocksIndex(self._directory, read_only=True)
        except IndexDamaged as error:
            return self._renew(error)

    def _unwritable(self, error: IndexUnwritable) -> None:
        log.warning("the index takes no writes now, and is written anew when it can be: %s", error)
        self.fault = True

    def _renew(self, why: IndexDamaged) -> RocksIndex | None:
        """An empty index in place of one that cannot be used, or none while the disk is full; the files fill it."""
        path = self._directory
        log.warning("the index cannot be used and is rebuilt from the segments: %s", why)
        RocksIndex.destroy(path)
        self._events["index_rebuilds"] += 1
        try:
            return RocksIndex(path)
        except IndexUnwritable as full:
            self._unwritable(full)
            return None
        except IndexDamaged as again:
            raise StoreUnusable(f"no index can be made in {path}: {again}") from again
