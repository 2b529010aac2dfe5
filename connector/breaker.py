"""The circuit breaker: when to leave a daemon alone, and when to try it again (pure: no threads, an injected clock).

=========  ==============================================  =========================================
state      engine's calls                                  leaves it by
=========  ==============================================  =========================================
OPEN       answered at once: no hit                        `probe_started`, once `probe_in` is 0
HALF_OPEN  answered at once: no hit                        `probe_succeeded` or `probe_failed`
CLOSED     made                                            `failure`: N in a row, one timeout; `suspend`
=========  ==============================================  =========================================

It starts OPEN and due, since nobody has answered yet. A probe is a call that no engine waits for, so failed ones may be
repeated often (`probe_max_s`). A daemon that answers probes but fails real calls costs engines time on every opening:
those pauses double up to `breaker_max_s`, and start small again only after a success that comes later than the last
pause was long.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable

from cachesvc.connector.options import CacheOptions


class State(enum.Enum):
    OPEN = "open"
    HALF_OPEN = "half-open"
    CLOSED = "closed"


class Breaker:
    """`clock` gives seconds; `jitter` a number in [0, 1). Not thread-safe: its owner holds a lock."""

    def __init__(
        self, options: CacheOptions, clock: Callable[[], float], jitter: Callable[[], float] = random.random
    ) -> None:
        self._options = options
        self._clock = clock
        self._jitter = jitter
        self.state = State.OPEN
        self.openings = 0  # since the start, for statistics
        self._failures = 0  # in a row, over suspensions too
        self._recent_openings = 0
        self._failed_probes = 0
        self._pause = 0.0  # of the last opening, seconds
        self._closed_at = 0.0
        self._probe_at = clock()

    @property
    def closed(self) -> bool:
        return self.state is State.CLOSED

    def probe_in(self) -> float | None:
        """Seconds until a probe is due (0 when it is); None while CLOSED or while one is out."""
        return max(0.0, self._probe_at - self._clock()) if self.state is State.OPEN else None

    def success(self) -> None:
        """A real call succeeded. One that began before an opening changes nothing."""
        if self.closed:
            self._failures = 0
            if self._clock() - self._closed_at >= self._pause:
                self._recent_openings = 0

    def failure(self, *, timed_out: bool = False, lost: bool = False) -> None:
        """A real call failed; only CLOSED counts. `timed_out`: an engine had to wait for it in vain. `lost`: perhaps
        nobody is there, so probe at once, which costs no engine anything; in a row they count all the same.
        """
        if not self.closed:
            return
        self._failures += 1
        if timed_out or self._failures >= self._options.breaker_failures:
            self._failures = 0
            self._pause = self._delay(self._recent_openings, self._options.breaker_max_s)
            self._recent_openings += 1
            self.openings += 1
            self._open(self._pause)
        elif lost:
            self._open(0.0)

    def suspend(self) -> None:
        """Opens with a probe due at once, and blames nobody: the daemon was restarted."""
        if self.closed:
            self._open(0.0)

    def probe_started(self) -> None:
        if self.state is State.OPEN:
            self.state = State.HALF_OPEN

    def probe_succeeded(self) -> None:
        """Closes, unless it was opened while the probe was out: that pause is kept."""
        self._failed_probes = 0
        if self.state is State.HALF_OPEN:
            self.state = State.CLOSED
            self._closed_at = self._clock()

    def probe_failed(self, retry_in: float | None = None) -> None:
        """The next probe is due in `retry_in` seconds, by default after a pause that doubles up to `probe_max_s`."""
        if self.closed:
            self.openings += 1
        if retry_in is None:
            retry_in = self._delay(self._failed_probes, self._options.probe_max_s)
        self._failed_probes += 1
        self._open(retry_in)

    def _open(self, pause: float) -> None:
        self.state = State.OPEN
        self._probe_at = self._clock() + pause

    def _delay(self, level: int, longest: float) -> float:
        """Doubling, then 75 to 100 % of it: many engines on one host must not come back in step."""
        whole = min(longest, self._options.breaker_first_s * 2.0 ** min(level, 32))
        return whole * (1.0 - 0.25 * self._jitter())
