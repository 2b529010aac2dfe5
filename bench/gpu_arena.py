"""An arena of our own for benchmarks of the link, and pools of the shapes that engines have."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
from array import array
from collections.abc import Sequence
from typing import Final

import torch

from cachesvc.connector.payloads import SLOT_PAGE, Payloads, Region
from cachesvc.kernels import PagedPool, pool_of_layers, pool_of_pages

BLOCK_TOKENS: Final = 128


def gpu_name() -> str:
    """The device and its driver. Reads what the driver says of itself."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "unknown"
    return f"{torch.cuda.get_device_name()}, driver {driver}, CUDA {torch.version.cuda}, torch {torch.__version__}"


class Arena:
    """A memfd like the daemon's, filled with random bytes."""

    def __init__(self, size: int) -> None:
        descriptor = os.memfd_create("bench-arena")
        os.ftruncate(descriptor, size)
        self.memory = mmap.mmap(descriptor, size)
        os.close(descriptor)
        self.region = Region(memoryview(self.memory))
        self.region.writable = self.region
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        some = torch.randint(0, 256, (16 << 20,), dtype=torch.uint8)
        for start in range(0, size, len(some)):
            part = self.bytes[start : start + len(some)]
            part.copy_(some[: len(part)])
            part[::4096] = (start >> 24) % 251

    def slots(self, payload_bytes: int, count: int, *, neighbours: bool) -> Payloads:
        """The payloads of `count` blocks: one behind the other, or anywhere."""
        slot = -(-payload_bytes // SLOT_PAGE) * SLOT_PAGE
        every = range(len(self.memory) // slot)
        chosen = every[:count] if neighbours else random.Random(1).sample(every, count)
        return Payloads(self.region, array("Q", (number * slot for number in chosen)), payload_bytes)


def pool_of(name: str, blocks: int, device: torch.device, page_tokens: int = 16) -> PagedPool:
    """A pool with room for twice as many blocks, in pages of so many tokens, with random content."""
    pages = 2 * blocks * BLOCK_TOKENS // page_tokens
    if name == "one pool, 890 B a token":
        rows = torch.randint(0, 256, (pages, 890 * page_tokens), dtype=torch.uint8, device=device)
        return pool_of_pages(rows, pages=BLOCK_TOKENS // page_tokens)
    layers, planes, row = SHAPES[name]
    kv = [
        torch.randint(0, 256, (planes, pages * page_tokens, 1, row), dtype=torch.uint8, device=device)
        for _ in range(layers)
    ]
    return pool_of_layers(kv, page_tokens=page_tokens, block_tokens=BLOCK_TOKENS)


SHAPES: Final[dict[str, tuple[int, int, int]]] = {
    "8 layers, K and V": (8, 2, 512),
    "16 layers, K and V": (16, 2, 1024),
    "32 layers, K and V (Llama-3-8B)": (32, 2, 2048),
    "61 layers, MLA": (61, 1, 1152),
}
"""Layers, planes, and bytes of a token in one of them."""

POOLS: Final[Sequence[str]] = ("one pool, 890 B a token", *SHAPES)
