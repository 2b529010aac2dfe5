"""The conformance suite on the reference engine, and on engines that break a rule each: the suite must see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import TINY, write_checkpoint

from cachesvc.connector.conformance import Answer, Driver, Engine, check
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.prefix_cache import PrefixCache
from cachesvc.engine import cache as engine_cache
from cachesvc.engine.engine import Engine as ReferenceEngine
from cachesvc.engine.engine import EngineConfig
from cachesvc.engine.models.llama import LlamaModel
from cachesvc.engine.request import SamplingParams
from cachesvc.keys import Namespace

pytestmark = pytest.mark.long

OPTIONS = CacheOptions(match_deadline_s=0.5, load_deadline_s=1.0, breaker_max_s=0.5, probe_max_s=0.5, failed_hit_s=0.5)


class Reference(Driver):
    vocabulary = 190

    def __init__(self, checkpoint: Path) -> None:
        write_checkpoint(checkpoint, TINY)
        self._model = LlamaModel.load(checkpoint, dtype=torch.float32)

    def open(self, address: str) -> Engine:
        layout = engine_cache.block_layout(self._model.config, self._model.dtype)
        namespace = Namespace("tiny", "1", "float32", layout=layout.describe())
        return self.wrap(PrefixCache(namespace, layout.payload_bytes, address=address, options=OPTIONS))

    def wrap(self, cache: PrefixCache) -> Engine:
        return Opened(self._model, cache)


class Opened(Engine):
    def __init__(self, model: LlamaModel, cache: PrefixCache) -> None:
        self.cache = cache
        self._pages = 600
        self._engine = ReferenceEngine(model, cache, EngineConfig(num_pages=self._pages))

    def run(
        self, prompts: Sequence[Sequence[int]], *, salt: str = "", abort: Mapping[int, int] | None = None
    ) -> list[Answer]:
        params = SamplingParams(max_new_tokens=6, stop_token_ids=())
        names = [self._engine.add_request(list(prompt), params, salt=salt.encode()) for prompt in prompts]
        done: dict[str, Answer] = {}
        step = 0
        while self._engine.has_requests:
            for index, after in (abort or {}).items():
                if after == step:
                    self._engine.abort(names[index])
            step += 1
            done.update((o.request_id, Answer(o.tokens, o.hit_tokens)) for o in self._engine.step() if o.finished)
        return [done.get(name, Answer(None)) for name in names]

    def settle(self, timeout_s: float) -> bool:
        return self.cache.flush(timeout_s)

    def held(self) -> int:
        return self._pages - self._engine.free_pages

    def close(self) -> None:
        self._engine.close()
        self.cache.close()


@pytest.mark.timeout(600)
def test_the_reference_engine_passes(tmp_path: Path) -> None:
    results = check(Reference(tmp_path / "model"), tmp_path)
    assert [(result.rule, result.violation) for result in results if result.violation] == []
    assert len(results) == 10


class Forgetful(Reference):
    """Salts do not reach the key."""

    def wrap(self, cache: PrefixCache) -> Engine:
        begin = cache.begin
        cache.begin = lambda tokens, **more: begin(tokens, **more | {"salt": b""})  # type: ignore[method-assign]
        return super().wrap(cache)


class Careless(Reference):
    """Bytes are wrong on their way into the pages."""

    def wrap(self, cache: PrefixCache) -> Engine:
        load = cache.load

        def spoil(p: Any, scatter: Any, restore: Any = None) -> int:
            def zeros(first: int, payloads: Any) -> None:
                scatter(first, [memoryview(bytes(view.nbytes)) for view in payloads])

            return load(p, zeros, restore)

        cache.load = spoil  # type: ignore[method-assign]
        return super().wrap(cache)


class Boastful(Reference):
    """More counts as hit than was."""

    def wrap(self, cache: PrefixCache) -> Engine:
        return Boasting(self._model, cache)


class Boasting(Opened):
    def run(self, *args: Any, **more: Any) -> list[Answer]:
        return [Answer(answer.output, answer.hit_tokens + 128) for answer in super().run(*args, **more)]


class Leaky(Reference):
    """Pages of what is given up are never freed."""

    def wrap(self, cache: PrefixCache) -> Engine:
        return Leaking(self._model, cache)


class Leaking(Opened):
    def run(self, prompts: Sequence[Sequence[int]], *, salt: str = "", abort: Any = None) -> list[Answer]:
        if abort:
            self._pages += 1
        return super().run(prompts, salt=salt, abort=abort)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("driver", "rule"), [(Forgetful, "salts"), (Careless, "hits"), (Boastful, "hits"), (Leaky, "aborts")]
)
def test_an_engine_that_breaks_a_rule_is_found_out(driver: type[Reference], rule: str, tmp_path: Path) -> None:
    try:
        (result,) = check(driver(tmp_path / "model"), tmp_path, rules=[rule])
    except AssertionError:
        return  # found out before the rules began
    assert result.violation is not None
