"""Triton kernels: one launch moves whole blocks between payloads and the pages of all layers and groups.

Payloads may lie in the device's memory or in host memory that is registered with it; then every access crosses the
link, so what counts is wide accesses and many of them under way. Each program moves tiles of `_UNITS` units, a unit
being the widest power of two, up to 16 bytes, that divides every address. Few programs are enough to fill a link:
how many is the caller's choice, since those are multiprocessors that compute has not.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
import triton
import triton.language as tl

from cachesvc.kernels.pool import Blocks, PagedPool
from cachesvc.kernels.torch_ref import TorchBlockKernels

_UNITS: Final = 2048
_WARPS: Final = 8
_MAX_POOLS: Final = 16
"""Pools whose addresses are kept on the device; the least recently used is forgotten."""

_MAX_KEPT: Final = 256
_MAX_KEPT_NUMBERS: Final = 2048
"""Arguments of launches that are kept on the device, and the most numbers that one may have."""

LINK_PROGRAMS: Final = 16
"""Programs for payloads in host memory: measured to fill a PCIe 5 x16 link, see docs/performance.md."""

DEVICE_PROGRAMS: Final = 1024
"""Programs for payloads in the device's memory: as many as there is room for."""


@triton.jit
def _move(
    bases,  # int64 [n]: address of each payload
    regions,  # int64 [regions of all groups]: address of each
    tables,  # int64 [pages of all groups]: page tables one behind the other
    spans,  # int64 [groups, 5]: first region, its place in a payload, first tile, bytes, skipped pages
    blocks,
    tiles,  # of one block
    GROUPS: tl.constexpr,  # per group: page bytes, page stride, pages of a block, where its table begins per block
    TO_POOL: tl.constexpr,
    UNIT: tl.constexpr,  # bytes
    WORD: tl.constexpr,
    WORDS: tl.constexpr,  # of a unit
    UNITS: tl.constexpr,  # of a tile
):
    units = tl.arange(0, UNITS)[:, None]
    words = tl.arange(0, WORDS)[None, :]
    work = tl.program_id(0)
    while work < blocks * tiles:
        block = work // tiles
        tile = work % tiles
        base = tl.load(bases + block)
        for group in tl.static_range(len(GROUPS)):
            first_tile = tl.load(spans + group * 5 + 2).to(tl.int32)
            size = tl.load(spans + group * 5 + 3).to(tl.int32)
            if (tile >= first_tile) & (tile < first_tile + (size + UNITS * UNIT - 1) // (UNITS * UNIT)):
                page_bytes: tl.constexpr = GROUPS[group][0]
                stride: tl.constexpr = GROUPS[group][1]
                pages: tl.constexpr = GROUPS[group][2]
                before: tl.constexpr = GROUPS[group][3]
                first_region = tl.load(spans + group * 5)
                place = tl.load(spans + group * 5 + 1)
                skip = tl.load(spans + group * 5 + 4)
                at = ((tile - first_tile) * UNITS + units) * UNIT
                region = at // (pages * page_bytes)
                inside = at % (pages * page_bytes)
                page = block * pages + inside // page_bytes
                wanted = (at < size) & (page >= skip)
                number = tl.load(tables + before * blocks + page, mask=wanted, other=0)
                start = tl.load(regions + first_region + region, mask=wanted, other=0)
                paged = start + number * stride + inside % page_bytes
                packed = base + place + at
                pool_at = tl.multiple_of(paged.to(tl.pointer_type(WORD)) + words, (1, UNIT))
                pack_at = tl.multiple_of(packed.to(tl.pointer_type(WORD)) + words, (1, UNIT))
                pool_at = tl.max_contiguous(pool_at, (1, WORDS))
                pack_at = tl.max_contiguous(pack_at, (1, WORDS))
                mask = tl.broadcast_to(wanted, (UNITS, WORDS))
                if TO_POOL:
                    tl.store(pool_at, tl.load(pack_at, mask=mask), mask=mask)
                else:
                    tl.store(pack_at, tl.load(pool_at, mask=mask), mask=mask)
        work += tl.num_programs(0)


_WORDS: Final[dict[int, tuple[Any, int]]] = {
    16: (tl.int32, 4),
    8: (tl.int32, 2),
    4: (tl.int32, 1),
    2: (tl.int16, 1),
    1: (tl.int8, 1),
}


class TritonBlockKernels(TorchBlockKernels):
    """`BlockKernels` by one launch. Payloads in ordinary host memory go the reference's way.

    Host memory in `Blocks` must be registered with the device, which is not checked here: an access to other memory
    ends the process's use of the device with `cudaErrorIllegalAddress`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._addresses: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self._kept: OrderedDict[tuple[int, bytes], torch.Tensor] = OrderedDict()

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
        self._launch(blocks, pool, tables, skip or [0] * len(pool.groups), layers, origin, programs, to_pool=True)

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
        self._launch(blocks, pool, tables, [0] * len(pool.groups), layers, origin, programs, to_pool=False)

    def _launch(
        self,
        blocks: Blocks,
        pool: PagedPool,
        tables: Sequence[torch.Tensor],
        skip: Sequence[int],
        layers: tuple[int, int] | None,
        origin: int,
        programs: int,
        *,
        to_pool: bool,
    ) -> None:
        pool.check(blocks, tables, layers, origin)
        if not len(blocks):
            return
        bases = blocks.offsets + (blocks.memory.data_ptr() - origin)
        unit = unit_of(pool, bases)
        spans: list[int] = []
        tiles = first_region = 0
        for group, left_out in zip(pool.groups, skip, strict=True):
            first, end = group.range_of(layers)
            size = (end - first) * group.region_bytes
            place = group.offset + first * group.region_bytes
            spans += [first_region + first, place, tiles, size, left_out]
            tiles += -(-size // (_UNITS * unit))
            first_region += len(group.regions)
        if not tiles:
            return
        # One small copy to the device for all that is new; the tables are there already.
        count = len(bases)
        small = self._numbers(np.concatenate((bases, np.array(spans, dtype=np.int64))), pool.device)
        groups, before = [], 0
        for group in pool.groups:
            groups.append((group.page_bytes, group.page_stride, group.pages, before))
            before += group.pages
        if not programs:
            programs = LINK_PROGRAMS if blocks.memory.device != pool.device else DEVICE_PROGRAMS
        word, words = _WORDS[unit]
        _move[(min(programs, count * tiles),)](
            small[:count],
            self._regions(pool),
            tables[0] if len(tables) == 1 else torch.cat(list(tables)),
            small[count:],
            count,
            tiles,
            GROUPS=tuple(groups),
            TO_POOL=to_pool,
            UNIT=unit,
            WORD=word,
            WORDS=words,
            UNITS=_UNITS,
            num_warps=_WARPS,
        )

    def _numbers(self, values: Any, device: torch.device) -> torch.Tensor:
        """On the device, for the current stream. What comes again, such as the halves of a staging, is kept."""
        if device.type != "cuda":
            return torch.from_numpy(values)
        key = (torch.cuda.current_stream(device).cuda_stream, values.tobytes())
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            found = torch.from_numpy(values).pin_memory().to(device, non_blocking=True)
            if len(values) <= _MAX_KEPT_NUMBERS:
                with self._lock:
                    self._kept[key] = found
                    while len(self._kept) > _MAX_KEPT:
                        self._kept.popitem(last=False)
        return found

    def _regions(self, pool: PagedPool) -> torch.Tensor:
        """Addresses of all regions, on the pool's device: made once for each pool."""
        addresses = tuple(region.data_ptr() for group in pool.groups for region in group.regions)
        with self._lock:
            if addresses not in self._addresses:
                self._addresses[addresses] = torch.tensor(addresses, dtype=torch.int64, device=pool.device)
                while len(self._addresses) > _MAX_POOLS:
                    self._addresses.popitem(last=False)
            self._addresses.move_to_end(addresses)
            return self._addresses[addresses]


def unit_of(pool: PagedPool, bases: Any) -> int:
    """The widest access, a power of two up to 16 bytes, that fits every address of pool and payloads."""
    common = math.gcd(16, int(np.bitwise_or.reduce(bases)))
    for group in pool.groups:
        common = math.gcd(common, group.page_bytes, group.page_stride, group.offset)
        common = math.gcd(common, *(region.data_ptr() for region in group.regions))
    return common
