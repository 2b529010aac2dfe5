"""Windows that are not stored: what is computed again after a hit, and that the answer is right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_families import CED, make_ced, make_family, one_thread  # noqa: F401  (one_thread)
from engine_support import FakeCache, random_tokens
from torch.utils.flop_counter import FlopCounterMode

from cachesvc.connector.layout import StorePolicy
from cachesvc.connector.prefix_cache import NullPrefixCache
from cachesvc.engine.cache import block_layout, cache_namespace
from cachesvc.engine.engine import Engine, EngineConfig
from cachesvc.engine.models.base import Model
from cachesvc.engine.models.ced import CedConfig
from cachesvc.engine.models.loading import load_model
from cachesvc.engine.replay import Replay, replay_start
from cachesvc.engine.request import RequestOutput, SamplingParams

# Importing transformers alone can take a minute on a busy machine.
pytestmark = pytest.mark.timeout(400)

GREEDY = SamplingParams(max_new_tokens=16, stop_token_ids=())
CONFIG = EngineConfig(num_pages=120, page_size=16, max_batch_tokens=256)
HYBRIDS = ("gpt_oss", "gemma3", "ced")
# Window layers, of the encoder half where there are two.
DEPTH = {"gpt_oss": 2, "gemma3": 6, "ced": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model[Any]]:
    place = tmp_path_factory.mktemp("hybrids")
    return {name: load_model(make_family(place, name)) for name in HYBRIDS}


def run(model: Model[Any], cache: Any, prompt: list[int], config: EngineConfig = CONFIG) -> RequestOutput:
    with Engine(model, cache, config) as engine:
        return engine.generate([prompt], GREEDY)[0]


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("gpt_oss", "every_block"),
        ("gpt_oss", "never"),
        ("gemma3", "every_block"),
        ("gemma3", "never"),
        ("ced", "never"),
    ],
)
def test_exact_replay_gives_the_tokens_of_no_cache(
    family: str, windows: StorePolicy, models: dict[str, Model[Any]]
) -> None:
    model, config = models[family], replace(CONFIG, windows=windows, batch_invariant=True)
    cache = FakeCache(model.config, windows=windows)
    prompt = random_tokens(1200, seed=1)
    expected = run(model, NullPrefixCache(), prompt, config).tokens
    cold, warm = run(model, cache, prompt, config), run(model, cache, prompt, config)
    assert cold.tokens == warm.tokens == expected
    assert (cold.hit_tokens, warm.hit_tokens) == (0, 1152)
    # 48 tokens are left of the prompt; ced's decoder half begins 140 before its end, 92 before the hit's.
    behind = 92 if family == "ced" else 0
    wanted = 0 if windows == "every_block" else DEPTH[family] * 127 + behind
    assert warm.replayed_tokens == wanted


@pytest.mark.parametrize("family", HYBRIDS)
def test_exact_replay_leaves_the_same_windows_as_computing_all(family: str, models: dict[str, Model[Any]]) -> None:
    """Every bit of what the next token can see; and one layer's replay less would be too few."""
    model, prompt = models[family], random_tokens(1150, seed=2)
    config = replace(CONFIG, windows="never", batch_invariant=True)
    cache = FakeCache(model.config, windows="never")
    run(model, cache, prompt, config)
    states = []
    for used in (NullPrefixCache(), cache):
        with Engine(model, used, config) as engine:
            engine.add_request(prompt, GREEDY)
            while not engine.step():
                pass
            states.append([layer.clone() for layer in engine._pool.kv])
    groups = block_layout(model.config, model.dtype).groups
    names = [group.name for group in groups for _ in range(group.layers)]
    for name, cold, warm in zip(names, *states, strict=True):
        if name == "window":
            assert torch.equal(cold[:, 1150 - 127 : 1150], warm[:, 1150 - 127 : 1150])
        elif name != "unpaired":
            ratio = 2 if name == "records-2" else 1
            assert torch.equal(cold[:, : 1150 // ratio], warm[:, : 1150 // ratio])


def test_a_shorter_replay_than_the_exact_one_would_be_wrong(
    models: dict[str, Model[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = models["gemma3"], random_tokens(1150, seed=2)
    config = replace(CONFIG, windows="never", batch_invariant=True)
    cache = FakeCache(model.config, windows="never")
    run(model, cache, prompt, config)
    assert torch.equal(*(_window_after(model, c, prompt, config) for c in (cache, NullPrefixCache())))
    whole = _window_after(model, cache, prompt, config)
    monkeypatch.setattr("cachesvc.engine.engine.replay_start", lambda *a: replay_start(*a) + 127)
    assert not torch.equal(_window_after(model, cache, prompt, config), whole)


def _window_after(model: Model[Any], cache: Any, prompt: list[int], config: EngineConfig) -> torch.Tensor:
    with Engine(model, cache, config) as engine:
        engine.add_request(prompt, GREEDY)
        while not engine.step():
            pass
        return engine._pool.kv[-1][:, 1024 - 127 : 1150].clone()


@pytest.mark.parametrize("family", HYBRIDS)
def test_bounded_replay_computes_one_window_and_changes_no_stored_kv(
    family: str, models: dict[str, Model[Any]]
) -> None:
    model, config = models[family], replace(CONFIG, windows="never", replay="bounded")
    cache = FakeCache(model.config, windows="never")
    prompt = random_tokens(1200, seed=3)
    cold = run(model, cache, prompt, config)
    blocks = dict(cache.blocks)
    warm = run(model, cache, [*prompt, *cold.tokens, 5], config)
    assert (warm.hit_tokens, warm.replayed_tokens) == (1152, 128)
    assert all(cache.blocks[key] == payload for key, payload in blocks.items())


@pytest.mark.parametrize("depth", [4, 8])
def test_bounded_replay_costs_the_same_at_every_context_length_and_depth(depth: int, tmp_path: Path) -> None:
    """Counted: the tokens of the replay, and the arithmetic of its step, per layer of the encoder half."""
    half = depth // 2
    raw = CED | {
        "num_hidden_layers": depth,
        "n_prefill_layer": half,
        "compress_ratios": [1, 2, *[0] * (depth - 2)],
    }
    model = load_model(make_ced(tmp_path, raw))
    costs = {}
    for length in (1024, 4096):
        cache = FakeCache(model.config)
        prompt = random_tokens(length + 300, seed=length)
        config = EngineConfig(num_pages=300, page_size=16, max_batch_tokens=1024, replay="bounded")
        hit = prompt[: length + 1]
        run(model, cache, hit, config)
        with Engine(model, cache, replace(config, max_batch_tokens=128)) as engine:
            engine.add_request(prompt, GREEDY)
            # The first step holds the replay and nothing else.
            with FlopCounterMode(display=False) as counter:
                assert engine.step() == []
            (request,) = engine._requests.values()
            assert (request.hit_tokens, request.replayed_tokens, request.num_done) == (length, 128, length)
        costs[length] = counter.get_total_flops()
    assert costs[1024] == costs[4096] > 0
    assert costs[1024] < 1.05 * half * 128 * _flops_per_token_and_layer(raw)


def _flops_per_token_and_layer(raw: dict[str, Any]) -> float:
    """Of one layer at most: projections, MLP, and attention over a window of tokens and one of records."""
    dim, heads = raw["kv_lora_rank"] + raw["qk_rope_head_dim"], raw["num_attention_heads"]
    weights = raw["hidden_size"] * (heads * dim + 2 * dim + 1 + heads * raw["kv_lora_rank"])
    weights += 3 * raw["hidden_size"] * raw["intermediate_size"]
    return 2 * weights + 4 * heads * dim * 2 * raw["sliding_window"]


def test_exact_replay_grows_with_depth_and_bounded_does_not(models: dict[str, Model[Any]]) -> None:
    for family, layers in DEPTH.items():
        config = models[family].config
        starts: dict[Replay, int] = {
            mode: replay_start(config, 128, 20 * 128, None, mode) for mode in ("exact", "bounded")
        }
        assert starts == {"exact": 2560 - layers * 127, "bounded": 2560 - 128}
    ced = models["ced"].config
    assert replay_start(ced, 128, 1280, 1200, "exact") == 1200 - 254
    assert replay_start(ced, 128, 1280, 3000, "exact") == 1280 - 254
    assert replay_start(ced, 128, 1280, 0, "exact") == replay_start(ced, 128, 128, 200, "exact") == 0


def test_the_decoder_half_is_left_out_of_prefill(models: dict[str, Model[Any]], tmp_path: Path) -> None:
    """About half of the arithmetic of a long cold prompt."""
    costs = []
    for keep in (140, 4000):
        model = load_model(make_ced(tmp_path / str(keep), CED | {"prefill_keep_tokens": keep}))
        with FlopCounterMode(display=False) as counter:
            run(model, NullPrefixCache(), random_tokens(1800, seed=1))
        costs.append(counter.get_total_flops())
    assert 0.5 < costs[0] / costs[1] < 0.62


def test_what_is_stored_of_ced_is_less_than_an_eighth_of_what_windows_would_take() -> None:
    shape = {"num_hidden_layers": 8, "n_prefill_layer": 4, "compress_ratios": [1, 2, *[0] * 6]}
    config = CedConfig.from_dict(CED | shape)
    for dtype in (torch.float32, torch.bfloat16):
        without, with_windows = (block_layout(config, dtype, windows) for windows in (None, "every_block"))
        assert 8 * without.payload_bytes < with_windows.payload_bytes


def test_a_model_without_windows_for_most_of_a_prompt_stores_none(models: dict[str, Model[Any]]) -> None:
    with pytest.raises(ValueError, match="windows of this model cannot be stored"):
        Engine(models["ced"], NullPrefixCache(), replace(CONFIG, windows="every_block"))


def test_what_is_not_stored_is_in_the_namespace(tmp_path: Path) -> None:
    """An engine that stores windows cannot read the blocks of one that does not, nor exact KV be mixed with bounded."""
    path = make_family(tmp_path, "ced")
    config = load_model(path).config
    spaces = [
        cache_namespace(path, config, torch.float32, windows=windows, replay=replay)
        for windows, replay in (("never", "exact"), ("never", "bounded"), ("every_block", "exact"))
    ]
    assert len({space.digest for space in spaces}) == 3
    assert cache_namespace(path, config, torch.float32).digest == spaces[0].digest
