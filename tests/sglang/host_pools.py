"""SGLang's host pools, as far as a storage backend sees them: pages in host memory, and where they lie.

`get_page_buffer_meta`, `get_data_page`, `get_dummy_flat_data_page` and `set_from_flat_data_page` behave like those of
``HostKVCache``: `page_first` keeps K and V of a page apart (two pointers), `layer_first` one piece per layer and
plane, and an MLA pool has one plane.
"""

from __future__ import annotations

from typing import Any

import sglang_wheel  # noqa: F401  # first
import torch


class HostPool:
    def __init__(
        self, *, pages: int = 64, page_size: int = 16, layers: int = 2, width: int = 8, planes: int = 2, layout: str
    ) -> None:
        self.page_size, self.layout, self.layer_num = page_size, layout, layers
        self.head_num, self.head_dim, self.dtype = 1, width, torch.float16
        self.size = pages * page_size
        self.planes = planes
        self.size_per_token = planes * layers * width * 2
        if layout == "layer_first":
            shape: tuple[int, ...] = (planes, layers, self.size, width)
        else:
            shape = (planes, self.size, layers, width)
        self.kv_buffer = torch.zeros(shape, dtype=self.dtype)

    def fill(self, page: int, seed: int) -> None:
        """With what a model would have computed for it."""
        generator = torch.Generator().manual_seed(seed)
        self._of(page).copy_(torch.randn(self._of(page).shape, generator=generator).to(self.dtype))

    def content(self, page: int) -> bytes:
        return bytes(self._of(page).contiguous().view(torch.uint8).numpy().tobytes())

    def _of(self, page: int) -> torch.Tensor:
        start, end = page * self.page_size, (page + 1) * self.page_size
        return self.kv_buffer[:, :, start:end] if self.layout == "layer_first" else self.kv_buffer[:, start:end]

    def indices(self, *pages: int) -> torch.Tensor:
        return torch.cat([torch.arange(page * self.page_size, (page + 1) * self.page_size) for page in pages])

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        pointers, sizes = [], []
        for start in indices.tolist()[:: self.page_size]:
            page = start // self.page_size
            if self.layout == "layer_first":
                pieces = [
                    self._of(page)[plane, layer] for layer in range(self.layer_num) for plane in range(self.planes)
                ]
            else:
                pieces = [self._of(page)[plane] for plane in range(self.planes)]
            for piece in pieces:
                assert piece.is_contiguous()
                pointers.append(piece.data_ptr())
                sizes.append(piece.numel() * piece.element_size())
        return pointers, sizes

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self._of(int(index) // self.page_size)
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self._of(0).numel(), dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self._of(int(index) // self.page_size)
        page.copy_(data_page.reshape(page.shape))


def anchor_without_pages(page_size: int) -> Any:
    """A pool for which others stand: SGLang's logical anchor."""
    pool = HostPool(pages=1, page_size=page_size, layout="page_first")
    pool.kv_buffer = None  # type: ignore[assignment]
    return pool
