"""Whether the disk takes writes: refusals are counted, shown, and held against it for a while.

=========  ===========================================  ============================================================
state      meaning                                      leaves by
=========  ===========================================  ============================================================
OK         writes are tried                             `failed` → REFUSING
REFUSING   writes are refused for a while without       the while is over → OK in all but name: the next write, or a
           trying; reads go on                          probe by housekeeping, decides
=========  ===========================================  ============================================================
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path

from cachesvc.clock import Clock
from cachesvc.errors import WriteRefused
from cachesvc.limits import PROBE_BYTES, WRITE_RETRY_SECONDS

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
        if self._fault != str(error):
            log.warning("write refused: %s", error)
        self._fault = str(error)
        self._retry_at = self._clock.monotonic() + WRITE_RETRY_SECONDS

    def succeeded(self) -> None:
        if self._fault is not None:
            log.warning("writes are taken again")
        self._fault = None

    def probe(self, directory: Path) -> None:
        """Tries a write when the last one failed and it is time: an idle store recovers too."""
        if self._fault is None or not self.accepts():
            return
        path = directory / "PROBE"
        try:
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
                try:
                    if os.pwrite(descriptor, bytes(PROBE_BYTES), 0) < PROBE_BYTES:
                        raise OSError("the disk is full")
                    os.fdatasync(descriptor)
                finally:
                    os.close(descriptor)
            finally:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.debug("the disk does not take writes yet: %s", error)
            self._retry_at = self._clock.monotonic() + WRITE_RETRY_SECONDS
        else:
            self.succeeded()

    def __str__(self) -> str:
        return "ok" if self._fault is None else f"writes refused: {self._fault}"
