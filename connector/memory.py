"""What a client remembers about blocks: bounded, forgetful, and never needed for correctness."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class KnownKeys:
    """Keys that are stored or on their way, as far as this client has seen.

    Beyond `limit` the least recent are forgotten. A wrong memory costs one save at most: each match corrects it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._keys[key] = None
                self._keys.move_to_end(key)
            while len(self._keys) > self._limit:
                self._keys.popitem(last=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)

    def clear(self) -> None:
        with self._lock:
            self._keys.clear()


class FailedKeys:
    """Blocks whose load has failed: no match reaches over them for `seconds`, so that no request meets them twice."""

    def __init__(self, limit: int, seconds: float, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, key: bytes) -> None:
        with self._lock:
            self._until.pop(key, None)
            self._until[key] = self._clock() + self._seconds
            while len(self._until) > self._limit:
                self._until.popitem(last=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        """They have been stored anew."""
        with self._lock:
            for key in keys:
                self._until.pop(key, None)

    def good_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are free of failed ones."""
        with self._lock:
            now = self._clock()
            while self._until and next(iter(self._until.values())) <= now:
                self._until.popitem(last=False)
            if not self._until:
                return len(keys)
            return next((index for index, key in enumerate(keys) if key in self._until), len(keys))

    def clear(self) -> None:
        with self._lock:
            self._until.clear()
