"""What is known of each block on disk: one row of 40 bytes, in columns, so that thousands are read by one call.

A segment has its rows in runs of `RUN`, in the order of its records: what lies together on disk lies together here, and
the row says where the block is. Number, shape, namespace and path are the segment's and not kept per row.
"""

from __future__ import annotations

import contextlib
import mmap
from array import array
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
"""Row numbers, or record numbers."""

RUN: Final = 64
"""Rows given to a segment at once: half of as many stay empty at its end."""

NO_CLASS: Final = 255
"""Class of a row that holds no stored block: it is free, or its block was dropped or lies elsewhere by now."""

TOUCHED: Final = 1
"""Flag: used after it was written where it lies."""

# Pages are there once they are written to, whatever was asked for; 0x4000 everywhere on Linux.
_NORESERVE: Final = 0x4000


class Rows:
    """Not thread-safe: the catalog's lock covers it. At `limit` rows `append` raises `MemoryError`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit - limit % RUN
        self.keys: NDArray[np.uint64] = reserved(2 * self.limit, np.uint64).reshape(-1, 2)
        self.checksums: NDArray[np.uint64] = reserved(self.limit, np.uint64)
        self.created: NDArray[np.uint32] = reserved(self.limit, np.uint32)
        self.used: NDArray[np.float64] = reserved(self.limit, np.float64)
        self.shards: NDArray[np.uint16] = reserved(self.limit, np.uint16)
        self.classes: NDArray[np.uint8] = reserved(self.limit, np.uint8)
        self.flags: NDArray[np.uint8] = reserved(self.limit, np.uint8)
        self._run_segment: NDArray[np.uint32] = reserved(self.limit // RUN, np.uint32)
        self._run_first: NDArray[np.uint32] = reserved(self.limit // RUN, np.uint32)
        self._runs: dict[int, array[int]] = {}
        """Runs of each segment, in the order of its records."""
        self._counts: dict[int, int] = {}
        self._free: list[int] = []
        self._taken = 0
        """Runs that were ever used."""

    @property
    def room(self) -> int:
        """Rows that can still be appended, whatever the segment."""
        return (self.limit // RUN - self._taken + len(self._free)) * RUN

    @property
    def nbytes(self) -> int:
        """Bytes of memory taken by rows that are or were in use, and by what finds them."""
        a_row = sum(column.itemsize for column in (self.checksums, self.created, self.used, self.shards)) + 16 + 2
        return self._taken * (RUN * a_row + 8 + 4) + 200 * len(self._runs)

    def append(self, segment: int, count: int) -> Numbers:
        """Fresh rows for the next `count` records of a segment: of no class until they are given one."""
        runs = self._runs.setdefault(segment, array("I"))
        have = self._counts.get(segment, 0)
        missing = -(-(have + count) // RUN) - len(runs)
        if missing * RUN > self.room:
            raise MemoryError(f"the index is full at {self.limit} blocks")
        for _ in range(missing):
            if self._free:
                run = self._free.pop()
            else:
                run, self._taken = self._taken, self._taken + 1
            self._run_segment[run] = segment
            self._run_first[run] = len(runs) * RUN
            runs.append(run)
        self._counts[segment] = have + count
        rows = self.of(segment)[have:]
        self.classes[rows] = NO_CLASS
        self.flags[rows] = 0
        return rows

    def of(self, segment: int) -> Numbers:
        """All rows of a segment, by record."""
        runs = self._runs.get(segment)
        if runs is None:
            return np.empty(0, np.int64)
        return _rows_of(runs)[: self._counts.get(segment, 0)]

    def row(self, segment: int, record: int) -> int:
        """Raises `IndexError`, `KeyError` when there is none."""
        return self._runs[segment][record // RUN] * RUN + record % RUN

    def place(self, rows: Numbers) -> tuple[NDArray[np.uint32], Numbers]:
        """Segment and record of each."""
        runs = rows // RUN
        return self._run_segment[runs], self._run_first[runs] + rows % RUN

    def segments(self, rows: Numbers) -> NDArray[np.uint32]:
        return self._run_segment.take(rows // RUN)

    def free(self, segment: int) -> None:
        """The segment is gone, and its rows with it. They must not be found any more."""
        runs = self._runs.pop(segment, None)
        if runs is not None:
            self.classes[_rows_of(runs)] = NO_CLASS
            self._free += reversed(runs)
            del self._counts[segment]

    def identities(self, rows: Numbers) -> list[bytes]:
        """Block ids (see `index.table.block_id`)."""
        packed = self.keys[rows].tobytes()
        found = [packed[i : i + 16] for i in range(0, len(packed), 16)]
        shards = self.shards[rows]
        for i in np.flatnonzero(shards).tolist():
            found[i] += int(shards[i]).to_bytes(2, "big")
        return found


def reserved(count: int, dtype: type[Any]) -> NDArray[Any]:
    """Zeros that take memory only where they are written: a table of them grows without being copied.

    Raises `OSError` when the system does not even give that many addresses.
    """
    size = max(1, count * np.dtype(dtype).itemsize)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # a look-up touches a thousand places at once
    return np.frombuffer(memory, dtype, count)


def _rows_of(runs: array[int]) -> Numbers:
    starts = np.array(runs, np.int64) * RUN  # a copy: an array that lends its memory cannot grow
    return (starts[:, None] + np.arange(RUN)).ravel()
