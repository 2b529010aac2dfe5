"""Reading everything slowly, only to find damage before a reader does. What is found is dropped like by any read.

How far it has come is kept in a file of the store, as the name of the last segment that was done. Blocks that are read
are not kept in the system's cache: those in demand are in the arena.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter, deque
from pathlib import Path

from cachesvc.catalog import Catalog
from cachesvc.clock import Clock
from cachesvc.disk.files import SegmentFiles
from cachesvc.disk.reading import Reader, Wanted
from cachesvc.index.table import split_id
from cachesvc.limits import SAVE_SCRUB_SECONDS, STEP_BYTES
from cachesvc.segments.segment import Segment, page_aligned

log = logging.getLogger("cachesvc.store")


class Scrubber:
    """Of one thread. Takes no lock for longer than a look at one segment."""

    def __init__(
        self, path: Path, catalog: Catalog, files: SegmentFiles, reader: Reader, clock: Clock, events: Counter[str]
    ) -> None:
        self._file = path / "SCRUB"
        self._catalog = catalog
        self._files = files
        self._reader = reader
        self._clock = clock
        self._events = events
        self._lock = catalog.lock
        self._segment: Segment | None = None
        self._left: deque[Wanted] = deque()
        self._saved_at = clock.monotonic()
        self._done = ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            self._done = self._file.read_text().strip()

    def step(self) -> int:
        """Checks the next records of a sealed segment: bytes that were read, 0 when there is nothing to read."""
        if not self._left and not self._next():
            return 0
        segment = self._segment
        assert segment is not None, "records are left of a segment"
        count = min(len(self._left), max(1, STEP_BYTES // segment.head.stride))
        wanted = [self._left.popleft() for _ in range(count)]
        with self._lock:
            gone = segment.number not in self._files.segments
            segment.pins += 1
        try:
            if gone:
                self._left.clear()
                return 0
            self._reader.read_each(wanted, page_aligned(segment.head.payload_bytes, count))
            self._forget(segment, wanted[0].entry.record, wanted[-1].entry.record + 1)
        finally:
            with self._lock:
                segment.pins -= 1
        self._events["scrubbed_blocks"] += count
        return count * segment.head.stride

    def save(self, *, always: bool = False) -> None:
        """Notes the position, once in a while. Never raises: without it a round is begun anew."""
        if always or self._clock.monotonic() - self._saved_at >= SAVE_SCRUB_SECONDS:
            self._saved_at = self._clock.monotonic()
            with contextlib.suppress(OSError):
                self._file.write_text(f"{self._done}\n")

    def _next(self) -> bool:
        """Goes on to the next segment; after the last a round is over, and the next call begins another."""
        if self._segment is not None:
            self._done = self._segment.path.name
            self._segment = None
        with self._lock:
            segments = list(self._files.segments.values())
        later = [s for s in segments if s.sealed and s.path.name > self._done]
        if not later:
            if self._done and segments:
                self._events["scrub_rounds"] += 1
            self._done = ""
            return False
        self._segment = min(later, key=lambda s: s.path.name)
        with self._lock:
            self._left.extend(Wanted(*split_id(i), e) for i, e in self._catalog.live_locked(self._segment))
        return bool(self._left)

    def _forget(self, segment: Segment, first: int, end: int) -> None:
        start = segment.head.offset(first)
        with contextlib.suppress(OSError):
            descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, start, segment.head.offset(end) - start, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
