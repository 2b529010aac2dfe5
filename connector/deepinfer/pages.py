"""What the payload of a block holds, and copies between payloads and DeepInfer's pool.

The pool is ``[blocks, bytes of a block]`` uint8. A block of DeepInfer's is one of ours, 128 tokens: the KV of all
layers
lies in it one behind the other, and at its end there may be bytes that nobody uses. A payload is a block without those.
Copies run on a stream of their own, behind a `Fence`: the device may still be at work on what a block held before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import torch

from cachesvc.kernels import kernels_for
from cachesvc.keys import BLOCK_TOKENS

LAYOUT_VERSION: Final = 1

Layout = Sequence[tuple[int, int, int]]
"""DeepInfer's ``get_kvcache_layout``: (layer, offset, bytes) of every layer that owns KV."""


class Unsupported(Exception):
    """KV of this engine cannot be stored; says why. The engine runs without the cache."""


def payload_bytes_of(layout: Layout, bytes_per_block: int, block_size: int) -> int:
    """Bytes of one payload. Raises `Unsupported` for a layout whose layers do not lie one behind the other."""
    if block_size != BLOCK_TOKENS:
        raise Unsupported(f"blocks of {block_size} tokens; it knows {BLOCK_TOKENS}")
    end = 0
    for layer, offset, length in layout:
        if offset != end or length <= 0:
            raise Unsupported(f"a block in which layer {layer} begins at {offset} and not at {end}")
        end += length
    if not 0 < end <= bytes_per_block:
        raise Unsupported(f"blocks of {bytes_per_block} bytes whose layers take {end}")
    return end


class Fence:
    """All work that the device had been given when this was made. `wait` returns when it is done; from any thread."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type != "cpu":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class PagedBlocks:
    """DeepInfer's pool, as the kernels take it."""

    def __init__(self, gpu_blocks: torch.Tensor, payload_bytes: int) -> None:
        self.device = gpu_blocks.device
        wide = all(size % 8 == 0 for size in (payload_bytes, gpu_blocks.shape[1], gpu_blocks.data_ptr()))
        words = gpu_blocks.view(torch.int64) if wide else gpu_blocks
        used = words[:, : payload_bytes // words.element_size()]
        self._kv = [used.unsqueeze(0).unsqueeze(2)]  # one plane, a block as one token, one head
        self._kernels = kernels_for(self.device)

    def fence(self) -> Fence:
        """Of the stream on which the engine computes, which is the caller's."""
        return Fence(self.device)

    def scatter(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Done when this returns."""
        with self._aside():
            self._kernels.scatter(payloads, self._kv, self._slots(blocks))

    def gather(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        with self._aside():
            self._kernels.gather(self._kv, self._slots(blocks), payloads)

    def _slots(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.device)

    @contextlib.contextmanager
    def _aside(self) -> Any:
        """A stream of the calling thread's own, empty at the end: copies neither wait for a step nor delay one."""
        if self.device.type == "cpu":
            yield
            return
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield
            torch.cuda.current_stream().synchronize()
