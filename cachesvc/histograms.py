"""Buckets of the histograms that reports show: a value is counted in the first one whose bound it does not exceed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

_MINUTE: Final = 60
_HOUR: Final = 3_600
_DAY: Final = 86_400

DEPTHS: Final[Sequence[int]] = (0, *(128 << i for i in range(14)))
"""Hit tokens of a pass: none, then powers of two up to a million."""

AGES: Final[Sequence[int]] = (
    *(1, 10, _MINUTE, 10 * _MINUTE, _HOUR, 6 * _HOUR, 12 * _HOUR),
    *(days * _DAY for days in (1, 2, 3, 4, 5, 6, 7, 14)),
)
"""Seconds: since the last use of a block that is hit, and since the writing of one that is dropped."""

REUSES: Final[Sequence[int]] = tuple(64 << i for i in range(0, 26, 2))
"""Reuse distance: different blocks asked for between two requests for one block."""


def bucket(bounds: Sequence[int], value: float) -> int:
    """Number of the bucket that `value` falls into; ``len(bounds)`` for what exceeds all of them."""
    return bisect_left(bounds, value)
