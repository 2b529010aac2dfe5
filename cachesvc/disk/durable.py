"""The durable index as the disk tier uses it: what fails is counted and mended, and nothing is lost by it.

Every method expects the tier's write lock.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from cachesvc.catalog import Catalog
from cachesvc.clock import Clock
from cachesvc.errors import StoreUnusable
from cachesvc.index.blocks import StoredUses
from cachesvc.index.rocks import IndexDamaged, IndexUnwritable, RocksIndex
from cachesvc.limits import WRITE_RETRY_SECONDS
from cachesvc.segments.segment import Segment

log = logging.getLogger("cachesvc.store")

# Segments in one write to the durable index.
_INDEX_BATCH = 64

# What a segment's row takes in its log, beside 10 bytes for each of its records.
_ROW_BYTES = 256


class DurableIndex:
    def __init__(self, path: Path, clock: Clock, events: Counter[str]) -> None:
        """Opens the index of the store at `path`; one that cannot be used is replaced. Raises `StoreUnusable`."""
        self.fault = False
        """It failed a write, and is to be mended."""
        self.grown = 0
        """Bytes that were put into it since it was measured."""
        self._directory = path / "index"
        self._fresh, self._old = path / "index.new", path / "index.old"
        self._clock = clock
        self._events = events
        self._mend_at = 0.0
        self._index: RocksIndex | None = self._open()

    def tags(self) -> set[int]:
        """The segments that it knows. None when it is damaged: then it is begun anew."""
        try:
            if self._index is not None:
                return self._index.tags()
        except IndexDamaged as error:
            self.close()
            self._index = self._renew(error)
        return set()

    def row(self, tag: int) -> bytes | None:
        """What it knows of a segment (see `index.rocks.decode_uses`)."""
        try:
            return self._index.row(tag) if self._index is not None else None
        except IndexDamaged as error:
            log.warning("when the blocks of segment %016x were used cannot be read: %s", tag, error)
            return None

    def save(self, uses: Iterable[tuple[Segment, StoredUses]]) -> None:
        """Writes what is to be kept of segments. A failure is counted, not raised: the index is written anew then."""
        batches = _batches(uses)
        while not self.fault and (batch := next(batches, None)):
            self._write(put=batch)

    def forget(self, tags: Iterable[int]) -> None:
        """Segments that are gone. A failure is counted, not raised."""
        self._write(drop=list(tags))

    def mend_is_due(self) -> bool:
        return self.fault and self._clock.monotonic() >= self._mend_at

    def mend(self, catalog: Catalog) -> None:
        """Writes the index anew from what is in memory: after one failed write RocksDB takes no other."""
        fresh, old = self._fresh, self._old
        self._mend_at = self._clock.monotonic() + WRITE_RETRY_SECONDS
        RocksIndex.destroy(fresh)
        RocksIndex.destroy(old)
        try:
            index = RocksIndex(fresh)
            for batch in _batches(catalog.all_uses()):
                index.write(put=batch)
            index.close()
            self.close()
            if self._directory.exists():
                self._directory.rename(old)
            fresh.rename(self._directory)
            self._index = RocksIndex(self._directory)
            RocksIndex.destroy(old)
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

    def _write(self, *, put: Sequence[tuple[int, StoredUses]] = (), drop: Sequence[int] = ()) -> None:
        if self.fault or self._index is None:
            return  # it takes nothing any more, and will be written anew
        self.grown += sum(_ROW_BYTES + 10 * len(uses.used) for _, uses in put) + _ROW_BYTES * len(drop)
        try:
            self._index.write(put=put, drop=drop)
        except IndexDamaged as error:
            self._events["index_errors"] += 1
            self.fault = True
            self._mend_at = self._clock.monotonic() + WRITE_RETRY_SECONDS
            log.warning("the durable index did not take a write, and is written anew when it can be: %s", error)

    def _open(self) -> RocksIndex | None:
        if not self._directory.exists() and self._fresh.exists():  # a kill while the one was to replace the other
            self._fresh.rename(self._directory)
        RocksIndex.destroy(self._old)
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
        """An empty one in place of one that cannot be used, or none while the disk is full."""
        path = self._directory
        log.warning("the index cannot be used and is begun anew; uses that only it knew are forgotten: %s", why)
        RocksIndex.destroy(path)
        self._events["index_rebuilds"] += 1
        try:
            return RocksIndex(path)
        except IndexUnwritable as full:
            self._unwritable(full)
            return None
        except IndexDamaged as again:
            raise StoreUnusable(f"no index can be made in {path}: {again}") from again


def _batches(uses: Iterable[tuple[Segment, StoredUses]]) -> Iterator[list[tuple[int, StoredUses]]]:
    rest = iter(uses)
    while batch := [(segment.head.tag, some) for segment, some in islice(rest, _INDEX_BATCH)]:
        yield batch
