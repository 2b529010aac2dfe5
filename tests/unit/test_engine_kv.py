"""Page pool and page tables."""

from __future__ import annotations

import pytest
import torch
from engine_support import TINY

from cachesvc.engine.kv import OutOfPagesError, PagePool, PageTable
from cachesvc.engine.models.llama import LlamaConfig


def make_pool(num_pages: int = 8, page_size: int = 5) -> PagePool:
    return PagePool(LlamaConfig.from_dict(TINY), num_pages=num_pages, page_size=page_size, dtype=torch.float32)


def test_pool_has_the_shape_the_kernels_expect() -> None:
    pool = make_pool()
    assert [tuple(layer.shape) for layer in pool.kv] == [(2, 40, 2, 8)] * 3


def test_pages_are_given_out_once_and_refused_cleanly() -> None:
    pool = make_pool()
    first, second = pool.allocate(5), pool.allocate(2)
    assert not set(first) & set(second)
    with pytest.raises(OutOfPagesError, match="2 pages are needed, 1 of 8 are free"):
        pool.allocate(2)
    assert pool.free_pages == 1
    pool.release(first)
    assert pool.free_pages == 6


@pytest.mark.parametrize("pages", [[0], [7], [8], [-1], [1, 1]])
def test_pages_that_are_not_held_cannot_be_released(pages: list[int]) -> None:
    pool = make_pool()
    held = pool.allocate(3)
    pool.release([held[0]])
    with pytest.raises(ValueError, match="not allocated once each"):
        pool.release(pages)
    assert pool.free_pages == 6


def test_slots_follow_the_page_table() -> None:
    pool = make_pool()
    other, table = PageTable(pool), PageTable(pool)
    for tokens in (3, 6, 12, 17):  # The two tables take pages in turn.
        table.ensure(tokens)
        other.ensure(tokens)
    expected = [page * 5 + offset for page in table.pages for offset in range(5)][:17]
    assert table.slots(0, 17).tolist() == expected
    for start in range(17):
        assert table.slots(start, 17).tolist() == expected[start:]
    context = table.context(17)
    assert isinstance(context, torch.Tensor)
    assert context.tolist() == expected
    assert not set(table.slots(0, 20).tolist()) & set(other.slots(0, 20).tolist())


def test_consecutive_pages_are_a_slice_of_the_same_slots() -> None:
    pool = make_pool()
    PageTable(pool).ensure(5)
    table = PageTable(pool)
    table.ensure(12)
    context = table.context(11)
    assert isinstance(context, slice)
    assert torch.arange(40)[context].tolist() == table.slots(0, 11).tolist()


def test_a_released_table_starts_over() -> None:
    pool = make_pool()
    first, second = PageTable(pool), PageTable(pool)
    first.ensure(5)
    second.ensure(5)
    first.ensure(10)
    assert isinstance(first.context(10), torch.Tensor)
    first.release()
    assert (pool.free_pages, first.capacity) == (7, 0)
    first.ensure(5)
    assert isinstance(first.context(5), slice)


def test_growing_beyond_the_pool_changes_nothing() -> None:
    pool = make_pool()
    table = PageTable(pool)
    table.ensure(7)
    pages = list(table.pages)
    with pytest.raises(OutOfPagesError):
        table.ensure(41)
    assert (table.pages, pool.free_pages) == (pages, 6)


def test_slots_outside_of_the_table_are_refused() -> None:
    table = PageTable(make_pool())
    table.ensure(7)
    with pytest.raises(ValueError, match="outside of a table that holds 10"):
        table.slots(3, 11)


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 16), (4, 0)])
def test_sizes_must_be_positive(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        make_pool(num_pages, page_size)
