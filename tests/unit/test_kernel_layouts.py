"""Every layout of a pool: the torch reference against loops over bytes, Triton's kernels against the reference."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch
from fake_device import FakeDevice
from kernel_cases import CASES, check_case

from cachesvc.kernels import BlockKernels, Blocks, PagedPool, PageGroup, kernels_for, pool_of_layers, pool_of_pages
from cachesvc.kernels.torch_ref import TorchBlockKernels

ONE_OF_EACH = [name for name in CASES if not name.endswith(("page 32", "page 64", "page 128"))]
THE_REST = [name for name in CASES if name not in ONE_OF_EACH]


@pytest.fixture(scope="module")
def interpreted() -> BlockKernels:
    """Triton's kernels, run by its interpreter: that has to be said before they are imported."""
    pytest.importorskip("triton")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from cachesvc.kernels.triton_blocks import TritonBlockKernels
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
    return TritonBlockKernels()


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_triton_moves_what_the_reference_moves(interpreted: BlockKernels, name: str) -> None:
    check_case(name, interpreted, FakeDevice())


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", list(CASES))
def test_triton_in_every_layout(interpreted: BlockKernels, name: str, seed: int) -> None:
    check_case(name, interpreted, FakeDevice(), seed)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_reference_keeps_to_the_documented_layout(name: str) -> None:
    """``[regions, pages, page_bytes]`` of each group at its offset, byte for byte, and nothing else is touched."""
    generator, rng = torch.Generator().manual_seed(3), random.Random(3)
    pool = CASES[name](generator, 2)
    tables = [torch.randperm(group.num_pages, generator=generator)[: 2 * group.pages] for group in pool.groups]
    offsets = [pool.payload_bytes + 5, 3]
    memory = torch.full((2 * pool.payload_bytes + 8,), 0xA5, dtype=torch.uint8)
    expected = memory.clone()
    for group, table in zip(pool.groups, tables, strict=True):
        for block, offset in enumerate(offsets):
            at = offset + group.offset
            for region in group.regions:
                for page in table[block * group.pages : (block + 1) * group.pages].tolist():
                    expected[at : at + group.page_bytes] = region[page]
                    at += group.page_bytes
    kernels = TorchBlockKernels()
    kernels.gather_blocks(pool, tables, Blocks(memory, offsets))
    assert torch.equal(memory, expected)

    before = [region.clone() for group in pool.groups for region in group.regions]
    skipped = [rng.randrange(1, len(table)) for table in tables]
    for group in pool.groups:
        for region in group.regions:
            region.fill_(0x5A)
    kernels.scatter_blocks(Blocks(memory, offsets), pool, tables, skip=skipped)
    regions = [
        (group, table, skip, region)
        for group, table, skip in zip(pool.groups, tables, skipped, strict=True)
        for region in group.regions
    ]
    for (_, table, skip, region), was in zip(regions, before, strict=True):
        touched = torch.zeros(len(region), dtype=torch.bool)
        touched[table[skip:]] = True
        assert torch.equal(region[touched], was[touched])
        assert (region[~touched] == 0x5A).all()


def test_part_of_a_payload_is_enough_for_some_layers() -> None:
    kv = [torch.randint(0, 256, (2, 256, 1, 16), dtype=torch.uint8) for _ in range(4)]
    pool = pool_of_layers(kv, page_tokens=16, block_tokens=128)
    table = [torch.arange(8)]
    whole = torch.zeros(pool.payload_bytes, dtype=torch.uint8)
    kernels = kernels_for("cpu")
    kernels.gather_blocks(pool, table, Blocks(whole, [0]))
    place, size = pool.spans((1, 3))[0]
    part = whole[place : place + size].clone()
    for layer in kv:
        layer.fill_(0)
    kernels.scatter_blocks(Blocks(part, [0]), pool, table, layers=(1, 3), origin=place)
    again = torch.zeros_like(whole)
    kernels.gather_blocks(pool, table, Blocks(again, [0]))
    assert torch.equal(again[place : place + size], part)
    assert not again[:place].any() and not again[place + size :].any()


@pytest.mark.parametrize(
    ("offsets", "pages", "layers", "message"),
    [
        ([-1], 8, None, "do not lie in"),
        ([1], 8, None, "do not lie in"),
        ([0], 7, None, "7 entries"),
        ([0], 8, (0, 3), "layers 0 to 3 are asked for; the pool has 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    offsets: list[int], pages: int, layers: tuple[int, int] | None, message: str
) -> None:
    kv = [torch.zeros(2, 256, 1, 16, dtype=torch.uint8) for _ in range(2)]
    pool = pool_of_layers(kv, page_tokens=16, block_tokens=128)
    memory = torch.ones(pool.payload_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        kernels_for("cpu").scatter_blocks(Blocks(memory, offsets), pool, [torch.arange(pages)], layers=layers)
    assert not any(layer.any() for layer in kv)


def test_pools_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="no layers"):
        PagedPool(())
    with pytest.raises(ValueError, match="do not divide"):
        pool_of_layers([torch.zeros(2, 96, 1, 4)], page_tokens=48, block_tokens=128)
    with pytest.raises(ValueError, match="has no pages"):
        pool_of_pages(torch.zeros(4, 8).t(), pages=2)
    with pytest.raises(ValueError, match="must be uint8"):
        PageGroup((torch.zeros(4, 8),), 2, 1)
    with pytest.raises(ValueError, match="the groups cover"):
        PagedPool((PageGroup((torch.zeros(4, 8, dtype=torch.uint8),), 2, 1),), 15)


@pytest.mark.long
def test_without_triton_a_cuda_pool_gets_the_reference() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from cachesvc.kernels import kernels_for\n"
        "import cachesvc.connector.device, cachesvc.engine.engine\n"
        "assert type(kernels_for('cuda')).__name__ == 'TorchBlockKernels'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True)
    assert "Triton cannot be imported" in result.stderr
