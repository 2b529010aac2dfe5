"""Many pieces of payloads between host and device in as few copies as possible.

Measured on an H200 with PCIe 5 (docs/performance.md): copies of neighbours together, or of 512 KiB and more in one
batch, reach the link's speed and take no multiprocessor from compute. Many small ones do not: then the kernel goes
over the link itself.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from cachesvc.connector.device.device import Stream

WORTH_A_COPY: Final = 512 << 10
"""Bytes for each copy, on average, from which on copies are faster than the kernel over the link."""

_SHORTEST_RUN: Final = 4
"""Fewer pieces that lie evenly do so by chance: they go with the single ones."""

_MAX_STEP: Final = 1 << 31
"""Rows of one copy may lie less than this apart (``cudaDeviceProp.memPitch``)."""


def runs(one: Any, other: Any, width: int) -> list[tuple[int, int]]:
    """[start, end) of pieces that lie evenly, in the same steps, on both sides, ascending: one copy each.

    `one`, `other`: int64 ``[n]``, where the pieces of `width` bytes begin.
    """
    count = len(one)
    if count < 2:
        return [(0, count)] if count else []
    first, second = np.diff(one), np.diff(other)
    # A run goes on as long as both steps stay what they are.
    breaks = np.flatnonzero((first[1:] != first[:-1]) | (second[1:] != second[:-1]))
    found, start = [], 0
    while start < count:
        end = start + 1
        if end < count and width <= first[start] < _MAX_STEP and width <= second[start] < _MAX_STEP:
            stop = int(np.searchsorted(breaks, start))
            end = int(breaks[stop]) + 2 if stop < len(breaks) else count
        if end - start < _SHORTEST_RUN:
            found += [(index, index + 1) for index in range(start, end)]
        else:
            found.append((start, end))
        start = end
    return found


def enqueue(stream: Stream, targets: Any, sources: Any, width: int, parts: list[tuple[int, int]]) -> None:
    """Copies the pieces, `parts` being the `runs` of targets and sources (addresses, int64 ``[n]``)."""
    single = [start for start, end in parts if end == start + 1]
    if single:
        stream.copy_many(targets[single].tolist(), sources[single].tolist(), width)
    for start, end in parts:
        if end > start + 1:
            step_to, step_from = (int(side[start + 1] - side[start]) for side in (targets, sources))
            stream.copy_rows(int(targets[start]), int(sources[start]), step_to, step_from, width, end - start)
