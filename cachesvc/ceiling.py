"""What an infinite cache would have hit: every block but those that were never there before.

Counting different keys exactly would need memory for all of them. The count is estimated with a HyperLogLog sketch
(Flajolet et al., 2007) read by its historic inverse probability (Cohen, KDD 2014; Ting, KDD 2014): whenever a key
changes the sketch, the count grows by one over the probability of such a change. The increments are unbiased, so they
can be given to the minute and the model in which they fell.
"""

from __future__ import annotations

import logging
import math
import struct
import threading
from collections import deque
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from cachesvc.keys import KEY_BYTES
from cachesvc.store_dir import write_atomically

log = logging.getLogger("cachesvc.ceiling")

_REGISTERS: Final = 1 << 14

RELATIVE_ERROR: Final = math.sqrt(math.log(2) / _REGISTERS)
"""Standard error of the number of different keys (Ting, 2014): 0.65 %."""

_STATE: Final = struct.Struct("<8sdd")  # magic, probability of a change x registers, fraction not yet given out
_MAGIC: Final = b"cchceil1"

# Stored blocks that wait to be counted; a full list is counted by whoever fills it.
_MAX_WAITING: Final = 256


class Ceiling:
    """Counts keys (16 uniformly distributed bytes each). Thread-safe; some 20 KiB however many there are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registers: NDArray[np.uint8] = np.zeros(_REGISTERS, np.uint8)
        self._changing = float(_REGISTERS)
        self._rest = 0.0
        self._waiting: deque[bytes] = deque()

    def stored(self, keys: bytes) -> None:
        """Keys that are there from now on without having been asked for. Costs nothing now."""
        self._waiting.append(keys)
        if len(self._waiting) > _MAX_WAITING:
            with self._lock:
                self._count_waiting()

    def asked(self, keys: bytes) -> int:
        """Estimates how many of these keys were neither asked for nor stored before, and counts them."""
        with self._lock:
            self._count_waiting()
            self._rest += self._insert(keys)
            new, self._rest = divmod(self._rest, 1.0)
        return int(new)

    def save(self, path: Path) -> None:
        """Raises `OSError`."""
        with self._lock:
            self._count_waiting()
            state = _STATE.pack(_MAGIC, self._changing, self._rest) + self._registers.tobytes()
        write_atomically(path, state + xxhash.xxh3_64_digest(state))

    def load(self, path: Path) -> None:
        """Goes on where `save` stopped; from nothing when the file is missing or damaged."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("the count of blocks ever seen starts anew: %s: %s", path, error.strerror)
            return
        state, digest = data[:-8], data[-8:]
        if len(state) != _STATE.size + _REGISTERS or xxhash.xxh3_64_digest(state) != digest or state[:8] != _MAGIC:
            log.warning("the count of blocks ever seen starts anew: %s is damaged", path)
            return
        with self._lock:
            _, self._changing, self._rest = _STATE.unpack_from(state)
            self._registers = np.frombuffer(state, np.uint8, offset=_STATE.size).copy()

    def _count_waiting(self) -> None:
        while self._waiting:
            self._insert(self._waiting.popleft())

    def _insert(self, keys: bytes) -> float:
        """The estimated number of keys that were new."""
        words = np.frombuffer(keys, "<u8").reshape(-1, KEY_BYTES // 8)
        registers = (words[:, 0] % _REGISTERS).astype(np.intp)
        # Position of the first set bit: 64 minus the bit length, which a float's exponent tells.
        ranks = 64 - np.frexp((words[:, 1] >> np.uint64(1)).astype(np.float64))[1]
        new = 0.0
        for i in np.flatnonzero(ranks > self._registers[registers]).tolist():
            register, rank = registers[i], int(ranks[i])
            known = int(self._registers[register])
            if rank > known:  # not if a key before it in this call has raised it
                new += _REGISTERS / self._changing
                self._changing += 2.0**-rank - 2.0**-known
                self._registers[register] = rank
        return new
