"""Windows at checkpoints, engine and daemon for real: the third prompt with a common prefix hits it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Daemon
from engine_families import make_family, one_thread  # noqa: F401
from engine_support import random_tokens

from cachesvc.connector.options import CacheOptions
from cachesvc.connector.prefix_cache import NullPrefixCache, PrefixCache
from cachesvc.engine.cache import block_layout, cache_namespace
from cachesvc.engine.engine import Engine, EngineConfig
from cachesvc.engine.errors import RequestError
from cachesvc.engine.models.base import Model
from cachesvc.engine.models.loading import load_model
from cachesvc.engine.request import RequestOutput, SamplingParams

CONFIG = EngineConfig(num_pages=200, page_size=16, max_batch_tokens=384, windows="checkpoint", batch_invariant=True)
GREEDY = SamplingParams(max_new_tokens=6, stop_token_ids=())
OPTIONS = CacheOptions(match_budget_s=1.0)


@pytest.fixture(scope="module", params=["gpt_oss", "gemma3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("hybrid"), request.param)


@pytest.fixture
def serve(checkpoint: Path, make_daemon: Callable[..., Daemon]) -> Iterator[Callable[[list[int]], RequestOutput]]:
    """Runs a prompt on a new engine, so that all reuse comes from the daemon."""
    daemon = make_daemon().start()
    model: Model[Any] = load_model(checkpoint)
    layout = block_layout(model.config, model.dtype, "checkpoint")
    namespace = cache_namespace(checkpoint, model.config, model.dtype, windows="checkpoint")
    cache = PrefixCache(
        namespace,
        layout.payload_bytes,
        address=daemon.address,
        checkpoint_bytes=layout.checkpoint_bytes,
        options=OPTIONS,
    )

    def run(prompt: list[int]) -> RequestOutput:
        with Engine(model, cache, CONFIG) as engine:
            output = engine.generate([prompt], GREEDY)[0]
        assert cache.flush(20)
        with Engine(model, NullPrefixCache(), replace(CONFIG)) as engine:
            assert output.tokens == engine.generate([prompt], GREEDY)[0].tokens
        return output

    with closing(cache):
        assert cache.ready(20)
        yield run


def test_the_second_prompt_with_a_prefix_stores_it_and_the_third_hits_it(
    serve: Callable[[list[int]], RequestOutput],
) -> None:
    a = random_tokens(600, seed=1)
    b, c, d = ([*a, *random_tokens(300, seed=seed)] for seed in (2, 3, 4))
    assert [serve(prompt).hit_tokens for prompt in (b, c, d)] == [0, 0, 512]


def test_a_turn_hits_the_end_of_the_prompt_or_of_the_answer(serve: Callable[[list[int]], RequestOutput]) -> None:
    prompt = random_tokens(638, seed=5)
    answer = serve(prompt)
    again, turn = serve(prompt), serve([*prompt, *answer.tokens, *random_tokens(100, seed=6)])
    assert (again.hit_tokens, turn.hit_tokens) == (512, 640)
    assert again.replayed_tokens == turn.replayed_tokens == 0


def test_hand_over_is_refused_where_windows_lie_at_checkpoints(checkpoint: Path) -> None:
    cache = NullPrefixCache()
    engine = Engine(load_model(checkpoint), cache, CONFIG, handoffs=cache)
    with pytest.raises(RequestError, match="stored at checkpoints"):
        engine.add_request([1], publish_as="x")
