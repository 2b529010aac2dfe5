"""Whether the disk takes writes: refusals are counted, shown, and held against it for a while."""

from __future__ import annotations

import logging
from collections import Counter

from cachesvc.clock import Clock
from cachesvc.errors import WriteRefused
from cachesvc.limits import WRITE_RETRY_SECONDS

log = logging.getLogger("cachesvc.store")


class WriteHealth:
    def __init__(self, clock: Clock, events: Counter[str]) -> None:
        self._clock = clock
        self._events = events
        self._fault: str | None = None
        self._retry_at = 0.0

    def accepts(self) -> bool:
        """Whether a write has a chance now: false for a while after the disk failed one."""
        return self._fault is None or self._clock.monotonic() >= self._retry_at

    def failed(self, error: WriteRefused) -> None:
        self._events["write_refusals"] += 1
        self._fault = str(error)
        self._retry_at = self._clock.monotonic() + WRITE_RETRY_SECONDS
        log.warning("write refused: %s", error)

    def succeeded(self) -> None:
        self._fault = None

    def __str__(self) -> str:
        return "ok" if self._fault is None else f"writes refused: {self._fault}"
