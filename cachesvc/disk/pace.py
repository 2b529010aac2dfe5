"""So many bytes per second, for work that must not starve others."""

from __future__ import annotations

from typing import Final

from cachesvc.clock import Clock
from cachesvc.limits import STEP_BYTES

# Longest time (seconds) that is made up for at once after a rest.
_CREDIT_SECONDS: Final = 0.01


class Pace:
    """What is spent too soon is waited for afterwards. For one thread. A rate of 0 allows nothing."""

    def __init__(self, clock: Clock, rate: int) -> None:
        """`rate` in bytes per second."""
        self._clock = clock
        self._rate = rate
        self._credit = 0.0
        self._at = clock.monotonic()

    def wait(self) -> float:
        """Seconds until something may be spent; 0: now."""
        if not self._rate:
            return float("inf")
        now = self._clock.monotonic()
        most = max(STEP_BYTES, self._rate * _CREDIT_SECONDS)
        self._credit = min(most, self._credit + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, -self._credit / self._rate)

    def spend(self, size: int) -> None:
        self._credit -= size
