"""Loads and saves of a device, on one that falls behind at random."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from connector_fakes import NAMESPACE, PAYLOAD_BYTES, payload_of
from connector_fakes import Engine as Pages
from device_fuzz import Settings, fuzz
from engine_support import TINY, FakeCache, random_tokens, write_checkpoint
from fake_device import FakeDevice

from cachesvc.benchmark.process import DaemonProcess
from cachesvc.connector.device import CudaDevice, DevicePayloads, DeviceStaging
from cachesvc.connector.device.copies import plan
from cachesvc.connector.device.cuda import Cuda, CudaError
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.prefix_cache import NullPrefixCache, PrefixCache
from cachesvc.engine.cache import block_layout
from cachesvc.engine.engine import Engine, EngineConfig
from cachesvc.engine.models.attention import attend_fused
from cachesvc.engine.models.llama import LlamaModel
from cachesvc.engine.request import SamplingParams
from cachesvc.keys import Namespace

OPTIONS = CacheOptions(match_budget_s=5.0, match_deadline_s=5.0, load_batch_bytes=1 << 30, save_queue_bytes=8 << 20)


@pytest.mark.parametrize("seed", range(4))
def test_no_schedule_reads_or_writes_a_page_too_early_or_too_late(seed: int) -> None:
    device = FakeDevice(seed)
    happened = fuzz(device, seed, between=lambda: device.idle(3))
    assert happened["saves"] > 0 and not device.registered


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 168))
def test_more_schedules(seed: int) -> None:
    device = FakeDevice(seed)
    fuzz(device, seed, Settings(steps=400), between=lambda: device.idle(seed % 7))


def test_memory_that_cannot_be_registered_is_copied_another_way(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(1)
    device.refuse_to_register = True
    with caplog.at_level(logging.ERROR):
        assert fuzz(device, 1, between=lambda: device.idle(3))["saves"] > 0
    said = [record.getMessage() for record in caplog.records if "cudaHostRegister" in record.getMessage()]
    assert len(said) == 1 and "cudaErrorMemoryAllocation" in said[0]


def test_pieces_that_lie_evenly_are_copied_together() -> None:
    targets = np.array([0, 100, 200, 300, 400, 900, 1000, 1100, 1200, 5000])
    sources = np.array([0, 128, 256, 384, 512, 4000, 3000, 2000, 1000, 0])
    planned = plan(targets, sources, 100)
    assert planned.runs == [(0, 5)] and planned.single.tolist() == [5, 6, 7, 8, 9] and planned.copies == 6
    assert plan(targets[:3], sources[:3], 100).copies == 3
    assert plan(targets[:0], sources[:0], 100).copies == 0
    assert plan(np.arange(8) * 50, np.arange(8) * 128, 100).runs == [], "they overlap"
    rng = np.random.default_rng(1)
    for _ in range(50):
        one, other = (np.sort(rng.choice(20, 12, replace=False)) * 100 for _ in range(2))
        planned = plan(one, other, 100)
        covered = [index for start, end in planned.runs for index in range(start, end)] + planned.single.tolist()
        assert sorted(covered) == list(range(12))
        for start, end in planned.runs:
            assert len(set(np.diff(one[start:end]))) == len(set(np.diff(other[start:end]))) == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    path: Path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, TINY)
    return LlamaModel.load(path)


def test_the_engine_says_the_same_behind_loads_of_a_device(model: LlamaModel) -> None:
    """Cold, warm, and another prompt in between, over a real daemon, with more requests than fit at a time."""
    layout = block_layout(model.config, model.dtype)
    prompts = [random_tokens(400 + 37 * seed, seed) for seed in range(4)]
    params = SamplingParams(max_new_tokens=5)
    config = EngineConfig(num_pages=100, page_size=16, max_batch_tokens=256, max_running=3)
    with Engine(model, NullPrefixCache(), config) as engine:
        wanted = [out.tokens for out in engine.generate(prompts, params)]
    device = FakeDevice(5, computes_at_once=True)
    staging = DeviceStaging(device)
    namespace = Namespace("tiny", "1", "float32", layout=layout.describe())
    with DaemonProcess(64 << 20) as daemon:
        cache = PrefixCache(namespace, layout.payload_bytes, address=daemon.address, options=OPTIONS, staging=staging)
        try:
            assert cache.ready(10.0)
            hits = []
            for _ in range(2):
                with Engine(model, cache, config, staging=staging) as engine:
                    outs = []
                    ids = [engine.add_request(prompt, params) for prompt in prompts]
                    while engine.has_requests:
                        outs += [out for out in engine.step() if out.finished]
                    by_id = {out.request_id: out for out in outs}
                    assert [by_id[one].tokens for one in ids] == wanted
                    hits.append([by_id[one].hit_tokens for one in ids])
                    assert engine.free_pages == 100
                assert cache.flush(10.0)
            assert hits == [[0] * 4, [384, 384, 384, 384]]
            assert cache.stats.failed_blocks == 0
        finally:
            cache.close()
    assert not device.registered


@pytest.mark.long
def test_what_is_stored_already_is_left_out_and_checkpoints_lie_in_the_host() -> None:
    """The daemon grants slots for the last two of four blocks: these must be the ones that are copied."""
    namespace, tokens = replace(NAMESPACE, shards=2), list(range(4 * 128 + 1))
    staging = DeviceStaging(FakeDevice(3))
    window = b"w" * 5000
    restored: list[tuple[int, bytes]] = []

    def on_device(first: int, payloads: Sequence[memoryview]) -> None:
        assert isinstance(payloads, DevicePayloads)
        for block, start in enumerate(payloads.blocks.offsets.tolist(), first):
            content = torch.frombuffer(bytearray(payload_of(tokens, block)), dtype=torch.uint8)
            payloads.slots.memory[start : start + PAYLOAD_BYTES] = content
        payloads.filled(staging.device.current().record())

    def gather_window(blocks: int, payload: memoryview) -> None:
        payload[:] = window

    def in_host(first: int, payloads: Sequence[memoryview]) -> None:
        for block, payload in enumerate(payloads, first):
            payload[:] = payload_of(tokens, block)

    with DaemonProcess(64 << 20) as daemon, ExitStack() as opened:

        def cache(staging: DeviceStaging | None = None) -> PrefixCache:
            made = PrefixCache(
                namespace,
                PAYLOAD_BYTES,
                address=daemon.address,
                options=OPTIONS,
                checkpoint_bytes=len(window),
                staging=staging,
            )
            opened.callback(made.close)
            assert made.ready(10.0)
            return made

        one, other = cache(staging), cache()
        late = one.match(tokens)
        early = other.match(tokens)
        assert late.hit_tokens == early.hit_tokens == 0
        other.save(early, 256, in_host)
        assert other.flush(10.0)
        one.save(late, 512, on_device)
        one.save_checkpoints(late, 0, 512, gather_window)
        one.finish(late)
        assert one.flush(10.0) and one.stats.failed_blocks == 0
        assert (one.stats.present_blocks, one.stats.stored_blocks) == (2, 3)
        pages, last = Pages(tokens), cache()
        found = last.match(tokens)
        loaded = last.load(found, pages.scatter, lambda blocks, payload: restored.append((blocks, bytes(payload))))
        assert loaded == 512 and restored == [(4, window)]
        pages.check()


@pytest.mark.parametrize("loadable", [0, 128])
def test_a_step_behind_a_load_that_failed_is_void(model: LlamaModel, loadable: int) -> None:
    prompt, params = random_tokens(400, 9), SamplingParams(max_new_tokens=3)
    cache = FakeCache(model.config)
    with Engine(model, cache) as engine:
        wanted = engine.generate([prompt], params)[0].tokens
    cache.loadable = loadable
    device = FakeDevice(2, computes_at_once=True)
    with Engine(model, cache, staging=DeviceStaging(device)) as engine:
        out = engine.generate([prompt], params)[0]
    assert (out.tokens, out.hit_tokens) == (wanted, loadable)


def test_fused_attention_is_the_same(model: LlamaModel) -> None:
    q, k, v = torch.randn(5, 6, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(3, 1)) / 8**0.5
    scores += torch.full((5, 12), float("-inf")).triu(12 - 5 + 1)
    wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(3, 1)).reshape(5, -1)
    torch.testing.assert_close(attend_fused(q, k, v), wanted)


def test_a_machine_without_cuda_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(CudaError, match=r"built without CUDA|cannot be loaded|no CUDA device"):
        CudaDevice()


def test_errors_of_the_runtime_have_their_names() -> None:
    class Library:
        @staticmethod
        def cudaHostUnregister(address: object) -> int:
            return 713

        @staticmethod
        def cudaGetErrorName(code: int) -> bytes:
            return b"cudaErrorHostMemoryNotRegistered"

        @staticmethod
        def cudaGetErrorString(code: int) -> bytes:
            return b"pointer does not correspond to a registered memory region"

        @staticmethod
        def cudaGetLastError() -> int:
            return 713

    runtime = Cuda.__new__(Cuda)
    runtime._lib = Library()  # type: ignore[assignment]
    with pytest.raises(CudaError, match=r"^cudaHostUnregister: cudaErrorHostMemoryNotRegistered: pointer does not"):
        runtime.unregister(4096)
