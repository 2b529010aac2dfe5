"""One interface between an engine's paged KV and the payloads of blocks.

This package knows tensors and bytes only; it imports nothing else of cachesvc, so that every adapter can use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class BlockKernels(Protocol):
    """Moves whole blocks between payloads in host memory and a paged KV pool.

    The arguments are the same in both directions:

    * `payloads`: `n` buffers of equal size, one per block and in prefix order. The bytes of one payload are
      ``[layers, planes, tokens, kv_heads, head_dim]`` in the pool's dtype, without padding (the order of
      `cachesvc.connector.layout.KVGroup`).
    * `kv`: one tensor per layer, ``[planes, num_slots, kv_heads, head_dim]``, all of one shape, dtype and device.
      `planes` is 2 (K, then V) or 1 (a shared compressed KV).
    * `slots`: int64 ``[n * tokens]``, the pool slot (``page * page_size + offset``) of every token of the `n` blocks,
      in prefix order. Slots need not be consecutive and pages need not divide a block.

    Both raise `ValueError`, before anything is written, when the sizes do not fit each other.
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


def kernels_for(device: torch.device | str) -> BlockKernels:
    """The fastest kernels for a pool on `device`. The torch reference is correct on every device."""
    from cachesvc.kernels.torch_ref import TorchBlockKernels

    del device  # One implementation so far.
    return TorchBlockKernels()
