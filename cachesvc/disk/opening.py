"""What a store holds when it is opened: its segments' footers say it, and the durable index how they were used since.

A segment without a footer, as only a crash leaves it, is scanned and sealed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path

import numpy as np

from cachesvc.catalog import Catalog
from cachesvc.classes import TrafficClasses
from cachesvc.disk.durable import DurableIndex
from cachesvc.disk.files import SegmentFiles
from cachesvc.index.blocks import StoredUses
from cachesvc.index.rocks import decode_uses
from cachesvc.index.table import block_id
from cachesvc.record import PAGE
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.segments.format import (
    FOOTER_ENTRY,
    OWN_NAME,
    SUFFIX,
    ForeignFile,
    SegmentHead,
    footer_bytes,
    footer_entries,
)
from cachesvc.segments.recover import Found, Sealed, read_sealed, read_segment, seal_recovered

log = logging.getLogger("cachesvc.store")

_SAY_SECONDS = 2.0


class Progress:
    """A line in the log every few seconds: a scan of many files takes long, and people look at it."""

    def __init__(self, files: int) -> None:
        self._files = files
        self._done = 0
        self._bytes = 0
        self._started = self._said = time.monotonic()

    def done(self, size: int) -> None:
        """One file is done, of which so many bytes were read."""
        self._done += 1
        self._bytes += size
        now = time.monotonic()
        if now - self._said < _SAY_SECONDS and self._done < self._files:
            return
        self._said = now
        passed = max(now - self._started, 1e-3)
        log.info(
            "opened %d of %d segments [%s] %.0f %%, %.0f segments/s, %.0f MB/s, %.0f s left",
            self._done,
            self._files,
            ("#" * (20 * self._done // self._files)).ljust(20, "."),
            100 * self._done / self._files,
            self._done / passed,
            self._bytes / passed / 1e6,
            passed / self._done * (self._files - self._done),
        )


class Opening:
    """Used once, before anything else touches the store."""

    def __init__(
        self,
        path: Path,
        catalog: Catalog,
        files: SegmentFiles,
        durable: DurableIndex,
        classes: TrafficClasses,
        events: Counter[str],
    ) -> None:
        self._path = path
        self._catalog = catalog
        self._files = files
        self._durable = durable
        self._classes = classes
        self._events = events
        self._known: set[int] = set()
        """Tags of segments of which the index knows, and no file was found so far."""

    def run(self) -> None:
        """Fills the table."""
        started = time.monotonic()
        self._known = self._durable.tags()
        # The oldest first: names end in the daemon, its start, and a number.
        paths = sorted(self._path.glob(f"*/*/*/*{SUFFIX}"), key=lambda path: path.name)
        progress = Progress(len(paths))
        unreadable = False
        for path in paths:
            try:
                read = self._open(path)
            except (ForeignFile, OSError) as error:
                self._foreign(path, error)
                unreadable |= isinstance(error, OSError)
                read = 0
            progress.done(read)
        if self._known and not unreadable:  # their files are gone
            self._durable.forget(self._known)
        self._catalog.settle()
        log.info(
            "store %s: %d blocks in %d segments, %.2f s",
            self._path,
            len(self._catalog),
            len(self._files.segments),
            time.monotonic() - started,
        )

    def _open(self, path: Path) -> int:
        """Takes a file's blocks: by its footer, or by a scan. Returns the bytes that were read for it."""
        sealed = read_sealed(path)
        if sealed is not None:
            self._take(path, sealed, sealed=True)
            return footer_bytes(len(sealed.entries))
        found = read_segment(path)
        read = found.size
        if not found.sealed:
            self._events["recovered_segments"] += 1
            try:
                found = seal_recovered(path, found)
            except OSError as error:
                # A full disk must not keep its blocks from being served; the next start scans the file again.
                log.warning("cannot seal %s: %s", path, error.strerror)
        by_number = {head.number: head for head in found.heads}
        entries = footer_entries([by_number.get(number) for number in range(found.records)])
        listed = Sealed(found.head, np.frombuffer(entries, FOOTER_ENTRY), found.size)
        self._take(path, listed, sealed=found.sealed)
        self._damaged(path, found)
        return read

    def _take(self, path: Path, found: Sealed, *, sealed: bool) -> None:
        if len(found.entries) > self._catalog.room:
            raise ForeignFile("the index is full")
        number = self._files.next_segment
        self._files.next_segment += 1
        segment = self._files.register(number, path, found.head, len(found.entries), found.size, sealed=sealed)
        self._catalog.load(segment, found.entries, self._uses_of(found.head))

    def _uses_of(self, head: SegmentHead) -> StoredUses | None:
        self._known.discard(head.tag)
        row = self._durable.row(head.tag)
        if row is None:
            return None
        try:
            return decode_uses(row, self._classes)
        except ValueError as error:
            log.warning("when the blocks of segment %016x were used is not understood: %s", head.tag, error)
            return None

    def _damaged(self, path: Path, found: Found) -> None:
        """Counts the records that a scan found damaged; those whose trailer is whole are remembered by name."""
        count = found.records - len(found.heads)
        if count:
            log.warning("%s: %d of %d records are damaged; the others stay in use", path, count, found.records)
        self._events["corrupt_blocks"] += count
        for record in found.damaged:
            self._catalog.lost(block_id(record.key, record.shard), MissReason.CORRUPT)

    def _foreign(self, path: Path, error: Exception) -> None:
        own = isinstance(error, ForeignFile) and OWN_NAME.fullmatch(path.name) and path.is_file()
        if own and path.stat().st_size < PAGE:
            log.info("%s has no whole header, as a crash leaves it: removed", path)
            path.unlink()
            self._events["torn_files"] += 1
            return
        self._events["foreign_files"] += 1
        log.warning("%s is left alone: %s", path, error)
