"""What a connector has done so far, as numbers."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class CacheStats:
    """A snapshot; counts since the cache was made. ``hits + misses`` is the number of settled lookups."""

    lookups: int = 0
    input_tokens: int = 0
    hits: int = 0
    hit_tokens: int = 0  # offered to the engine
    misses: int = 0  # timed out, unreachable and failed ones included
    timeouts: int = 0  # lookups without an answer by their deadline
    unreachable: int = 0  # lookups during which no daemon could be asked
    late_answers: int = 0  # answers that came after the pass was given up; their leases were released

    loads: int = 0
    loaded_blocks: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0  # scatter included
    failed_loads: int = 0  # ended before the hit was complete
    corrupt_blocks: int = 0  # arrived with a wrong checksum

    queued_blocks: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0
    save_seconds: float = 0.0  # of the background worker
    present_blocks: int = 0  # stored already by somebody else
    busy_blocks: int = 0  # being stored by somebody else
    refused_blocks: int = 0  # the daemon had no room
    failed_blocks: int = 0  # lost on the way
    dropped_blocks: int = 0  # not gathered: the queue was full, or the daemon had no room just before
    unsaved_blocks: int = 0  # not gathered: no daemon
    queued_bytes: int = 0  # in memory now

    attached: bool = False
    boot_changes: int = 0
    breaker: str = "open"
    breaker_openings: int = 0

    @property
    def load_bytes_per_second(self) -> float:
        """Measured so far; 0 before the first load."""
        return self.loaded_bytes / self.load_seconds if self.load_seconds else 0.0


class Counters:
    """Named sums that several threads add to."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._sums: Counter[str] = Counter()

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount  # type: ignore[assignment]  # seconds are floats

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._sums)
