"""Page-aligned payload buffers in one private anonymous mapping, handed out by number."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

from cachesvc.connector.payloads import SLOT_PAGE, Payloads, Region


class Slots:
    """`count` buffers of `payload_bytes`, each on its own pages. Untouched ones cost address space only.

    Private, so that a forked child never writes into its parent's. Raises `OSError` when there is no address space.
    """

    def __init__(self, payload_bytes: int, count: int) -> None:
        self.payload_bytes = payload_bytes
        self.count = count
        self._stride = -(-payload_bytes // SLOT_PAGE) * SLOT_PAGE
        mapping = mmap.mmap(-1, max(1, self._stride * count), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._region = Region(memoryview(mapping))
        self._lock = threading.Lock()
        self._free = list(range(count - 1, -1, -1))  # a stack: the buffer used last is the one still in a cache

    def view(self, slot: int) -> memoryview:
        start = slot * self._stride
        return self._region.memory[start : start + self.payload_bytes]

    def views(self, slots: Sequence[int]) -> Payloads:
        """`view` of many."""
        return Payloads(self._region, [slot * self._stride for slot in slots], self.payload_bytes)

    def take(self, wanted: int) -> list[int]:
        """Up to `wanted` free slots, perhaps none. The caller owns them until `give`."""
        with self._lock:
            return [self._free.pop() for _ in range(min(wanted, len(self._free)))]

    def give(self, slots: list[int]) -> None:
        with self._lock:
            self._free.extend(slots)
            assert len(self._free) <= self.count, "a buffer was given back twice"

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return (self.count - len(self._free)) * self.payload_bytes


class LoadBuffers:
    """Reusable `Slots` for loads: one for each load that runs, of which `keep` are kept when they end."""

    def __init__(self, payload_bytes: int, batch_bytes: int, keep: int) -> None:
        self._payload_bytes = payload_bytes
        self._count = max(1, batch_bytes // payload_bytes)
        self._keep = keep
        self._lock = threading.Lock()
        self._idle: list[Slots] = []

    def take(self) -> Slots:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return Slots(self._payload_bytes, self._count)

    def give(self, slots: Slots) -> None:
        with self._lock:
            if len(self._idle) < self._keep:
                self._idle.append(slots)
