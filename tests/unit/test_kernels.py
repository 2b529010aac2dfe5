"""Gather and scatter against a slow, obvious implementation."""

from __future__ import annotations

import warnings

import pytest
import torch

from cachesvc.connector.layout import BlockLayout, KVGroup
from cachesvc.kernels import kernels_for

BLOCK = 128
LAYERS, HEADS, DIM = 3, 2, 8
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def pool_of(dtype: torch.dtype, slots: int, planes: int = 2) -> list[torch.Tensor]:
    """Random bits (not random numbers: every bit pattern has to survive, NaNs included)."""
    generator = torch.Generator().manual_seed(1)
    size = torch.empty(0, dtype=dtype).element_size()
    return [
        torch.randint(0, 256, (planes, slots, HEADS, DIM * size), generator=generator, dtype=torch.uint8).view(dtype)
        for _ in range(LAYERS)
    ]


def random_slots(blocks: int, page_size: int) -> tuple[torch.Tensor, int]:
    """Slots of `blocks` blocks over a shuffled page table with holes, and the size of that pool."""
    tokens = blocks * BLOCK
    pages = -(-tokens // page_size)
    table = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(page_size))[:pages]
    positions = torch.arange(tokens)
    return table[positions // page_size] * page_size + positions % page_size, 2 * pages * page_size


def expected_payload(kv: list[torch.Tensor], slots: torch.Tensor, block: int) -> bytes:
    """[layers, planes, tokens, heads, dim], one token at a time."""
    out = bytearray()
    for layer in kv:
        for plane in layer:
            for slot in slots[block * BLOCK : (block + 1) * BLOCK].tolist():
                out += plane[slot].contiguous().view(torch.uint8).numpy().tobytes()
    return bytes(out)


def bits(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.view(torch.uint8) for tensor in tensors])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [16, 48, 100, 128])
def test_gather_writes_the_layout_byte_for_byte(dtype: torch.dtype, page_size: int) -> None:
    slots, size = random_slots(3, page_size)
    kv = pool_of(dtype, size)
    group = KVGroup("full", LAYERS, HEADS, DIM, str(dtype).removeprefix("torch."))
    payload_bytes = BlockLayout((group,)).payload_bytes
    buffers = [bytearray(b"\xa5" * payload_bytes) for _ in range(3)]
    kernels_for("cpu").gather(kv, slots, [memoryview(buffer) for buffer in buffers])
    for block, buffer in enumerate(buffers):
        assert bytes(buffer) == expected_payload(kv, slots, block)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [16, 48, 100, 128])
def test_scatter_restores_the_slots_and_nothing_else(dtype: torch.dtype, page_size: int) -> None:
    slots, size = random_slots(3, page_size)
    kv = pool_of(dtype, size)
    payloads = [memoryview(expected_payload(kv, slots, block)) for block in range(3)]
    poisoned = [torch.full_like(layer.view(torch.uint8), 0x5A).view(dtype) for layer in kv]
    kernels_for("cpu").scatter(payloads, poisoned, slots)
    touched = torch.zeros(size, dtype=torch.bool)
    touched[slots] = True
    assert torch.equal(bits(poisoned)[:, :, touched], bits(kv)[:, :, touched])
    assert (bits(poisoned)[:, :, ~touched] == 0x5A).all()


def test_one_shared_plane_as_of_a_compressed_kv() -> None:
    slots, size = random_slots(2, 48)
    kv = pool_of(torch.bfloat16, size, planes=1)
    buffers = [bytearray(LAYERS * BLOCK * HEADS * DIM * 2) for _ in range(2)]
    kernels_for("cpu").gather(kv, slots, [memoryview(buffer) for buffer in buffers])
    assert [bytes(buffer) for buffer in buffers] == [expected_payload(kv, slots, block) for block in range(2)]


def test_payloads_may_lie_at_odd_addresses_and_be_read_only() -> None:
    slots, size = random_slots(2, 16)
    kv = pool_of(torch.float32, size)
    whole = b"x" + expected_payload(kv, slots, 0) + expected_payload(kv, slots, 1)
    half = len(whole) // 2
    views = [memoryview(whole)[1 : 1 + half], memoryview(whole)[1 + half :]]
    out = [torch.zeros_like(layer) for layer in kv]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels_for("cpu").scatter(views, out, slots)
    assert torch.equal(bits(out)[:, :, slots], bits(kv)[:, :, slots])


def test_no_blocks_is_no_work() -> None:
    kv = pool_of(torch.float32, 16)
    before = bits(kv).clone()
    kernels_for("cpu").scatter([], kv, torch.empty(0, dtype=torch.int64))
    kernels_for("cpu").gather(kv, torch.empty(0, dtype=torch.int64), [])
    assert torch.equal(bits(kv), before)


@pytest.mark.parametrize(
    ("payload_bytes", "slots", "message"),
    [(100, 128, "payload 0 has 100 bytes"), (49152, 127, "payload 0 has 49152 bytes"), (49152, 0, "49152 bytes")],
)
def test_sizes_that_do_not_fit_are_refused_before_writing(payload_bytes: int, slots: int, message: str) -> None:
    kv = pool_of(torch.float32, 256)
    before = bits(kv).clone()
    with pytest.raises(ValueError, match=message):
        kernels_for("cpu").scatter([memoryview(bytes(payload_bytes))], kv, torch.arange(slots))
    assert torch.equal(bits(kv), before)


def test_slots_that_do_not_divide_into_the_blocks_are_refused() -> None:
    kv = pool_of(torch.float32, 512)
    with pytest.raises(ValueError, match="255 slots do not divide into 2 blocks"):
        kernels_for("cpu").scatter([memoryview(bytes(8))] * 2, kv, torch.arange(255))
    with pytest.raises(ValueError, match="128 slots were given for no payloads"):
        kernels_for("cpu").scatter([], kv, torch.arange(128))


def test_gather_into_read_only_memory_is_refused() -> None:
    kv = pool_of(torch.float32, 128)
    payload = memoryview(bytes(LAYERS * 2 * BLOCK * HEADS * DIM * 4))
    with pytest.raises(ValueError, match="read-only"):
        kernels_for("cpu").gather(kv, torch.arange(128), [payload])


@pytest.mark.parametrize("skip", [0, 1, 100, BLOCK, BLOCK + 40, 2 * BLOCK])
def test_tokens_that_are_skipped_keep_what_they_had(skip: int) -> None:
    slots, size = random_slots(2, 16)
    source = [layer.view(torch.int32) for layer in pool_of(torch.float32, size)]  # bits, for NaNs equal nothing
    target = [torch.zeros_like(layer) for layer in source]
    payloads = [memoryview(bytearray(expected_payload(source, slots, block))) for block in range(2)]
    given = slots.clone()
    given[:skip] = -1  # not looked at
    kernels_for("cpu").scatter(payloads, target, given, skip=skip)
    for layer, wanted in zip(target, source, strict=True):
        assert torch.equal(layer[:, slots[skip:]], wanted[:, slots[skip:]])
        assert not layer[:, slots[:skip]].any()
