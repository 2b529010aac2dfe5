"""Batch-invariant mode: the same prompt gives the same bits of KV and the same tokens, however it is computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_families import FAMILIES, make_family, one_thread  # noqa: F401  (one_thread)
from engine_support import FakeCache, random_tokens

from cachesvc.connector.prefix_cache import NullPrefixCache
from cachesvc.engine.cache import block_layout
from cachesvc.engine.engine import Engine, EngineConfig
from cachesvc.engine.models.base import Model
from cachesvc.engine.models.loading import load_model
from cachesvc.engine.request import SamplingParams

# Importing transformers alone can take a minute on a busy machine.
pytestmark = pytest.mark.timeout(400)

LENGTH, NEW = 700, 8
BASE = EngineConfig(num_pages=200, page_size=16, max_batch_tokens=1024, batch_invariant=True)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_new_tokens=NEW, stop_token_ids=())


def computed(
    model: Model[Any], cache: Any, config: EngineConfig, others: list[list[int]]
) -> tuple[tuple[int, ...], list[torch.Tensor], int]:
    """Tokens of the prompt, its KV at its end, and what of it was hit; `others` run beside it."""
    prompt = random_tokens(LENGTH, seed=1)
    with Engine(model, cache, config) as engine:
        for number, other in enumerate(others):
            engine.add_request(other, replace(SEEDED, max_new_tokens=40), request_id=f"other-{number}")
        engine.add_request(prompt, SEEDED, request_id="it")
        table, tokens, hit = engine._requests["it"].table, (), 0
        while "it" in engine._requests:
            slots = table.slots(0, LENGTH) if table.capacity >= LENGTH else None
            kept = None if slots is None else [layer.clone() for layer in engine._pool.kv]
            for output in engine.step():
                if output.request_id == "it":
                    tokens, hit = output.tokens, output.hit_tokens
    assert slots is not None and kept is not None
    parts, first = [], 0
    for group in engine._pool.groups:
        step = group.tokens_per_record
        # Of windows only what the next token can see is the same in every case: the rest was not replayed.
        start = 0 if group.policy == "every_block" and group.window is None else LENGTH - 128
        picked = slots[start::step] // step
        parts += [layer[:, picked] for layer in kept[first : first + group.layers] if group.name != "unpaired"]
        first += group.layers
    return tokens, parts, hit


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_alone_batched_chunked_cold_and_warm(family: str, tmp_path: Path) -> None:
    model = load_model(make_family(tmp_path, family))
    others = [random_tokens(length, seed=length) for length in (90, 333, 5)]
    cache = FakeCache(model.config)
    cases = {
        "alone": (NullPrefixCache(), BASE, []),
        "batched": (NullPrefixCache(), BASE, others),
        "chunked by 128": (NullPrefixCache(), replace(BASE, max_batch_tokens=128), []),
        "chunked by 384, batched": (NullPrefixCache(), replace(BASE, max_batch_tokens=400), others),
        "other pages": (NullPrefixCache(), replace(BASE, page_size=48, num_pages=70), others),
        "cold": (cache, BASE, []),
        "warm": (cache, BASE, []),
        "warm, batched, asynchronous": (cache, replace(BASE, async_scheduling=True, max_batch_tokens=256), others),
    }
    results = {name: computed(model, *case) for name, case in cases.items()}
    tokens, parts, _ = results["alone"]
    assert len(set(tokens)) > 2
    for name, (got, kv, hit) in results.items():
        assert got == tokens, name
        assert all(torch.equal(a, b) for a, b in zip(parts, kv, strict=True)), name
        assert hit == (640 if name.startswith("warm") else 0), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_that_was_decoded_has_the_bits_of_one_that_was_a_prompt(family: str, tmp_path: Path) -> None:
    """The next turn resends the answer: it is hit as decoded, and must be what prefill would compute."""
    model = load_model(make_family(tmp_path, family))
    decoded, prefilled = FakeCache(model.config), FakeCache(model.config)
    prompt = random_tokens(250, seed=2)
    with Engine(model, decoded, BASE) as engine:
        (output,) = engine.generate([prompt], replace(SEEDED, max_new_tokens=140))
    with Engine(model, prefilled, BASE) as engine:
        engine.generate([[*prompt, *output.tokens]], SEEDED)
    assert set(decoded.blocks) <= set(prefilled.blocks) and len(decoded.blocks) == 3
    assert all(prefilled.blocks[key] == payload for key, payload in decoded.blocks.items())


def test_without_the_mode_the_bits_depend_on_the_batch(tmp_path: Path) -> None:
    """If they did not, the tests above would prove nothing."""
    model = load_model(make_family(tmp_path, "qwen3"))
    plain = replace(BASE, batch_invariant=False)
    alone = computed(model, NullPrefixCache(), plain, [])[1]
    chunked = computed(model, NullPrefixCache(), replace(plain, max_batch_tokens=128), [])[1]
    assert not all(torch.equal(a, b) for a, b in zip(alone, chunked, strict=True))


def test_seeded_sampling_is_reproducible_and_seeds_differ(tmp_path: Path) -> None:
    model = load_model(make_family(tmp_path, "qwen3"))
    prompt = random_tokens(100, seed=3)
    with Engine(model, NullPrefixCache(), BASE) as engine:
        first, second, other = (
            engine.generate([prompt], replace(SEEDED, seed=seed, max_new_tokens=20))[0].tokens for seed in (1, 1, 2)
        )
    assert first == second != other


def test_layouts_say_what_is_stored(tmp_path: Path) -> None:
    """The comparison above leaves out what no block holds; it must not leave out more."""
    for family in FAMILIES:
        config = load_model(make_family(tmp_path, family)).config
        layout = block_layout(config, torch.float32)
        stored = [group.name for group in layout.groups if group.policy == "every_block"]
        expected = {"gpt_oss": ["full", "window"], "gemma3": ["full", "window"], "ced": ["records-1", "records-2"]}
        assert stored == expected.get(family, ["full"])
