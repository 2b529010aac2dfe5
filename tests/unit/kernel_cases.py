"""Layouts of pools, small, and the check of any kernels on any device against the torch reference on the CPU."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable
from typing import Any

import torch

from cachesvc.kernels import BlockKernels, Blocks, PagedPool, PageGroup, pool_of_layers, pool_of_pages
from cachesvc.kernels.torch_ref import TorchBlockKernels

Make = Callable[[torch.Generator, int], PagedPool]
"""Makes a pool with room for so many blocks."""


def _bytes(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def _layers(layers: int, planes: int, row: int, page: int) -> Make:
    def make(generator: torch.Generator, blocks: int) -> PagedPool:
        kv = [_bytes(generator, planes, 2 * blocks * 128, 1, row) for _ in range(layers)]
        return pool_of_layers(kv, page_tokens=page, block_tokens=128)

    return make


def _one_pool(token_bytes: int, page: int) -> Make:
    def make(generator: torch.Generator, blocks: int) -> PagedPool:
        return pool_of_pages(_bytes(generator, 2 * blocks * 128 // page, token_bytes * page), pages=128 // page)

    return make


def _together(layers: int, row: int, page: int) -> Make:
    """K and V of a page together, ``[pages, 2, tokens, bytes]`` per layer, the pages a little apart."""

    def make(generator: torch.Generator, blocks: int) -> PagedPool:
        size = 2 * page * row
        regions = [_bytes(generator, 2 * blocks * 128 // page, size + 64)[:, :size] for _ in range(layers)]
        return PagedPool((PageGroup(tuple(regions), 128 // page, layers),))

    return make


def _groups(page: int) -> Make:
    """Two groups with pages of different sizes and a hole in the payload between and behind them."""

    def make(generator: torch.Generator, blocks: int) -> PagedPool:
        first = PageGroup(
            tuple(_bytes(generator, 2 * blocks * 128 // page, page * 32) for _ in range(6)), 128 // page, 3
        )
        second = PageGroup(
            tuple(_bytes(generator, 2 * blocks * 2, 64 * 24) for _ in range(2)), 2, 2, first.payload_bytes + 4096
        )
        return PagedPool((first, second), first.payload_bytes + second.payload_bytes + 8192)

    return make


CASES: dict[str, Make] = {
    **{f"layers, K and V apart, page {page}": _layers(3, 2, 64, page) for page in (16, 32, 64, 128)},
    **{f"MLA, page {page}": _layers(4, 1, 144, page) for page in (16, 32, 64, 128)},
    **{f"one pool of 890 B a token, page {page}": _one_pool(890, page) for page in (16, 32, 64, 128)},
    **{f"K and V together, page {page}": _together(3, 48, page) for page in (16, 32, 64, 128)},
    **{f"two groups, page {page}": _groups(page) for page in (16, 32, 64, 128)},
    "single tokens for pages": _layers(2, 2, 64, 1),
    "rows of 8 bytes": _layers(2, 2, 8, 1),
    "rows of 6 bytes": _layers(2, 2, 6, 1),
    "rows of 3 bytes": _layers(2, 1, 3, 1),
}


def _on(pool: PagedPool, device: torch.device) -> PagedPool:
    def moved(region: torch.Tensor) -> torch.Tensor:
        """With the same strides: rows may lie apart."""
        whole = torch.empty(region.shape[0] * region.stride(0), dtype=torch.uint8, device=device)
        view = whole.as_strided(region.shape, region.stride())
        view.copy_(region)
        return view

    groups = [
        PageGroup(tuple(moved(region) for region in group.regions), group.pages, group.layers, group.offset)
        for group in pool.groups
    ]
    return PagedPool(tuple(groups), pool.payload_bytes)


def check_case(name: str, kernels: BlockKernels, device: Any, seed: int = 0) -> None:
    """Both directions, whole and by layers, with pages skipped; every byte of pool and payloads is compared.

    `device` registers the host memory that payloads lie in, and names where the pool lies.
    """
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    blocks = rng.choice((1, 2, 3))
    wanted = CASES[name](generator, blocks)
    slot = -(-wanted.payload_bytes // 4096) * 4096
    mapped = mmap.mmap(-1, 8 * slot)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    device.register(memory.data_ptr(), len(memory))
    try:
        reference = TorchBlockKernels()
        found = _on(wanted, device.torch_device)
        tables = [
            torch.randperm(group.num_pages, generator=generator)[: blocks * group.pages] for group in wanted.groups
        ]
        there = [table.to(device.torch_device) for table in tables]
        offsets = [slot * number for number in rng.sample(range(8), blocks)]
        third = max(1, wanted.layers // 3)
        for layers in (None, (0, third), (third, wanted.layers)):
            skip = [rng.randrange(len(table)) for table in tables] if rng.random() < 0.5 else []
            memory.copy_(_bytes(generator, len(memory)))
            expected = memory.clone()
            kernels.scatter_blocks(Blocks(memory, offsets), found, there, skip=skip, layers=layers)
            _wait(device)
            reference.scatter_blocks(Blocks(expected, offsets), wanted, tables, skip=skip, layers=layers)
            _compare(f"{name}: scatter of layers {layers}, skip {skip}", found, wanted, memory, expected)
            memory.fill_(0xA5)
            expected.fill_(0xA5)
            kernels.gather_blocks(found, there, Blocks(memory, offsets), layers=layers)
            _wait(device)
            reference.gather_blocks(wanted, tables, Blocks(expected, offsets), layers=layers)
            _compare(f"{name}: gather of layers {layers}", found, wanted, memory, expected)
    finally:
        device.unregister(memory.data_ptr())


def _wait(device: Any) -> None:
    device.current().record().synchronize()


def _compare(what: str, found: PagedPool, wanted: PagedPool, memory: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(memory, expected), f"{what}: payloads differ"
    for group, other in zip(found.groups, wanted.groups, strict=True):
        for region, reference in zip(group.regions, other.regions, strict=True):
            assert torch.equal(region.cpu(), reference), f"{what}: pages differ"
