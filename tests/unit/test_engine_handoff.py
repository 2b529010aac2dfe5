"""A prompt computed by one engine and answered by another: the same tokens, and nothing lost when it goes wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_families import FAMILIES, make_family, one_thread  # noqa: F401  (one_thread)
from engine_support import FakeCache, random_tokens

from cachesvc.connector.layout import StorePolicy
from cachesvc.connector.prefix_cache import NullPrefixCache
from cachesvc.engine.cache import block_layout
from cachesvc.engine.engine import Engine, EngineConfig
from cachesvc.engine.errors import RequestError
from cachesvc.engine.handoff import record_bytes
from cachesvc.engine.models.base import Model
from cachesvc.engine.models.loading import load_model
from cachesvc.engine.request import SamplingParams

# Importing transformers alone can take a minute on a busy machine.
pytestmark = pytest.mark.timeout(400)

CONFIG = EngineConfig(num_pages=100, page_size=16, max_batch_tokens=256, batch_invariant=True)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_new_tokens=12, stop_token_ids=())


class Pair:
    """What two engines share, and the engines."""

    def __init__(self, model: Model[Any], windows: StorePolicy | None = None, **change: Any) -> None:
        self.config = replace(CONFIG, windows=windows, **change)
        self.blocks = FakeCache(model.config, windows=windows)
        self.records = FakeCache(model.config)
        self.records.payload_bytes = record_bytes(block_layout(model.config, model.dtype, windows))
        self.prefill = Engine(model, self.blocks, self.config, handoffs=self.records)
        other = FakeCache(model.config, blocks=self.blocks.blocks, windows=windows)
        self.decode = Engine(model, other, self.config, handoffs=self.records)
        self.model = model

    def compute(self, prompt: list[int], params: SamplingParams = SEEDED) -> int:
        self.prefill.add_request(prompt, replace(params, max_new_tokens=1), publish_as="x")
        while self.prefill.has_requests:
            outputs = self.prefill.step()
        return outputs[0].tokens[0]

    def go_on(self, prompt: list[int], params: SamplingParams = SEEDED, deadline_s: float = 20.0) -> Any:
        self.decode.add_request(prompt, params, receive="x", receive_deadline_s=deadline_s)
        outputs = []
        while self.decode.has_requests:
            outputs += self.decode.step()
        assert self.decode.free_pages == self.config.num_pages
        return outputs[-1]

    def alone(self, prompt: list[int], params: SamplingParams = SEEDED) -> tuple[int, ...]:
        with Engine(self.model, NullPrefixCache(), self.config) as engine:
            return engine.generate([prompt], params)[0].tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model[Any]]:
    place: Path = tmp_path_factory.mktemp("families")
    return {name: load_model(make_family(place, name)) for name in FAMILIES}


@pytest.mark.parametrize("length", [1, 77, 301, 512])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_engines_give_the_tokens_of_one(family: str, length: int, models: dict[str, Model[Any]]) -> None:
    pair, prompt = Pair(models[family]), random_tokens(length, seed=length)
    first = pair.compute(prompt)
    output = pair.go_on(prompt)
    assert output.tokens == pair.alone(prompt)
    assert output.handed_over and output.tokens[0] == first
    assert all(p.finished for cache in (pair.blocks, pair.records) for p in cache.passes)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3"])
def test_windows_that_are_not_stored_travel_in_the_record(family: str, models: dict[str, Model[Any]]) -> None:
    pair, prompt = Pair(models[family], "never"), random_tokens(700, seed=1)
    pair.compute(prompt)
    output = pair.go_on(prompt)
    assert (output.tokens, output.replayed_tokens) == (pair.alone(prompt), 0)


def test_nothing_is_computed_twice(models: dict[str, Model[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    pair, prompt = Pair(models["qwen3"]), random_tokens(700, seed=1)
    pair.compute(prompt)
    rows = []
    forward = pair.model.forward

    def counted(batch: Any, kv: Any) -> Any:
        rows.append(len(batch.tokens))
        return forward(batch, kv)

    monkeypatch.setattr(pair.model, "forward", counted)
    pair.go_on(prompt)
    assert rows == [1] * 11


def test_decode_loads_while_prefill_computes(models: dict[str, Model[Any]]) -> None:
    pair, prompt = Pair(models["qwen3"]), random_tokens(1000, seed=2)
    pair.prefill.add_request(prompt, replace(SEEDED, max_new_tokens=1), publish_as="x")
    pair.decode.add_request(prompt, SEEDED, receive="x", request_id="it")
    waiting = pair.decode._requests["it"].receiving
    assert waiting is not None
    loaded, outputs = [], []
    while pair.prefill.has_requests:
        pair.prefill.step()
        for _ in range(20):
            outputs += pair.decode.step()
        loaded.append(waiting.loaded)
    assert loaded == [256, 512, 768, 896]
    while pair.decode.has_requests:
        outputs += pair.decode.step()
    assert outputs[-1].tokens == pair.alone(prompt)


def test_blocks_that_decoding_fills_are_saved(models: dict[str, Model[Any]]) -> None:
    pair, prompt = Pair(models["qwen3"]), random_tokens(250, seed=3)
    pair.compute(prompt)
    assert len(pair.blocks.blocks) == 1
    pair.go_on(prompt)
    assert len(pair.blocks.blocks) == 2


@pytest.mark.parametrize("family", ["qwen3", "ced"])
@pytest.mark.parametrize("lost", ["record", "all", "header", "blocks"])
def test_what_does_not_come_is_computed(family: str, lost: str, models: dict[str, Model[Any]]) -> None:
    pair, prompt = Pair(models[family]), random_tokens(700, seed=4)
    pair.compute(prompt)
    if lost in ("record", "all"):
        pair.records.blocks.clear()
    if lost in ("blocks", "all"):
        for key in list(pair.blocks.blocks)[2 if lost == "blocks" else 0 :]:
            del pair.blocks.blocks[key]
    if lost == "header":
        (key,) = pair.records.blocks
        pair.records.blocks[key] = b"\xff" * pair.records.payload_bytes
    output = pair.go_on(prompt, deadline_s=0.1)
    assert output.tokens == pair.alone(prompt)
    assert not output.handed_over
    assert output.hit_tokens == {"record": 640, "all": 0, "header": 640, "blocks": 256}[lost]


def test_a_record_of_another_prompt_or_seed_is_not_taken(models: dict[str, Model[Any]]) -> None:
    pair, prompt = Pair(models["qwen3"]), random_tokens(300, seed=5)
    pair.compute(prompt)
    changed = [*prompt[:-1], (prompt[-1] + 1) % 190]
    for tokens, params in ((changed, SEEDED), (prompt, replace(SEEDED, seed=8))):
        output = pair.go_on(tokens, params, deadline_s=0.1)
        assert output.tokens == pair.alone(tokens, params)
        assert not output.handed_over


def test_an_answer_that_ends_with_its_first_token(models: dict[str, Model[Any]]) -> None:
    pair, prompt = Pair(models["qwen3"]), random_tokens(300, seed=6)
    first = pair.compute(prompt)
    for params in (replace(SEEDED, max_new_tokens=1), replace(SEEDED, stop_token_ids=(first,))):
        pair.compute(prompt, params)
        output = pair.go_on(prompt, params, deadline_s=0.5)  # who stopped at once handed nothing over
        assert output.tokens == (first,) and output.finish_reason in ("length", "stop")


def test_preempted_while_waiting_starts_over(models: dict[str, Model[Any]]) -> None:
    pair, prompt = Pair(models["qwen3"], num_pages=46), random_tokens(300, seed=7)
    older = random_tokens(300, seed=8)
    expected = pair.alone(older, replace(SEEDED, max_new_tokens=200))
    pair.decode.add_request(older, replace(SEEDED, max_new_tokens=200), request_id="older")
    pair.decode.step()
    pair.decode.add_request(prompt, SEEDED, receive="x", request_id="it")
    done = {}
    while pair.decode.has_requests:
        if "it" in pair.decode._requests and pair.decode._requests["it"].preemptions and not pair.records.blocks:
            pair.compute(prompt)
        done.update((output.request_id, output) for output in pair.decode.step())
    assert done["older"].tokens == expected
    assert done["it"].tokens == pair.alone(prompt)


def test_an_abort_while_waiting_frees_everything(models: dict[str, Model[Any]]) -> None:
    pair, prompt = Pair(models["qwen3"]), random_tokens(300, seed=9)
    pair.decode.add_request(prompt, SEEDED, receive="x", request_id="it")
    pair.decode.step()
    pair.decode.abort("it")
    assert pair.decode.free_pages == pair.config.num_pages
    assert all(p.finished for p in pair.records.passes)


def test_without_a_cache_for_records_it_is_refused(models: dict[str, Model[Any]]) -> None:
    with (
        Engine(models["qwen3"], NullPrefixCache(), CONFIG) as engine,
        pytest.raises(RequestError, match="no cache for"),
    ):
        engine.add_request([1], publish_as="x")
