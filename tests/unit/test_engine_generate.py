"""Whole generations on a tiny model: what a request gets must not depend on how it was scheduled."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_support import TINY, random_tokens, write_checkpoint

from cachesvc.connector.prefix_cache import NullPrefixCache
from cachesvc.engine.engine import Engine, EngineConfig
from cachesvc.engine.errors import RequestError
from cachesvc.engine.models.llama import LlamaModel
from cachesvc.engine.request import SamplingParams

LENGTHS = (300, 1, 129, 77, 128, 410)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, max_new_tokens=24, stop_token_ids=())
GREEDY = SamplingParams(max_new_tokens=24, stop_token_ids=())
UNCHUNKED = EngineConfig(num_pages=200, page_size=16, max_batch_tokens=2048, max_running=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, TINY)
    return LlamaModel.load(path)


def prompts() -> list[list[int]]:
    return [random_tokens(length, seed=length) for length in LENGTHS]


def params_for(base: SamplingParams) -> list[SamplingParams]:
    """The same parameters with a seed for each prompt."""
    return [SamplingParams(**{**vars(base), "seed": seed}) for seed in range(len(LENGTHS))]


def alone(model: LlamaModel, base: SamplingParams) -> list[tuple[int, ...]]:
    """Each prompt by itself, unchunked."""
    results = []
    for prompt, params in zip(prompts(), params_for(base), strict=True):
        with Engine(model, NullPrefixCache(), UNCHUNKED) as engine:
            results.append(engine.generate([prompt], params)[0].tokens)
    assert len(set(results)) == len(results)
    return results


@pytest.mark.parametrize("base", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "config",
    [
        UNCHUNKED,
        EngineConfig(num_pages=200, page_size=16, max_batch_tokens=96, max_running=8),
        EngineConfig(num_pages=40, page_size=48, max_batch_tokens=256, max_running=3),
        EngineConfig(num_pages=20, page_size=100, max_batch_tokens=150, max_running=8),
        EngineConfig(num_pages=1300, page_size=1, max_batch_tokens=512, max_running=8),
    ],
    ids=["together", "chunked", "page48", "page100", "page1"],
)
def test_together_and_in_chunks_is_as_alone(model: LlamaModel, config: EngineConfig, base: SamplingParams) -> None:
    with Engine(model, NullPrefixCache(), config) as engine:
        outputs = engine.generate(prompts(), params_for(base))
        assert engine.free_pages == config.num_pages
    assert [output.tokens for output in outputs] == alone(model, base)
    assert {output.finish_reason for output in outputs} == {"length"}


@pytest.mark.parametrize("base", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_preemption_changes_nothing(model: LlamaModel, base: SamplingParams) -> None:
    # The first three prompts take 29 pages of 16 tokens, and leave one for each of them; their answers need more.
    config = EngineConfig(num_pages=32, page_size=16, max_batch_tokens=256, max_running=8)
    with Engine(model, NullPrefixCache(), config) as engine:
        outputs = engine.generate(prompts(), params_for(base))
        assert engine.free_pages == 32
    assert sum(output.preemptions for output in outputs) > 0
    assert [output.tokens for output in outputs] == alone(model, base)


def test_requests_that_come_later_join_the_batch(model: LlamaModel) -> None:
    expected = alone(model, GREEDY)
    done: dict[str, tuple[int, ...]] = {}
    with Engine(model, NullPrefixCache(), UNCHUNKED) as engine:
        waiting = [(str(index), prompt) for index, prompt in enumerate(prompts())]
        while waiting or engine.has_requests:
            if waiting:
                request_id, prompt = waiting.pop(0)
                assert engine.add_request(prompt, GREEDY, request_id=request_id) == request_id
            for output in [*engine.step(), *engine.step()]:
                assert output.ttft_s is not None
                if output.finished:
                    done[output.request_id] = output.tokens
    assert [done[str(index)] for index in range(len(expected))] == expected


def test_tokens_arrive_one_by_one(model: LlamaModel) -> None:
    expected = alone(model, GREEDY)[0]
    with Engine(model, NullPrefixCache(), UNCHUNKED) as engine:
        engine.add_request(prompts()[0], GREEDY)
        for count in range(1, 25):
            (output,) = engine.step()
            assert output.tokens == expected[:count]
            assert output.finished == (count == 24)
        assert engine.step() == []


def test_seed_decides(model: LlamaModel) -> None:
    first, again, other = (
        SamplingParams(temperature=1.0, seed=seed, max_new_tokens=24, stop_token_ids=()) for seed in (5, 5, 6)
    )
    with Engine(model, NullPrefixCache(), UNCHUNKED) as engine:
        outputs = [out.tokens for out in engine.generate([prompts()[0]] * 3, [first, again, other])]
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_stop_token_ends_and_is_part_of_the_answer(model: LlamaModel) -> None:
    expected = alone(model, GREEDY)[0]
    stop = expected[10]
    cut = expected.index(stop) + 1
    with Engine(model, NullPrefixCache(), UNCHUNKED) as engine:
        params = SamplingParams(max_new_tokens=24, stop_token_ids=(stop,))
        (output,) = engine.generate([prompts()[0]], params)
    assert (output.tokens, output.finish_reason) == (expected[:cut], "stop")


def test_the_models_own_end_token_stops_by_default(model: LlamaModel, tmp_path: Path) -> None:
    expected = alone(model, GREEDY)[0]
    write_checkpoint(tmp_path, TINY | {"eos_token_id": [197, expected[5]]})
    with Engine(LlamaModel.load(tmp_path), NullPrefixCache(), UNCHUNKED) as engine:
        (output,) = engine.generate([prompts()[0]], SamplingParams(max_new_tokens=24))
    assert output.tokens == expected[: expected.index(expected[5]) + 1]


def test_abort_frees_pages_and_leaves_the_others_alone(model: LlamaModel) -> None:
    expected = alone(model, GREEDY)
    with Engine(model, NullPrefixCache(), EngineConfig(num_pages=100, max_batch_tokens=256, max_running=2)) as engine:
        ids = [engine.add_request(prompt, GREEDY) for prompt in prompts()[:4]]
        engine.step()
        engine.step()
        running, waiting = engine.abort(ids[0]), engine.abort(ids[3])
        assert running is not None
        assert waiting is not None
        assert (running.finish_reason, waiting.finish_reason, waiting.tokens) == ("abort", "abort", ())
        assert engine.abort(ids[0]) is None
        done = {}
        while engine.has_requests:
            done |= {output.request_id: output.tokens for output in engine.step() if output.finished}
        assert done == {ids[1]: expected[1], ids[2]: expected[2]}
        assert engine.free_pages == 100


def test_close_aborts_what_is_left(model: LlamaModel) -> None:
    engine = Engine(model, NullPrefixCache(), UNCHUNKED)
    engine.add_request(prompts()[0], GREEDY)
    engine.step()
    engine.close()
    assert (engine.has_requests, engine.free_pages) == (False, 200)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "the prompt is empty"),
        ([1, 199], GREEDY, r"lie in \[0, 199\); got 199"),
        ([-1, 5], GREEDY, r"lie in \[0, 199\); got -1"),
        ([1] * 2040, GREEDY, "2040 input tokens and 24 new ones exceed the model's context of 2048"),
        ([1] * 500, GREEDY, r"needs 33 pages of 16 tokens.*pool has 32"),
    ],
)
def test_impossible_requests_are_refused(
    model: LlamaModel, prompt: list[int], params: SamplingParams, message: str
) -> None:
    with Engine(model, NullPrefixCache(), EngineConfig(num_pages=32)) as engine:
        with pytest.raises(RequestError, match=message):
            engine.add_request(prompt, params)
        assert not engine.has_requests


def test_a_request_id_in_use_is_refused(model: LlamaModel) -> None:
    with Engine(model, NullPrefixCache(), UNCHUNKED) as engine:
        engine.add_request([1], GREEDY, request_id="a")
        with pytest.raises(RequestError, match="'a' is in use"):
            engine.add_request([2], GREEDY, request_id="a")


def test_generate_leaves_nothing_behind_when_a_later_prompt_is_refused(model: LlamaModel) -> None:
    with Engine(model, NullPrefixCache(), UNCHUNKED) as engine:
        with pytest.raises(RequestError):
            engine.generate([[1, 2], []], GREEDY)
        assert not engine.has_requests
