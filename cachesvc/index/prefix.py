"""The blocks of one shard that a look-up found: objects where they are hot, row numbers where they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from cachesvc.index.blocks import DiskBlocks
from cachesvc.index.rows import Numbers
from cachesvc.index.table import Entry
from cachesvc.segments.format import Shape
from cachesvc.segments.segment import Segment

_USED = attrgetter("used")


@dataclass(slots=True, eq=False)
class Prefix:
    """The first `len(hot)` blocks are `hot`; the row of each further one is in `rows`, or -1 if it is in `other`.

    While `segments` are pinned, rows say where blocks lay, also of those that are dropped meanwhile.
    """

    shape: Shape
    hot: list[Entry]
    rows: Numbers
    other: dict[int, Entry]
    """By index of the block."""
    segments: list[Segment]
    blocks: DiskBlocks

    def __len__(self) -> int:
        return len(self.hot) + len(self.rows)

    def cut(self, length: int) -> None:
        """Keeps the first blocks only. Of no block no file is kept."""
        if not length:
            self.segments = []
        if length < len(self):
            del self.hot[length:]
            self.rows = self.rows[: length - len(self.hot)]
            self.other = {index: entry for index, entry in self.other.items() if index < length}

    def entries(self, part: slice) -> Sequence[Entry]:
        """Where these blocks lay at the look-up."""
        start, stop, _ = part.indices(len(self))
        hot = self.hot[start:stop]
        first = start + len(hot)
        if first >= stop:
            return hot
        rows = self.rows[first - len(self.hot) : stop - len(self.hot)]
        cold = iter(self.blocks.entries(rows[rows >= 0]))
        return hot + [self.other[i] if row < 0 else next(cold) for i, row in enumerate(rows.tolist(), first)]

    def ages(self, now: float) -> list[tuple[float, int]]:
        """Seconds since the last use of the blocks in order, and how many there are of it: call it before they are
        touched. The blocks of a prefix are mostly used together."""
        found = [(now - used, sum(1 for _ in same)) for used, same in groupby(map(_USED, self.hot))]
        if len(self.rows):
            used = self.blocks.rows.used.take(self.rows, mode="wrap").astype(np.float64)
            for index, entry in self.other.items():
                used[index - len(self.hot)] = entry.used
            starts = np.concatenate([[0], np.flatnonzero(used[1:] != used[:-1]) + 1])
            counts = np.diff(starts, append=len(used))
            found += [(now - used[i], n) for i, n in zip(starts.tolist(), counts.tolist(), strict=True)]
        return found

    def elsewhere(self, lies: NDArray[np.bool_]) -> list[int]:
        """Indices of the blocks whose rows (those that are not -1) are not where `lies`."""
        return [int(index) + len(self.hot) for index in np.flatnonzero(self.rows >= 0)[~lies]]
