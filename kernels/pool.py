"""How a paged KV pool lies in memory, whatever the engine, and where the payloads of blocks lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

MAX_PAYLOAD_BYTES = 1 << 30
"""Kernels count the bytes of one payload in 32 bits."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Payloads of `n` blocks: at each of `offsets` into `memory` begins one.

    `memory`: uint8 ``[bytes]``, an arena that is registered with the device, or memory of the device. `offsets` may be
    given as any sequence of integers; it becomes int64 ``[n]``.
    """

    memory: torch.Tensor
    offsets: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", np.asarray(self.offsets, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, part: slice) -> Blocks:
        return Blocks(self.memory, self.offsets[part])


@dataclass(frozen=True)
class PageGroup:
    """Pages that one table addresses, all of one size.

    `regions`: uint8 ``[num_pages, page_bytes]``, one for each layer and plane (layers outermost), each row contiguous;
    rows may lie apart. `pages`: of one region in one block. `offset`: where the group begins in a payload; its bytes
    there are ``[regions, pages, page_bytes]`` without padding.
    """

    regions: tuple[torch.Tensor, ...]
    pages: int
    layers: int
    offset: int = 0

    def __post_init__(self) -> None:
        first = self.regions[0] if self.regions else None
        if first is None or self.pages < 1 or self.layers < 1 or len(self.regions) % self.layers or self.offset < 0:
            raise ValueError(
                f"a group of {len(self.regions)} regions, {self.layers} layers, {self.pages} pages per block and "
                f"offset {self.offset} makes no sense"
            )
        for region in self.regions:
            if (
                region.dtype != torch.uint8
                or region.dim() != 2
                or region.stride(1) != 1
                or (region.shape, region.stride(), region.device) != (first.shape, first.stride(), first.device)
            ):
                raise ValueError(
                    f"a region is {region.dtype} {tuple(region.shape)} with strides {region.stride()} on "
                    f"{region.device}; all must be uint8 [pages, bytes] with contiguous rows, and alike"
                )

    @property
    def page_bytes(self) -> int:
        return int(self.regions[0].shape[1])

    @property
    def page_stride(self) -> int:
        return int(self.regions[0].stride(0))

    @property
    def num_pages(self) -> int:
        return int(self.regions[0].shape[0])

    @property
    def region_bytes(self) -> int:
        """Of one region in one payload."""
        return self.pages * self.page_bytes

    @property
    def payload_bytes(self) -> int:
        return len(self.regions) * self.region_bytes

    def range_of(self, layers: tuple[int, int] | None) -> tuple[int, int]:
        """Regions [first, end) that belong to these layers."""
        planes = len(self.regions) // self.layers
        first, end = (0, self.layers) if layers is None else layers
        return min(first, self.layers) * planes, min(end, self.layers) * planes


@dataclass(frozen=True)
class PagedPool:
    """All groups of one pool. `payload_bytes` of one block may be more than the groups cover."""

    groups: tuple[PageGroup, ...]
    payload_bytes: int = field(default=0)

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("the KV pool has no layers")
        covered = max(group.offset + group.payload_bytes for group in self.groups)
        if not self.payload_bytes:
            object.__setattr__(self, "payload_bytes", covered)
        if not covered <= self.payload_bytes <= MAX_PAYLOAD_BYTES:
            raise ValueError(f"payloads of {self.payload_bytes} bytes; the groups cover {covered}")

    @property
    def device(self) -> torch.device:
        return self.groups[0].regions[0].device

    @property
    def layers(self) -> int:
        return max(group.layers for group in self.groups)

    def spans(self, layers: tuple[int, int] | None) -> list[tuple[int, int]]:
        """Where in a payload these layers lie, (place, bytes) in ascending order, neighbours together."""
        spans: list[tuple[int, int]] = []
        for group in sorted(self.groups, key=lambda group: group.offset):
            first, end = group.range_of(layers)
            place, size = group.offset + first * group.region_bytes, (end - first) * group.region_bytes
            if spans and size and sum(spans[-1]) == place:
                spans[-1] = (spans[-1][0], spans[-1][1] + size)
            elif size:
                spans.append((place, size))
        return spans

    def check(
        self, blocks: Blocks, tables: Sequence[torch.Tensor], layers: tuple[int, int] | None, origin: int
    ) -> None:
        """Raises `ValueError` for sizes that do not fit. What stands in the tables is the caller's to answer for."""
        count = len(blocks)
        if blocks.memory.dtype != torch.uint8 or blocks.memory.dim() != 1 or not blocks.memory.is_contiguous():
            raise ValueError(f"payload memory is {blocks.memory.dtype} {tuple(blocks.memory.shape)}, not uint8 [bytes]")
        if layers is not None and not 0 <= layers[0] <= layers[1] <= self.layers:
            raise ValueError(f"layers {layers[0]} to {layers[1]} are asked for; the pool has {self.layers}")
        spans = self.spans(layers)
        if count and spans:
            low, high = int(blocks.offsets.min()) - origin, int(blocks.offsets.max()) - origin
            if low + spans[0][0] < 0 or high + sum(spans[-1]) > blocks.memory.numel() or origin > spans[0][0]:
                raise ValueError(
                    f"payloads of {self.payload_bytes} bytes, from byte {origin} on, at {low + origin} to "
                    f"{high + origin} do not lie in {blocks.memory.numel()} bytes"
                )
        if len(tables) != len(self.groups):
            raise ValueError(f"{len(tables)} page tables were given for {len(self.groups)} groups")
        for group, table in zip(self.groups, tables, strict=True):
            if table.numel() != count * group.pages or table.dtype != torch.int64:
                raise ValueError(
                    f"a page table has {table.numel()} entries of {table.dtype}; {count} blocks of {group.pages} pages "
                    "take that many of int64"
                )


def pool_of_layers(kv: Sequence[torch.Tensor], *, page_tokens: int, block_tokens: int) -> PagedPool:
    """One tensor per layer, ``[planes, num_slots, ...]``: K and V apart (planes 2) or one compressed KV (planes 1).

    Payloads are ``[layers, planes, tokens, ...]``. Raises `ValueError` when pages do not divide a block: use
    `page_tokens` 1 then, with slots for pages.
    """
    if not kv:
        raise ValueError("the KV pool has no layers")
    if block_tokens % page_tokens or kv[0].shape[1] % page_tokens:
        raise ValueError(f"pages of {page_tokens} tokens do not divide {block_tokens} or {kv[0].shape[1]} slots")
    regions = tuple(_rows(plane, plane.shape[0] // page_tokens) for layer in kv for plane in layer.unbind(0))
    return PagedPool((PageGroup(regions, block_tokens // page_tokens, len(kv)),))


def pool_of_pages(pool: torch.Tensor, *, pages: int) -> PagedPool:
    """One ``[num_pages, bytes of all layers]`` pool: a payload is `pages` such rows, one behind the other."""
    return PagedPool((PageGroup((_rows(pool, pool.shape[0]),), pages, 1),))


def _rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The same memory as uint8 ``[rows, bytes]``. Raises `ValueError` when it does not lie so."""
    try:
        return tensor.view(rows, -1).view(torch.uint8)
    except RuntimeError as error:
        raise ValueError(f"a pool of {tuple(tensor.shape)} with strides {tensor.stride()} has no pages") from error
