"""One interface between an engine's paged KV and the payloads of blocks.

This package knows tensors and bytes only; it imports nothing else of cachesvc, so that every adapter can use it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from cachesvc.kernels.pool import Blocks, PagedPool

logger = logging.getLogger("cachesvc.kernels")


class BlockKernels(Protocol):
    """Moves whole blocks between payloads and a paged KV pool.

    `scatter` and `gather` take payloads in ordinary host memory and are done when they return. `scatter_blocks` and
    `gather_blocks` take payloads in memory that the device reaches itself: they are enqueued on the current stream.

    All of them raise `ValueError`, before anything is written, when the sizes do not fit each other.

    `scatter` and `gather` have these arguments:

    * `payloads`: `n` buffers of equal size, one per block and in prefix order. The bytes of one payload are
      ``[layers, planes, tokens, kv_heads, head_dim]`` in the pool's dtype, without padding (the order of
      `cachesvc.connector.layout.KVGroup`).
    * `kv`: one tensor per layer, ``[planes, num_slots, kv_heads, head_dim]``, all of one shape, dtype and device.
      `planes` is 2 (K, then V) or 1 (a shared compressed KV).
    * `slots`: int64 ``[n * tokens]``, the pool slot (``page * page_size + offset``) of every token of the `n` blocks,
      in prefix order. Slots need not be consecutive and pages need not divide a block.
    """

    def scatter(
        self, payloads: Sequence[memoryview], kv: Sequence[torch.Tensor], slots: torch.Tensor, *, skip: int = 0
    ) -> None:
        """Copies the payloads (may be read-only) into the pool. They are no longer needed once this returns.

        The first `skip` tokens are left out, and their slots are not looked at: the engine has them already.
        """
        ...

    def gather(self, kv: Sequence[torch.Tensor], slots: torch.Tensor, payloads: Sequence[memoryview]) -> None:
        """Copies the pool's slots into the payloads (writable, filled completely once this returns)."""
        ...

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
        """Copies payloads into the pages of all groups of the pool, in one launch.

        `tables`: for each group int64 ``[n * group.pages]``, the page of every page of the `n` blocks, on the pool's
        device, in prefix order. `skip`: for each group, so many pages at the beginning are left out, and their table
        is not looked at. `layers`: only layers [first, end) of each group. `origin`: what lies at each offset is a
        payload from this byte on, of which only the part with these layers needs to be there. `programs`: how many
        programs run at a time, where the device has such a thing; 0 leaves it to the kernels.
        """
        ...

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
        """The reverse. Bytes of a payload that no group covers keep what they had."""
        ...


def kernels_for(device: torch.device | str) -> BlockKernels:
    """The fastest kernels for a pool on `device`: Triton's on CUDA, else the torch reference, correct everywhere.

    Ascend (``npu``) is a slot for a backend of its own: a class in ``cachesvc.kernels.ascend_blocks`` with the methods
    of `BlockKernels`, returned from here. Until there is one the reference serves it through torch's own device
    support: correct, at the speed of ``index_copy_``.
    """
    if torch.device(device).type == "cuda":
        try:
            from cachesvc.kernels.triton_blocks import TritonBlockKernels
        except ImportError as error:
            logger.warning("Triton cannot be imported (%s): blocks are moved by torch, several times slower", error)
        else:
            return TritonBlockKernels()
    from cachesvc.kernels.torch_ref import TorchBlockKernels

    return TorchBlockKernels()
