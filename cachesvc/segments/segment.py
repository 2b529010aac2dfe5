"""One segment as the store knows it, and reading blocks from it."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cachesvc.classes import TrafficClass
from cachesvc.errors import BlockUnreadable
from cachesvc.record import PAGE, TRAILER_BYTES
from cachesvc.segments.format import SegmentHead, Shape, shape_of

_IOV_MAX = 512


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
    dead: int = 0
    """Records whose block lies elsewhere by now, was dropped or is damaged."""
    oldest_use: float = field(init=False)
    """No block that lies here was last used earlier."""
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        self.shape = shape_of(self.head.namespace, self.head.payload_bytes)
        self.oldest_use = self.head.oldest_use

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

    def read_records(self, descriptor: int, first: int, payloads: Sequence[memoryview]) -> list[memoryview]:
        """Fills `payloads` from neighbouring records, `first` on, and returns their trailers; nothing is checked yet.

        One request for all of them, straight into the caller's memory. Raises `BlockUnreadable` when the device fails
        or the file is too short.
        """
        rest = self.head.stride - self.head.payload_bytes
        ends = [memoryview(bytearray(rest)) for _ in payloads]
        vector = [part for pair in zip(payloads, ends, strict=True) for part in pair]
        offset = self.head.offset(first)
        while vector:
            try:
                got = os.preadv(descriptor, vector[:_IOV_MAX], offset)
            except OSError as error:
                raise BlockUnreadable(f"cannot read {self.path}: {error.strerror}", corrupt=False) from error
            if got == 0:
                raise BlockUnreadable(f"{self.path} ends within a record at {offset}", corrupt=True)
            offset += got
            while vector and got >= len(vector[0]):
                got -= len(vector.pop(0))
            if got:
                vector[0] = vector[0][got:]
        return [end[-TRAILER_BYTES:] for end in ends]


def page_aligned(size: int, count: int) -> list[memoryview]:
    """Fresh memory that starts on a page, `count` times: reading into it is two to three times as fast as otherwise."""
    stride = -(-size // PAGE) * PAGE
    memory = memoryview(mmap.mmap(-1, stride * count))
    return [memory[start : start + size] for start in range(0, stride * count, stride)]
