"""Reference kernels in plain torch: correct on any device, fast enough on a CPU.

A batch of blocks costs one concatenation and one indexed copy per layer, however many blocks it holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

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
