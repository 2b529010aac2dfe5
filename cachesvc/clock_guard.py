"""Wall time that is not believed at once when it jumps: a clock that was set wrong must not expire a store.

==========  =====================================================  ==================================================
state       time that is told                                      leaves by
==========  =====================================================  ==================================================
TRUSTED     the clock's, never less than was told before           a jump against the monotonic clock → DOUBTED
DOUBTED     goes on from before the jump, by the monotonic clock   the clock is back → TRUSTED, nothing happened;
                                                                   it stays for `CLOCK_TRUST_SECONDS` → TRUSTED
==========  =====================================================  ==================================================

A machine that slept jumps too: then blocks expire that much later. The time of the last run is kept in a small file
(seconds ‖ space ‖ their xxh3_64, hex ‖ line feed; a damaged one counts as none), so that a jump over a restart is seen
as well. When the store seems to have been closed for longer than `CLOCK_DOWNTIME_SECONDS`, time goes on from the last
run. When the clock is behind the last run, one of them is wrong: the earlier, the clock's, is told, so that nothing
expires by the other, and the file stays as it is, until the clock has caught up with it (trusted at once) or has stayed
for `CLOCK_TRUST_SECONDS`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from pathlib import Path
from typing import Final

from cachesvc.clock import Clock
from cachesvc.limits import CLOCK_DOWNTIME_SECONDS, CLOCK_JUMP_SECONDS, CLOCK_TRUST_SECONDS
from cachesvc.record import checksum
from cachesvc.store_dir import write_atomically

log = logging.getLogger("cachesvc.clock")

_SAVE_SECONDS: Final = 60.0
_LAST_SEEN: Final = re.compile(rb"([0-9]{1,11}) ([0-9a-f]{16})\n")


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
        self._started = self._saved_at = self._steady
        self._ahead: float | None = None
        """The time of the last run, while it is doubted because the clock was behind it."""
        before = self._read()
        if before is None or _follows(self._told, before):
            return
        if self._told > before:
            self._begin_doubt(self._told - before)
            self._told = before
        else:
            log.warning(
                "the clock is %.0f s behind the last run of this store: nothing expires by the last run's time",
                before - self._told,
            )
            self._ahead = before

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def now(self) -> float:
        with self._lock:
            wall, steady = self._clock.now(), self._clock.monotonic()
            expected = self._told + (steady - self._steady)
            off = wall - expected
            if self._ahead is not None and _follows(wall, self._ahead):
                log.warning("the clock has caught up with the last run of this store: it is trusted again")
                self._doubt = self._ahead = None
                off, expected = 0.0, wall
            elif self._ahead is not None and steady - self._started >= CLOCK_TRUST_SECONDS:
                log.warning("the clock has stayed behind the last run for %.0f s: it is trusted", CLOCK_TRUST_SECONDS)
                self._ahead = None
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
        return self._doubt is not None or self._ahead is not None

    def save(self, *, always: bool = False) -> None:
        """Notes the time for the next start, about once a minute. Never raises: without it a jump may be missed."""
        now, steady = self.now(), self._clock.monotonic()
        if self._file is None or self._ahead is not None or (not always and steady - self._saved_at < _SAVE_SECONDS):
            return
        self._saved_at = steady
        with contextlib.suppress(OSError):
            seconds = f"{max(0.0, now):.0f}".encode()
            write_atomically(self._file, b"%b %016x\n" % (seconds, checksum(seconds)))

    def _begin_doubt(self, off: float) -> None:
        log.warning(
            "the clock has jumped by %+.0f s: nothing expires by it unless it stays so for %.0f s",
            off,
            CLOCK_TRUST_SECONDS,
        )
        self._doubt, self._off = self._clock.monotonic(), off

    def _read(self) -> float | None:
        try:
            content = self._file.read_bytes() if self._file is not None else None
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read, the clock is believed: %s", self._file, error.strerror)
            return None
        if content is None:
            return None
        found = _LAST_SEEN.fullmatch(content)
        if found is None or int(found[2], 16) != checksum(found[1]):
            log.warning("%s is damaged and ignored, the clock is believed", self._file)
            return None
        return float(found[1])


def _follows(now: float, before: float) -> bool:
    """Whether a clock that showed `before` when the store was closed may well show `now`."""
    return -CLOCK_JUMP_SECONDS <= now - before <= CLOCK_DOWNTIME_SECONDS
