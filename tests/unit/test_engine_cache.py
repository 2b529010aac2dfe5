"""The engine and the cache: a hit gives the same tokens as no hit, whatever the cache does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine_support import TINY, FakeCache, random_tokens, write_checkpoint

from cachesvc.connector.base import BasePrefixCache, RestoreCheckpoint, Scatter
from cachesvc.connector.passes import Pass
from cachesvc.connector.prefix_cache import NullPrefixCache
from cachesvc.engine.cache import block_layout, cache_namespace
from cachesvc.engine.engine import Engine, EngineConfig
from cachesvc.engine.models.llama import LlamaModel
from cachesvc.engine.request import RequestOutput, SamplingParams

GREEDY = SamplingParams(max_new_tokens=20, stop_token_ids=())
CONFIG = EngineConfig(num_pages=60, page_size=48, max_batch_tokens=256)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, TINY)
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LlamaModel:
    return LlamaModel.load(checkpoint)


@pytest.fixture
def cache(model: LlamaModel) -> FakeCache:
    return FakeCache(model.config)


def run(
    model: LlamaModel,
    cache: BasePrefixCache,
    prompt: list[int],
    config: EngineConfig = CONFIG,
    params: SamplingParams = GREEDY,
) -> RequestOutput:
    """One prompt on a new engine, so that nothing is reused but through the cache."""
    with Engine(model, cache, config) as engine:
        (output,) = engine.generate([prompt], params)
        assert engine.free_pages == config.num_pages
    return output


@pytest.mark.parametrize("page_size", [16, 48, 100, 128])
@pytest.mark.parametrize("length", [127, 128, 129, 256, 700])
def test_hit_equals_no_hit(model: LlamaModel, cache: FakeCache, page_size: int, length: int) -> None:
    config = EngineConfig(num_pages=60, page_size=page_size, max_batch_tokens=300)
    prompt = random_tokens(length, seed=length)
    expected = run(model, NullPrefixCache(), prompt, config).tokens
    cold = run(model, cache, prompt, config)
    warm = run(model, cache, prompt, config)
    assert (cold.hit_tokens, warm.hit_tokens) == (0, (length - 1) // 128 * 128)
    assert cold.tokens == warm.tokens == expected
    assert all(p.finished for p in cache.passes)


def test_the_loaded_bytes_decide_the_answer(model: LlamaModel, cache: FakeCache) -> None:
    """If the engine recomputed in secret, a wrong payload would not be noticed."""
    prompt = random_tokens(400, seed=1)
    expected = run(model, cache, prompt).tokens
    for key in cache.blocks:
        cache.blocks[key] = bytes(torch.randn(cache.payload_bytes // 4).numpy().tobytes())
    assert run(model, cache, prompt).tokens != expected


def test_pages_of_different_sizes_share_blocks(model: LlamaModel, cache: FakeCache) -> None:
    prompt = random_tokens(600, seed=2)
    expected = run(model, cache, prompt, EngineConfig(num_pages=60, page_size=16)).tokens
    warm = run(model, cache, prompt, EngineConfig(num_pages=10, page_size=100))
    assert (warm.tokens, warm.hit_tokens) == (expected, 512)


@pytest.mark.parametrize("loadable", [0, 128, 256])
def test_a_load_that_fails_or_stops_halfway_is_computed(model: LlamaModel, cache: FakeCache, loadable: int) -> None:
    prompt = random_tokens(600, seed=3)
    expected = run(model, cache, prompt).tokens
    cache.loadable = loadable
    output = run(model, cache, prompt)
    assert (output.tokens, output.hit_tokens) == (expected, loadable)
    assert cache.passes[-1].hit_tokens == 512


def test_a_failed_load_that_left_garbage_behind_is_overwritten(model: LlamaModel, cache: FakeCache) -> None:
    class Failing(FakeCache):
        def load(self, p: Pass, scatter: Scatter, restore: RestoreCheckpoint | None = None) -> int:
            scatter(0, [memoryview(b"\x7f" * self.payload_bytes)] * (p.hit_tokens // 128))
            return 0

    prompt = random_tokens(600, seed=3)
    expected = run(model, cache, prompt).tokens
    failing = Failing(model.config, blocks=cache.blocks)
    assert run(model, failing, prompt).tokens == expected
    assert failing.passes[0].hit_tokens == 512


def test_blocks_are_saved_as_chunks_complete_them(model: LlamaModel, cache: FakeCache) -> None:
    prompt = random_tokens(700, seed=4)
    with Engine(model, cache, CONFIG) as engine:
        engine.add_request(prompt, GREEDY)
        saved = []
        while engine.has_requests:
            engine.step()
            saved.append(len(cache.saves))
    assert saved[:3] == [2, 4, 5]
    assert saved[-1] == 5


def test_a_block_that_decoding_fills_is_saved_and_hit(model: LlamaModel, cache: FakeCache) -> None:
    prompt = random_tokens(250, seed=5)
    output = run(model, cache, prompt)
    assert len(cache.saves) == 2  # The second block was completed by the sixth generated token.
    longer = [*prompt, *output.tokens, *random_tokens(30, seed=6)]
    warm = run(model, cache, longer)
    assert warm.hit_tokens == 256
    assert warm.tokens == run(model, NullPrefixCache(), longer).tokens


def test_the_last_token_of_an_answer_is_not_claimed_as_computed(model: LlamaModel, cache: FakeCache) -> None:
    # 236 + 20 tokens fill the second block, but the last one never went through the model.
    run(model, cache, random_tokens(236, seed=7))
    assert len(cache.saves) == 1
    run(model, cache, random_tokens(237, seed=8))
    assert len(cache.saves) == 3


def test_nothing_is_saved_twice_when_turns_extend_each_other(model: LlamaModel, cache: FakeCache) -> None:
    tokens = random_tokens(300, seed=9)
    for turn in range(4):
        expected = run(model, NullPrefixCache(), tokens)
        output = run(model, cache, tokens)
        assert output.tokens == expected.tokens
        assert output.hit_tokens == (0 if turn == 0 else len(tokens_before) // 128 * 128)  # noqa: F821
        tokens_before = [*tokens, *output.tokens[:-1]]
        tokens = [*tokens, *output.tokens, *random_tokens(100, seed=turn)]
    assert len(cache.saves) == len(set(cache.saves)) == len(tokens_before) // 128


def test_preempted_requests_stay_right_and_save_once(model: LlamaModel, cache: FakeCache) -> None:
    prompts = [random_tokens(length, seed=length) for length in (200, 140, 300, 250)]
    params = SamplingParams(max_new_tokens=60, stop_token_ids=())
    expected = [run(model, NullPrefixCache(), prompt, params=params).tokens for prompt in prompts]
    # Pages for all four prompts, and few more.
    config = EngineConfig(num_pages=60, page_size=16, max_batch_tokens=256)
    lengths = (200, 140, 300, 250)
    for round_ in range(2):
        cache.saves.clear()
        with Engine(model, cache, config) as engine:
            outputs = engine.generate(prompts, params)
        assert [output.tokens for output in outputs] == expected
        assert sum(output.preemptions for output in outputs) > 0
        assert len(cache.passes) == 4 * (round_ + 1)
        assert all(p.finished for p in cache.passes)
        # The second round hits the prompts' blocks, and completes again those that end in an answer.
        hit = [(length - 1) // 128 if round_ else 0 for length in lengths]
        expected_saves = sum((length + 59) // 128 - blocks for length, blocks in zip(lengths, hit, strict=True))
        assert len(cache.saves) == len(set(cache.saves)) == expected_saves


def test_several_requests_load_and_save_in_one_batch(model: LlamaModel, cache: FakeCache) -> None:
    shared = random_tokens(256, seed=10)
    prompts = [[*shared, *random_tokens(100 + index, seed=20 + index)] for index in range(4)]
    expected = [run(model, NullPrefixCache(), prompt).tokens for prompt in prompts]
    run(model, cache, [*shared, 1])
    with Engine(model, cache, CONFIG) as engine:
        outputs = engine.generate(prompts, GREEDY)
    assert [output.hit_tokens for output in outputs] == [256] * 4
    assert [output.tokens for output in outputs] == expected


def test_salt_keeps_prompts_apart(model: LlamaModel, cache: FakeCache) -> None:
    prompt = random_tokens(300, seed=11)
    hits = []
    for salt in (b"a", b"a", b"b", b""):
        with Engine(model, cache, CONFIG) as engine:
            engine.add_request(prompt, GREEDY, salt=salt)
            hits.append(_first_output(engine).hit_tokens)
    assert hits == [0, 256, 0, 0]


def _first_output(engine: Engine) -> RequestOutput:
    while not (outputs := engine.step()):
        pass
    return outputs[0]


def test_a_slow_answer_is_waited_for_while_others_run(model: LlamaModel, cache: FakeCache) -> None:
    prompt, other = random_tokens(400, seed=15), random_tokens(300, seed=16)
    expected = [run(model, NullPrefixCache(), tokens).tokens for tokens in (prompt, other)]
    run(model, cache, prompt)
    with Engine(model, cache, CONFIG) as engine:
        engine.add_request(other, GREEDY, request_id="other")
        _first_output(engine)
        cache.polls_needed = 5
        engine.add_request(prompt, GREEDY, request_id="slow")
        outputs = []
        while engine.has_requests:
            outputs += engine.step()
    names = [output.request_id for output in outputs]
    assert names[:3] == ["other"] * 3
    assert {out.request_id: (out.tokens, out.hit_tokens) for out in outputs} == {
        "other": (expected[1], 0),
        "slow": (expected[0], 384),
    }


def test_an_idle_engine_waits_for_the_cache(model: LlamaModel, cache: FakeCache) -> None:
    prompt = random_tokens(400, seed=15)
    run(model, cache, prompt)
    cache.waits, cache.polls_needed = 0, 6
    assert run(model, cache, prompt).hit_tokens == 384
    assert 2 <= cache.waits <= 5  # One in `match`, the others because there is nothing else to do.


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_an_aborted_request_finishes_its_pass(model: LlamaModel, cache: FakeCache, when: str) -> None:
    with Engine(model, cache, CONFIG) as engine:
        request_id = engine.add_request(random_tokens(400, seed=12), GREEDY)
        for _ in range({"waiting": 0, "prefill": 1, "decode": 4}[when]):
            engine.step()
        engine.abort(request_id)
        assert [p.finished for p in cache.passes] == ([] if when == "waiting" else [True])
        assert engine.free_pages == CONFIG.num_pages


def test_a_cache_that_claims_what_it_cannot_have_loaded_is_found_out(model: LlamaModel, cache: FakeCache) -> None:
    class Lying(FakeCache):
        def load(self, p: Pass, scatter: Scatter, restore: RestoreCheckpoint | None = None) -> int:
            return super().load(p, scatter) + 128

    prompt = random_tokens(400, seed=13)
    run(model, cache, prompt)
    with pytest.raises(AssertionError, match="loaded 512 of 384 tokens of a prompt of 400"):
        run(model, Lying(model.config, blocks=cache.blocks), prompt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layout_and_namespace_describe_the_model(checkpoint: Path, model: LlamaModel, dtype: torch.dtype) -> None:
    layout = block_layout(model.config, dtype)
    size = 4 if dtype == torch.float32 else 2
    assert layout.payload_bytes == 128 * 3 * 2 * 2 * 8 * size
    namespace = cache_namespace(checkpoint, model.config, dtype)
    assert namespace.layout == layout.describe()
    assert namespace.model == checkpoint.name
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    assert namespace.digest != cache_namespace(checkpoint, model.config, other).digest


def test_half_precision_survives_the_cache(checkpoint: Path) -> None:
    model = LlamaModel.load(checkpoint, dtype=torch.bfloat16)
    cache = FakeCache(model.config, torch.bfloat16)
    prompt = random_tokens(300, seed=14)
    pool_bytes: list[Sequence[bytes]] = []
    for _ in range(2):
        with Engine(model, cache, CONFIG) as engine:
            engine.add_request(prompt, GREEDY)
            _first_output(engine)
            pool_bytes.append([layer[:, :256].view(torch.uint8).numpy().tobytes() for layer in engine._pool.kv])
    assert cache.passes[-1].hit_tokens == 256
    assert pool_bytes[0] == pool_bytes[1]
