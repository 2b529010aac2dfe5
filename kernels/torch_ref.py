"""Reference kernels in plain torch: correct on any device, fast enough on a CPU.

A batch of blocks costs one concatenation and one indexed copy per layer, however many blocks it holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from cachesvc.kernels.pool import Blocks, PagedPool, PageGroup

# Payloads that arrive are read-only and stay so: we only read from them. Torch warns about such buffers, once per
# process; spend that one warning here, where nobody has to wonder about it.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class TorchBlockKernels:
    """`BlockKernels` by ``index_copy_`` and ``index_select``."""

    def scatter(
        self, payloads: Sequence[memoryview], kv: Sequence[torch.Tensor], slots: torch.Tensor, *, skip: int = 0
    ) -> None:
        blocks = _as_tensors(payloads, kv, slots, writable=False)
        if not blocks:
            return
        tokens = torch.cat(blocks, dim=2).to(kv[0].device)  # [layers, planes, n * tokens, kv_heads, head_dim]
        for layer, source in zip(kv, tokens[:, :, skip:], strict=True):
            layer.index_copy_(1, slots[skip:], source)

    def gather(self, kv: Sequence[torch.Tensor], slots: torch.Tensor, payloads: Sequence[memoryview]) -> None:
        blocks = _as_tensors(payloads, kv, slots, writable=True)
        if not blocks:
            return
        tokens = torch.stack([layer.index_select(1, slots) for layer in kv]).to("cpu")
        for block, source in zip(blocks, tokens.chunk(len(blocks), dim=2), strict=True):
            block.copy_(source)

    def scatter_blocks(
        self,
        blocks: Blocks,
        pool: PagedPool,
        tables: Sequence[torch.Tensor],
        *,
        skip: Sequence[int] = (),
        layers: tuple[int, int] | None = None,
        origin: int = 0,
        programs: int = 0,
    ) -> None:
        pool.check(blocks, tables, layers, origin)
        for index, (group, table) in enumerate(zip(pool.groups, tables, strict=True)):
            left_out = skip[index] if skip else 0
            first, end = group.range_of(layers)
            if not len(blocks) or first == end:
                continue
            parts = torch.stack(
                [_part(blocks, offset - origin, group, first, end) for offset in blocks.offsets.tolist()], 1
            )
            parts = parts.to(pool.device).view(end - first, -1, group.page_bytes)[:, left_out:]
            for region, part in zip(group.regions[first:end], parts, strict=True):
                region.index_copy_(0, table[left_out:], part)

    def gather_blocks(
        self,
        pool: PagedPool,
        tables: Sequence[torch.Tensor],
        blocks: Blocks,
        *,
        layers: tuple[int, int] | None = None,
        origin: int = 0,
        programs: int = 0,
    ) -> None:
        pool.check(blocks, tables, layers, origin)
        for group, table in zip(pool.groups, tables, strict=True):
            first, end = group.range_of(layers)
            if not len(blocks) or first == end:
                continue
            found = torch.stack([region.index_select(0, table) for region in group.regions[first:end]])
            found = found.view(end - first, len(blocks), group.pages, group.page_bytes).to(blocks.memory.device)
            for number, offset in enumerate(blocks.offsets.tolist()):
                _part(blocks, offset - origin, group, first, end).copy_(found[:, number])


def _part(blocks: Blocks, offset: int, group: PageGroup, first: int, end: int) -> torch.Tensor:
    """Regions [first, end) of one group in one payload: ``[regions, pages, page_bytes]``, over the same memory."""
    start = offset + group.offset + first * group.region_bytes
    part = blocks.memory[start : start + (end - first) * group.region_bytes]
    return part.view(end - first, group.pages, group.page_bytes)


def _as_tensors(
    payloads: Sequence[memoryview], kv: Sequence[torch.Tensor], slots: torch.Tensor, *, writable: bool
) -> list[torch.Tensor]:
    """Each payload as a tensor ``[layers, planes, tokens, kv_heads, head_dim]`` over the same memory, sizes checked."""
    if not payloads:
        if slots.numel():
            raise ValueError(f"{slots.numel()} slots were given for no payloads")
        return []
    if not kv:
        raise ValueError("the KV pool has no layers")
    if slots.numel() % len(payloads):
        raise ValueError(f"{slots.numel()} slots do not divide into {len(payloads)} blocks")
    planes, _, kv_heads, head_dim = kv[0].shape
    shape = (len(kv), planes, slots.numel() // len(payloads), kv_heads, head_dim)
    elements = len(kv) * planes * shape[2] * kv_heads * head_dim
    expected = elements * kv[0].element_size()
    for index, payload in enumerate(payloads):
        if payload.nbytes != expected:
            raise ValueError(
                f"payload {index} has {payload.nbytes} bytes; {shape[2]} tokens of this pool take {expected}"
            )
        if writable and payload.readonly:
            raise ValueError(f"payload {index} is read-only; gather needs writable buffers")
    return [torch.frombuffer(payload, dtype=kv[0].dtype).view(shape) for payload in payloads]
