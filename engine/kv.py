"""The paged KV pool and the page table of one sequence.

A *slot* holds the KV of one token in every layer: ``slot = page * page_size + offset``. The page size is the engine's
own business and has nothing to do with the 128 tokens of a cache block. Layers that see only a window keep all of their
KV here for as long as the request runs: that costs memory, and keeps one page table for all of them.
"""

from __future__ import annotations

import heapq

import torch

from cachesvc.engine.models.config import ModelConfig
from cachesvc.kernels import PagedPool, pool_of_layers
from cachesvc.keys import BLOCK_TOKENS


class OutOfPagesError(Exception):
    """The pool has too few free pages. Nothing was allocated; the scheduler decides who has to wait."""


class PagePool:
    """`num_pages` pages of `page_size` tokens.

    `kv` holds one tensor per layer, group after group of `config.kv_groups`:
    ``[planes, num_pages * page_size // tokens_per_record, kv_heads, head_dim]``; with two planes K comes first.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_pages <= 0 or page_size <= 0:
            raise ValueError(f"num_pages ({num_pages}) and page_size ({page_size}) must be positive")
        self.page_size = page_size
        self.num_pages = num_pages
        self.groups = config.kv_groups(dtype)
        self.kv: list[torch.Tensor] = []
        for group in self.groups:
            if page_size % group.tokens_per_record:
                raise ValueError(f"page_size is {page_size}; it must be a multiple of {group.tokens_per_record} here")
            shape = (group.planes, num_pages * page_size // group.tokens_per_record, group.kv_heads, group.head_dim)
            kind: torch.dtype = getattr(torch, group.dtype)
            # Written once here, so that the first request does not pay for the page faults.
            self.kv += [torch.empty(shape, dtype=kind, device=device).zero_() for _ in range(group.layers)]
        # What blocks of the cache are cut into: pages, or single tokens where pages do not divide a block.
        self.unit_tokens = page_size if BLOCK_TOKENS % page_size == 0 else 1
        # A heap: the lowest pages first, so that tables are often consecutive and can be read without a gather.
        self._free = list(range(num_pages))

    def as_paged(self) -> PagedPool:
        """The same memory as the kernels take it, in pages of `unit_tokens`, for a model with one KV group."""
        return pool_of_layers(self.kv, page_tokens=self.unit_tokens, block_tokens=BLOCK_TOKENS)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def layers(self, index: int) -> list[torch.Tensor]:
        """The tensors of group `index`."""
        start = sum(group.layers for group in self.groups[:index])
        return self.kv[start : start + self.groups[index].layers]

    @property
    def device(self) -> torch.device:
        return self.kv[0].device

    def pages_for(self, num_tokens: int) -> int:
        """How many pages `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages. Raises `OutOfPagesError`, and takes none, when fewer are free."""
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages are needed, {len(self._free)} of {self.num_pages} are free")
        return [heapq.heappop(self._free) for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        """Gives pages back. Raises `ValueError` for one that is free already or was never there."""
        wrong = set(pages) & set(self._free) | {page for page in pages if not 0 <= page < self.num_pages}
        if wrong or len(set(pages)) != len(pages):
            raise ValueError(f"pages {sorted(wrong or pages)} are not allocated once each")
        for page in pages:
            heapq.heappush(self._free, page)


class PageTable:
    """The pages of one sequence, in token order."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._consecutive = True
        self.pages: list[int] = []

    @property
    def capacity(self) -> int:
        """Tokens that fit without another page."""
        return len(self.pages) * self._pool.page_size

    def ensure(self, num_tokens: int) -> None:
        """Grows to hold `num_tokens`. Raises `OutOfPagesError` and stays as it was when the pool cannot."""
        missing = self._pool.pages_for(num_tokens) - len(self.pages)
        if missing > 0:
            for page in self._pool.allocate(missing):
                self._consecutive &= not self.pages or page == self.pages[-1] + 1
                self.pages.append(page)

    def release(self) -> None:
        """Gives all pages back to the pool."""
        pages, self.pages, self._consecutive = self.pages, [], True
        self._pool.release(pages)

    def slots(self, start: int, stop: int) -> torch.Tensor:
        """Slots of the tokens `start` to `stop`: int64 [stop - start] on the pool's device."""
        if not 0 <= start <= stop <= self.capacity:
            raise ValueError(f"tokens {start} to {stop} are outside of a table that holds {self.capacity}")
        size = self._pool.page_size
        first = start // size
        pages = torch.tensor(self.pages[first : self._pool.pages_for(stop)], dtype=torch.int64)
        positions = torch.arange(start - first * size, stop - first * size)
        return (pages[positions // size] * size + positions % size).to(self._pool.device)

    def records(self, start: int, stop: int, tokens_per_record: int) -> torch.Tensor:
        """Slots of the records of the tokens `start` to `stop`, both multiples of `tokens_per_record`."""
        return self.slots(start, stop)[::tokens_per_record] // tokens_per_record

    def units(self, first_block: int, count: int) -> list[int]:
        """Pages of `unit_tokens` of so many blocks of the cache, from the one of that index on."""
        per_block = BLOCK_TOKENS // self._pool.unit_tokens
        start, stop = first_block * per_block, (first_block + count) * per_block
        return self.pages[start:stop] if self._pool.unit_tokens > 1 else self.slots(start, stop).tolist()

    def context(self, stop: int) -> slice | torch.Tensor:
        """Slots of the first `stop` tokens: a slice when they are consecutive (a view costs nothing), else a tensor."""
        if self._consecutive and self.pages and stop <= self.capacity:
            start = self.pages[0] * self._pool.page_size
            return slice(start, start + stop)
        return self.slots(0, stop)
