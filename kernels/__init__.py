"""Gather and scatter between paged KV and the payloads of blocks, one interface for every device."""

from cachesvc.kernels.base import BlockKernels, kernels_for

__all__ = ["BlockKernels", "kernels_for"]
