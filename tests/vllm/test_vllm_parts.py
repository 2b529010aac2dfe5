"""The connector's parts that need vLLM's classes but no running engine."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Daemon
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from tiny_models import make_model
from vllm_engines import transfer_config

from cachesvc.connector.rates import TRY_AGAIN, Prediction
from cachesvc.connector.split import SplitPrefixCache
from cachesvc.connector.stats import CacheStats
from cachesvc.connector.vllm import identity
from cachesvc.connector.vllm.events import Events
from cachesvc.connector.vllm.geometry import Geometry, PagedKV, Part, Unsupported
from cachesvc.connector.vllm.settings import parse_settings
from cachesvc.connector.vllm.stats import SCHEDULER_COUNTERS, WORKER_COUNTERS, ConnectorStats, Meter, PromMetrics
from cachesvc.connector.weights import digest_files

PAGES, TOKENS = 40, 16


def part(group: int, window: int | None, page_bytes: int, layers: tuple[str, ...]) -> Part:
    kind = "sliding_window" if window else "full_attention"
    return Part(group, kind, window, layers, len(layers), TOKENS, page_bytes, 128 // TOKENS)


def two_groups() -> tuple[Geometry, dict[str, torch.Tensor]]:
    """Layers of a CPU's shape, of a GPU's (K and V apart), and padded ones."""
    torch.manual_seed(1)
    full = torch.randint(0, 255, (PAGES, 2, TOKENS, 64), dtype=torch.uint8).view(torch.bfloat16)
    apart = torch.randint(0, 255, (2, PAGES, TOKENS, 2, 64), dtype=torch.uint8)
    padded = torch.randint(0, 255, (PAGES, 5000), dtype=torch.uint8)[:, :4096].view(PAGES, 2, TOKENS, 128)
    geometry = Geometry(
        (part(0, None, 2048, ("a",)), part(1, 128, 4096, ("b",)), part(1, 128, 4096, ("c",))),
        128,
        128,
        shards=1,
        several_groups=True,
        replicas=1,
    )
    return geometry, {"a": full, "b": apart, "c": padded}


def buffers(geometry: Geometry, blocks: int) -> list[memoryview]:
    return [memoryview(bytearray(geometry.payload_bytes)) for _ in range(blocks)]


def test_pages_go_out_and_come_back_elsewhere() -> None:
    geometry, kv = two_groups()
    before = {name: tensor.clone() for name, tensor in kv.items()}
    paged = PagedKV(geometry, kv, PAGES)
    numbers = list(range(1, PAGES))
    random.Random(3).shuffle(numbers)
    here, there = numbers[:16], numbers[16:32]
    payloads = buffers(geometry, 2)
    paged.gather(payloads, (here, here, here))
    window = [0] * 12 + there[12:]  # behind the window nothing is wanted
    paged.scatter([payload.toreadonly() for payload in payloads], (there, window, window), skip_tokens=32)
    for index, (one, other) in enumerate(zip(here, there, strict=True)):
        changed_full, changed_window = index >= 2, index >= 12
        assert torch.equal(
            kv["a"][other].view(torch.uint8), before["a"][one if changed_full else other].view(torch.uint8)
        )
        assert torch.equal(kv["b"][:, other], before["b"][:, one if changed_window else other])
        assert torch.equal(kv["c"][other], before["c"][one if changed_window else other])
    assert torch.equal(kv["c"][0], before["c"][0])


def test_a_missing_page_is_neither_saved_nor_taken_for_one() -> None:
    geometry, kv = two_groups()
    paged = PagedKV(geometry, kv, PAGES)
    ids = list(range(1, 9))
    assert geometry.complete((ids, ids, ids)) and not geometry.complete((ids, [0, *ids[1:]], ids))
    assert not geometry.complete((ids, ids, ids[:-1]))
    with pytest.raises(ValueError, match="missing"):
        paged.gather(buffers(geometry, 1), (ids, [0, *ids[1:]], ids))
    with pytest.raises(ValueError, match="missing"):
        paged.scatter(buffers(geometry, 1), (ids, [*ids[:-1], 0], ids), 0)


def test_tensors_that_are_not_as_described_are_refused() -> None:
    geometry, kv = two_groups()
    for wrong in ({"a": kv["a"][:, :1]}, {"a": kv["a"].float()}, {"c": kv["c"][:-1]}):
        with pytest.raises(Unsupported):
            PagedKV(geometry, kv | wrong, PAGES)
    mixed = Geometry((part(1, 128, 4096, ("b", "c")),), 128, 128, shards=1, several_groups=True, replicas=1)
    with pytest.raises(Unsupported, match="differ"):
        PagedKV(mixed, kv, PAGES)
    with pytest.raises(Unsupported, match="no KV tensor for a"):
        PagedKV(geometry, {"b": kv["b"]}, PAGES)


def test_options_are_checked() -> None:
    settings = parse_settings({"address": "unix:/x", "match_budget_s": 1, "save_decoded": False})
    assert (settings.options.match_budget_s, settings.save_decoded, settings.traffic_class) == (1, False, "agent")
    for wrong in ({"adress": "unix:/x"}, {"save_decoded": 1}, {"traffic_class": 3}, {"load_threads": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            parse_settings(wrong)
    with pytest.raises(ValueError):
        parse_settings({"address": "nonsense"})


def test_a_hit_is_declined_when_computing_is_faster_and_tried_again_later() -> None:
    prediction = Prediction()
    assert prediction.worth_loading(1000, 10**9)
    prediction.loading.add(10**8, 1.0)
    assert prediction.worth_loading(1000, 10**9)
    prediction.computing.add(1000, 1.0)
    assert prediction.worth_loading(1000, 10**7)
    assert [prediction.worth_loading(1000, 10**9) for _ in range(TRY_AGAIN + 1)] == [False] * TRY_AGAIN + [True]
    assert prediction.declined == TRY_AGAIN
    for _ in range(50):
        prediction.loading.add(10**10, 1.0)
    assert prediction.worth_loading(1000, 10**9)


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    def make(name: str, data: bytes) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "model.safetensors").write_bytes(data)
        (path / "config.json").write_text("{}")
        return path

    one = digest_files(make("one", bytes(100_000)))
    assert digest_files(make("copy", bytes(100_000))) == one
    assert digest_files(make("other", bytes(99_999) + b"\1")) != one
    hub = make("hub", b"")
    (hub / "model.safetensors").unlink()
    blob = tmp_path / hashlib.sha256(b"weights").hexdigest()
    blob.write_bytes(b"not read, for its name says what it holds")
    (hub / "model.safetensors").symlink_to(blob)
    named = digest_files(hub)
    blob.write_bytes(b"as the hub's cache promises")
    assert digest_files(hub) == named != one
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no weight files"):
        digest_files(tmp_path / "empty")


def test_images_name_their_blocks_and_where_they_begin() -> None:
    def request(*images: tuple[str, int, int]) -> Any:
        return SimpleNamespace(
            mm_features=[
                SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=start, length=length))
                for name, start, length in images
            ]
        )

    extra = identity.extra_of(request(("a", 100, 200)), 128)
    assert sorted(extra) == [0, 1, 2] and len(set(extra.values())) == 3
    assert extra != identity.extra_of(request(("b", 100, 200)), 128)
    assert extra != identity.extra_of(request(("a", 101, 200)), 128)
    both = identity.extra_of(request(("a", 0, 10), ("b", 10, 10)), 128)
    assert both != identity.extra_of(request(("b", 0, 10), ("a", 10, 10)), 128)


def test_an_adapter_is_known_by_its_weights(tmp_path: Path) -> None:
    def request(path: Path) -> Any:
        return SimpleNamespace(lora_request=SimpleNamespace(lora_path=str(path), lora_name="name"))

    for name, data in (("one", b"1"), ("two", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(data)
    one = identity.adapter_of(request(tmp_path / "one"))
    assert one and one != identity.adapter_of(request(tmp_path / "two"))
    (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"12")
    assert identity.adapter_of(request(tmp_path / "one")) != one
    assert identity.adapter_of(SimpleNamespace(lora_request=None)) == b""
    with pytest.raises((OSError, ValueError)):
        identity.adapter_of(request(tmp_path / "absent"))


def test_an_event_says_that_all_shards_of_a_block_are_stored() -> None:
    events, keys = Events(4, shards=2), [bytes([number]) * 16 for number in range(3)]
    for block in (1, 2):
        events.expect(keys, block, range(100, 112), SimpleNamespace(lora_int_id=7, lora_name="x"))
    events.stored([keys[1], keys[2], keys[0]])
    assert events.take() == []
    events.stored([keys[2]])
    (event,) = events.take()
    assert (event.block_hashes, event.parent_block_hash, event.token_ids) == ([keys[2]], keys[1], [108, 109, 110, 111])
    assert (event.block_size, event.medium, event.lora_name) == (4, "STORAGE", "x")
    events.stored([keys[2]])
    assert events.take() == []


def test_numbers_reach_prometheus(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    scheduler, worker = Meter(SCHEDULER_COUNTERS), Meter(WORKER_COUNTERS)
    first = scheduler.take(CacheStats(lookups=3, hit_tokens=256, attached=True), declined=1)
    assert first is not None and first.data["lookups"] == 3 and first.data["declined"] == 1
    assert scheduler.take(CacheStats(lookups=4), declined=1) is None  # too soon
    clock[0] += 1
    second = scheduler.take(CacheStats(lookups=4, hit_tokens=256, attached=True), declined=1)
    assert second is not None and {name: value for name, value in second.data.items() if value} == {
        "lookups": 1,
        "attached": 1,
    }
    clock[0] += 1
    assert scheduler.take(CacheStats(lookups=4, hit_tokens=256, attached=True), declined=1) is None
    saved = worker.take(CacheStats(stored_blocks=2, attached=False, queued_bytes=7))
    assert saved is not None
    total = ConnectorStats(data={}).aggregate(first).aggregate(second).aggregate(saved)
    assert (total.data["lookups"], total.data["attached"], total.data["queued_bytes"]) == (4, 0, 7)

    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = PromMetrics(SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"]})
    metrics.observe(total.to_dict())
    assert registry.get_sample_value("cachesvc_connector_lookups_total", {"engine": "0"}) == 4
    assert registry.get_sample_value("cachesvc_connector_stored_blocks_total", {"engine": "0"}) == 2
    assert registry.get_sample_value("cachesvc_connector_attached", {"engine": "0"}) == 0


def test_vllms_scheduler_with_the_groups_of_deepseek_v41(tmp_path: Path, make_daemon: Callable[..., Daemon]) -> None:
    """Window groups that vLLM rebuilds by bounded replay are never stored; a replayed window is not saved again."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import (
        get_request_block_hasher,
        init_none_hash,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        CircularBufferSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
    )
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    daemon = make_daemon().start()
    config = EngineArgs(
        model=str(make_model(tmp_path, "llama")),
        dtype="bfloat16",
        max_model_len=8192,
        enforce_eager=True,
        block_size=256,
        max_num_batched_tokens=8192,
        kv_transfer_config=KVTransferConfig(**transfer_config(daemon.address, decline_slow_loads=False)),
    ).create_engine_config()
    shape = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.bfloat16, "model_version": "deepseek_v4"}
    shape["cache_dtype_str"] = "auto"
    groups = [
        KVCacheGroupSpec(["l0.attn", "l0.indexer.k_cache"], MLAAttentionSpec(block_size=256, **shape)),
        KVCacheGroupSpec(["l4.attn"], MLAAttentionSpec(block_size=256, tokens_per_state=2, **shape)),
        KVCacheGroupSpec(
            ["l0.swa", "l1.swa"], SlidingWindowMLASpec(block_size=32, sliding_window=128, bounded_replay=True, **shape)
        ),
        KVCacheGroupSpec(
            ["l4.comp"], CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=64, dtype=torch.float32)
        ),
    ]
    kv = KVCacheConfig(num_blocks=1000, kv_cache_tensors=[], kv_cache_groups=groups)
    config.cache_config.num_gpu_blocks = 1000
    scheduler_block, hash_block = resolve_kv_cache_block_sizes(kv, config)
    kv.hash_block_size = hash_block
    hasher = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hasher)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=scheduler_block,
        hash_block_size=hash_block,
        log_stats=False,
    )

    def ask(name: str) -> Any:
        tokens = list(range(3, 1503))
        request = Request(
            name, tokens, SamplingParams(max_tokens=4), None, block_hasher=get_request_block_hasher(hash_block, hasher)
        )
        scheduler.add_request(request)
        return request

    ask("cold")
    cold = scheduler.schedule().kv_connector_metadata
    (job,) = cold.saves
    assert sorted(job.pages) == [0, 1, 2, 3, 4] and len(job.keys) == 5  # of 256 tokens, vLLM's block
    assert all([len(ids) for ids in pages] == [1, 1] for pages in job.pages.values())  # of groups 0 and 1 only

    side = scheduler.connector._scheduler
    store = SplitPrefixCache(side._namespace, side._geometry.payload_bytes, address=daemon.address)
    p = store.begin_keys(job.keys, 1500, pass_id=job.pass_id)
    assert store.ready(10)
    store.save(p, 1280, lambda first, payloads: None)
    assert store.flush(10)
    store.close()
    scheduler.finish_requests("cold", RequestStatus.FINISHED_ABORTED)
    scheduler.kv_cache_manager.reset_prefix_cache()

    warm = ask("warm")
    output = scheduler.schedule()
    (load,) = output.kv_connector_metadata.loads
    assert (load.local_tokens, load.end_tokens) == (0, 1280) and [len(ids) for ids in load.pages] == [5, 5]
    assert output.total_num_scheduled_tokens == 0 and "cold" in output.kv_connector_metadata.ended
    done = KVConnectorOutput(finished_recving={"warm"})
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[], kv_connector_output=done),
    )
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"warm": 1500 - (1280 - 128)}  # the window of the hit is computed again
    assert warm.replay_start == 1280 - 128
    assert output.kv_connector_metadata.saves == []
    scheduler.shutdown()
