"""One segment as the store knows it, and reading blocks from it."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cachesvc.classes import TrafficClass
from cachesvc.errors import BlockUnreadable
from cachesvc.segments.format import SegmentHead


@dataclass(eq=False)
class Segment:
    """State of one file. `pins` counts read leases and running reads: a pinned segment is not reclaimed."""

    number: int
    path: Path
    head: SegmentHead
    traffic_class: TrafficClass
    records: int
    size: int
    sealed: bool
    pins: int = 0
    synced: int = 0
    """Records known to be on disk while the segment is open."""
    identities: list[bytes] = field(default_factory=list)
    """Block id by record number; empty where the record is damaged or unknown."""

    def place(self, identity: bytes, record: int) -> None:
        """Notes which block record `record` holds."""
        if record >= len(self.identities):
            self.identities += [b""] * (record + 1 - len(self.identities))
        self.identities[record] = identity

    @contextmanager
    def reading(self) -> Iterator[int]:
        """An open descriptor. Raises `BlockUnreadable` when the file is gone."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            gone = error.errno == errno.ENOENT
            raise BlockUnreadable(f"cannot open {self.path}: {error.strerror}", corrupt=gone) from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def read_records(self, descriptor: int, first: int, count: int) -> list[memoryview]:
        """`count` neighbouring records in one request, each a page-aligned view that is not checked yet.

        Raises `BlockUnreadable` when the device fails or the file is too short.
        """
        stride = self.head.stride
        area = mmap.mmap(-1, count * stride)
        view = memoryview(area)
        done = 0
        while done < len(view):
            try:
                got = os.preadv(descriptor, [view[done:]], self.head.offset(first) + done)
            except OSError as error:
                raise BlockUnreadable(f"cannot read {self.path}: {error.strerror}", corrupt=False) from error
            if got == 0:
                raise BlockUnreadable(f"{self.path} ends within record {first + done // stride}", corrupt=True)
            done += got
        return [view[i * stride : (i + 1) * stride] for i in range(count)]
