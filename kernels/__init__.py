"""Gather and scatter between paged KV and the payloads of blocks, one interface for every device.

``base``           the interface, and which kernels a device gets
``pool``           how a pool lies in memory, and where payloads lie
``torch_ref``      the reference, in plain torch
``triton_blocks``  one launch for all layers and groups, on CUDA
"""

from cachesvc.kernels.base import BlockKernels, kernels_for
from cachesvc.kernels.pool import Blocks, PagedPool, PageGroup, pool_of_layers, pool_of_pages

__all__ = ["BlockKernels", "Blocks", "PageGroup", "PagedPool", "kernels_for", "pool_of_layers", "pool_of_pages"]
