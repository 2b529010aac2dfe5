"""What a client remembers about blocks: bounded, forgetful, and never needed for correctness."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from cachesvc.keys import PrefixHasher

Seed = tuple[bytes, bytes]
"""Salt and adapter of a prompt."""


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


class PromptMemory:
    """Prompts hashed lately, so that a turn that extends one of them hashes only its new tokens.

    Beyond `max_prompts` or `max_bytes` (of tokens, 4 bytes each) the least recently used are forgotten. `seed` stands
    for everything but the tokens that enters the keys.
    """

    def __init__(self, max_prompts: int, max_bytes: int) -> None:
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._prompts: OrderedDict[bytes, tuple[Seed, bytes, PrefixHasher]] = OrderedDict()
        self._bytes = 0

    def recall(self, seed: Seed, tokens: bytes) -> PrefixHasher | None:
        """A chain that stands at the end of the longest known beginning of `tokens`."""
        with self._lock:
            best = None
            for key, (known_seed, known, _) in self._prompts.items():
                longer = best is None or len(known) > len(self._prompts[best][1])
                if longer and known_seed == seed and tokens.startswith(known):
                    best = key
            if best is None:
                return None
            self._prompts.move_to_end(best)
            return self._prompts[best][2].copy()

    def remember(self, seed: Seed, tokens: bytes, hasher: PrefixHasher, instead_of: bytes = b"") -> bytes:
        """Notes a chain over exactly `tokens`. Returns what to pass as `instead_of` when the prompt has grown."""
        name = hasher.keys[-1]
        with self._lock:
            for old in (instead_of, name):
                if old in self._prompts:
                    self._bytes -= len(self._prompts.pop(old)[1])
            self._prompts[name] = (seed, tokens, hasher.copy())
            self._bytes += len(tokens)
            while len(self._prompts) > self._max_prompts or self._bytes > self._max_bytes:
                self._bytes -= len(self._prompts.popitem(last=False)[1][1])
        return name


class RecentKeys:
    """Keys remembered for `seconds`, at most `limit` of them: the oldest are forgotten first."""

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
        with self._lock:
            for key in keys:
                self._until.pop(key, None)

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return self._until.get(key, 0.0) > self._clock()

    def clear(self) -> None:
        with self._lock:
            self._until.clear()


class FailedKeys(RecentKeys):
    """Blocks whose load has failed: no match reaches over them for a while, so that no request meets them twice.

    One that is stored anew is discarded.
    """

    def good_prefix(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are free of failed ones."""
        with self._lock:
            now = self._clock()
            while self._until and next(iter(self._until.values())) <= now:
                self._until.popitem(last=False)
            if not self._until:
                return len(keys)
            return next((index for index, key in enumerate(keys) if key in self._until), len(keys))
