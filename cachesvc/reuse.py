"""How many different blocks are asked for between two requests for one block: what decides how large a cache must be.

The distance of every 64th key is measured, among such keys, and multiplied (spatial sampling, as in SHARDS: Waldspurger
et al., FAST 2015): unbiased, but a few very hot keys may be in the sample or not.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, OrderedDict
from typing import Final

import numpy as np

from cachesvc.histograms import REUSES, bucket
from cachesvc.keys import KEY_BYTES

_EVERY: Final = 64

# Sampled keys remembered (a window of a million blocks); past it the one unused for longest is forgotten.
_MAX_KEYS: Final = 16_384


class ReuseDistances:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stamps: OrderedDict[bytes, int] = OrderedDict()
        self._order: list[int] = []
        """The stamps, ascending."""
        self._next = 0
        self._counts: Counter[int] = Counter()

    def asked(self, keys: bytes) -> None:
        """A prompt's blocks, touched tail first as the tiers do."""
        sampled = np.flatnonzero(np.frombuffer(keys, np.uint8)[KEY_BYTES - 1 :: KEY_BYTES] < 256 // _EVERY)
        if not len(sampled):
            return
        with self._lock:
            for i in sampled[::-1].tolist():
                self._touch(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES])

    def counts(self) -> dict[int, int]:
        """References so far, by bucket of `histograms.REUSES`."""
        with self._lock:
            return dict(self._counts)

    def _touch(self, key: bytes) -> None:
        stamp = self._stamps.pop(key, None)
        if stamp is not None:
            place = bisect_left(self._order, stamp)
            self._counts[bucket(REUSES, _EVERY * (len(self._order) - place - 1))] += _EVERY
            del self._order[place]
        elif len(self._stamps) >= _MAX_KEYS:
            self._stamps.popitem(last=False)
            del self._order[0]
        self._stamps[key] = self._next
        self._order.append(self._next)
        self._next += 1
