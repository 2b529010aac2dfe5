"""The conformance suite on DeepInfer's real engine class, on the simulated device."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import engines
import native
import pytest
import simulated

from cachesvc.connector.conformance import Answer, Driver, Engine, check
from cachesvc.connector.deepinfer.settings import parse_settings

logging.disable(logging.INFO)


class DeepInfer(Driver):
    vocabulary = simulated.VOCABULARY
    replayed_tokens = engines.REPLAY

    def open(self, address: str) -> Engine:
        options = {"match_deadline_s": 0.5, "load_deadline_s": 1.0, "breaker_max_s": 0.5, "failed_hit_s": 0.5}
        return Opened(engines.make_engine(parse_settings({"address": address, "revision": "1", **options})))


class Opened(Engine):
    def __init__(self, engine: engines.SimulatedEngine) -> None:
        self._engine = engine
        self._requests = 0

    def run(
        self, prompts: Sequence[Sequence[int]], *, salt: str = "", abort: Mapping[int, int] | None = None
    ) -> list[Answer]:
        names, sequences = [], []
        for prompt in prompts:
            self._requests += 1
            names.append(str(self._requests))
            extra = {"cachesvc": {"salt": salt}} if salt else None
            sequences.append(engines.add(self._engine, names[-1], list(prompt), 6, extra=extra))
        outputs: dict[str, list[int]] = {}
        for step in range(1 + max((abort or {}).values(), default=0)):
            self._engine.abort_request([names[index] for index, after in (abort or {}).items() if after == step])
            for pointer in self._engine.step():
                output = native.RequestOutput.clone(pointer)
                if output.token_id >= 0:
                    outputs.setdefault(output.request_id, []).append(output.token_id)
        engines.run(self._engine, outputs)
        hits = [seq.cached_hit_tokens for seq in sequences]
        return [Answer(outputs.get(name), hit) for name, hit in zip(names, hits, strict=True)]

    def settle(self, timeout_s: float) -> bool:
        return self._engine.flush_cache(timeout_s)

    def held(self) -> int:
        self.settle(10.0)
        self._engine.deferred_release.release()
        return sum(count > 0 for count in self._engine.block_manager.references)

    def close(self) -> None:
        self._engine.close()


@pytest.mark.timeout(600)
def test_every_rule_holds(tmp_path: Path) -> None:
    assert [(result.rule, result.violation) for result in check(DeepInfer(), tmp_path) if result.violation] == []
