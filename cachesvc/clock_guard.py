"""Wall time that is not believed at once when it jumps: a clock that was set wrong must not expire a store.

==========  =====================================================  ==================================================
state       time that is told                                      leaves by
==========  =====================================================  ==================================================
TRUSTED     the clock's, never less than was told before           a jump against the monotonic clock → DOUBTED
DOUBTED     goes on from before the jump, by the monotonic clock   the clock is back → TRUSTED, nothing happened;
                                                                   it stays for `CLOCK_TRUST_SECONDS` → TRUSTED
==========  =====================================================  ==================================================

A machine that slept jumps too: then blocks expire that much later. The time of the last run is kept in a small file, so
that a jump over a restart is seen as well: backwards at once, forwards when the store seems to have been closed for
longer than `CLOCK_DOWNTIME_SECONDS`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import Final

from cachesvc.clock import Clock
from cachesvc.limits import CLOCK_DOWNTIME_SECONDS, CLOCK_JUMP_SECONDS, CLOCK_TRUST_SECONDS

log = logging.getLogger("cachesvc.clock")

_SAVE_SECONDS: Final = 60.0


class GuardedClock:
    """Thread-safe. `now` never goes back, unless a jump backwards was confirmed."""

    def __init__(self, clock: Clock, last_seen: Path | None = None) -> None:
        """`last_seen` is the file that keeps the time over a restart; None keeps none."""
        self._clock = clock
        self._file = last_seen
        self._lock = threading.Lock()
        self._told = clock.now()
        self._steady = clock.monotonic()
        self._doubt: float | None = None
        """Monotonic time since when the clock is doubted, and by how much it is off (seconds)."""
        self._off = 0.0
        self._saved_at = self._steady
        before = self._read()
        if before is not None and not -CLOCK_JUMP_SECONDS <= self._told - before <= CLOCK_DOWNTIME_SECONDS:
            self._begin_doubt(self._told - before)
            self._told = before

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def now(self) -> float:
        with self._lock:
            wall, steady = self._clock.now(), self._clock.monotonic()
            expected = self._told + (steady - self._steady)
            off = wall - expected
            if abs(off) <= CLOCK_JUMP_SECONDS:
                if self._doubt is not None:
                    log.warning("the clock is back at what it should be: it is trusted again")
                    self._doubt = None
                told = max(self._told, wall)
            elif self._doubt is None or abs(off - self._off) > CLOCK_JUMP_SECONDS:
                self._begin_doubt(off)
                told = expected
            elif steady - self._doubt < CLOCK_TRUST_SECONDS:
                told = expected
            else:
                log.warning("the clock has stayed %+.0f s off for %.0f s: it is trusted now", off, CLOCK_TRUST_SECONDS)
                self._doubt = None
                told = wall
            self._told, self._steady = told, steady
            return told

    @property
    def doubted(self) -> bool:
        return self._doubt is not None

    def save(self, *, always: bool = False) -> None:
        """Notes the time for the next start, about once a minute. Never raises: without it a jump may be missed."""
        now, steady = self.now(), self._clock.monotonic()
        if self._file is None or (not always and steady - self._saved_at < _SAVE_SECONDS):
            return
        self._saved_at = steady
        with contextlib.suppress(OSError):
            self._file.write_text(f"{now:.0f}\n")

    def _begin_doubt(self, off: float) -> None:
        log.warning(
            "the clock has jumped by %+.0f s: nothing expires by it unless it stays so for %.0f s",
            off,
            CLOCK_TRUST_SECONDS,
        )
        self._doubt, self._off = self._clock.monotonic(), off

    def _read(self) -> float | None:
        try:
            text = self._file.read_text() if self._file is not None else ""
        except (OSError, UnicodeDecodeError):
            return None
        value = text.strip()
        return float(value) if value.isdigit() and len(value) < 12 else None
