"""Warm, page-aligned memory of many blocks, and the machine's own speed of copying between two such memories."""

from __future__ import annotations

import ctypes
import mmap
import random

from cachesvc.connector.payloads import Payloads, Region


class Blocks:
    """`count` buffers of `size` bytes, each on its own pages, all of them written once: no page is missing later."""

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self.count = count
        stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, stride * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.views = Payloads(Region(memoryview(memory)), range(0, stride * count, stride), size)
        self.addresses = self.views.addresses
        self.fill(0)

    def fill(self, seed: int) -> None:
        """Bytes that differ from block to block, and from seed to seed. The same for the same seed."""
        pattern = random.Random(seed).randbytes(min(self.size, 1 << 16))
        for index, view in enumerate(self.views):
            for start in range(0, self.size, len(pattern)):
                part = pattern[: self.size - start]
                view[start : start + len(part)] = part
            stamp = f"{seed}/{index}".encode()[: self.size]
            view[: len(stamp)] = stamp


def copy_all(target: Blocks, source: Blocks) -> None:
    """Plain memory copies, block by block: the ceiling of everything that moves payloads."""
    for into, out_of in zip(target.addresses, source.addresses, strict=True):
        ctypes.memmove(into, out_of, source.size)
