"""Many pieces of payloads between host and device in as few copies as possible.

Measured on an H200 with PCIe 5 (docs/performance.md): copies of neighbours together, or of 512 KiB and more in one
batch, reach the link's speed and take no multiprocessor from compute. Many small ones do not: then the kernel goes
over the link itself.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from cachesvc.connector.device.device import Stream

WORTH_A_COPY: Final = 512 << 10
"""Bytes for each copy, on average, from which on copies are faster than the kernel over the link."""

_SHORTEST_RUN: Final = 4
"""Fewer pieces that lie evenly do so by chance: they go with the single ones."""

_MAX_STEP: Final = 1 << 31
"""Rows of one copy may lie less than this apart (``cudaDeviceProp.memPitch``)."""


class Plan(NamedTuple):
    """Which pieces go together: [start, end) that lie in even steps on both sides, and the others, int64 ``[m]``."""

    runs: list[tuple[int, int]]
    single: Any

    @property
    def copies(self) -> int:
        return len(self.runs) + len(self.single)


def plan(one: Any, other: Any, width: int) -> Plan:
    """`one`, `other`: int64 ``[n]``, where the pieces of `width` bytes begin on either side."""
    count = len(one)
    alone = np.ones(count, dtype=bool)
    found: list[tuple[int, int]] = []
    if count >= _SHORTEST_RUN:
        first, second = np.diff(one), np.diff(other)
        changes = np.flatnonzero((first[1:] != first[:-1]) | (second[1:] != second[:-1])) + 1
        starts, ends = np.append(0, changes), np.append(changes, count - 1) + 1
        fits = np.minimum(first, second)[starts] >= width
        fits &= (np.maximum(first, second)[starts] < _MAX_STEP) & (ends - starts >= _SHORTEST_RUN)
        for start, end in zip(starts[fits].tolist(), ends[fits].tolist(), strict=True):
            if found and start < found[-1][1]:
                start += 1  # the piece between two runs belongs to the first
            found.append((start, end))
            alone[start:end] = False
    return Plan(found, np.flatnonzero(alone))


def enqueue(stream: Stream, targets: Any, sources: Any, width: int, planned: Plan) -> None:
    """Copies the pieces, `planned` being the `plan` of targets and sources (addresses, int64 ``[n]``)."""
    if len(planned.single):
        stream.copy_many(targets[planned.single].tolist(), sources[planned.single].tolist(), width)
    for start, end in planned.runs:
        step_to, step_from = (
            int(side[start + 1] - side[start]) if end > start + 1 else width for side in (targets, sources)
        )
        stream.copy_rows(int(targets[start]), int(sources[start]), step_to, step_from, width, end - start)
