"""Time, so that tests can set it. Wall time decides expiry; monotonic time decides leases."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...


class SystemClock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class OffsetFileClock:
    """A clock's time plus the number of seconds that a file holds: lets a test move a running daemon through days.

    A missing, half-written or absurd content counts as the last offset that was read.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._offset = 0.0

    def now(self) -> float:
        with contextlib.suppress(OSError, ValueError):
            offset = float(self._path.read_text())
            if abs(offset) < 1e10:
                self._offset = offset
        return self._clock.now() + self._offset

    def monotonic(self) -> float:
        return self._clock.monotonic()


class ManualClock:
    """Stands still until a test moves it."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self._now = now
        self._monotonic = 0.0

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._monotonic += seconds

    def jump(self, seconds: float) -> None:
        """The wall clock alone, as when somebody sets it."""
        self._now += seconds
