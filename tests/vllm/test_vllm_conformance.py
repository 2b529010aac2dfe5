"""The conformance suite on two real vLLM engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tiny_models import VOCABULARY, make_model
from vllm_engines import Engine as Process

from cachesvc.connector.conformance import Answer, Driver, Engine, check

OPTIONS = {
    "match_deadline_s": 0.5,
    "load_deadline_s": 1.0,
    "breaker_max_s": 0.5,
    "probe_max_s": 0.5,
    "failed_hit_s": 0.5,
    "decline_slow_loads": False,
}


class VLLM(Driver):
    vocabulary = VOCABULARY

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._model = make_model(directory, "llama")
        self._opened = 0

    def open(self, address: str) -> Engine:
        self._opened += 1
        log = self._directory / f"engine{self._opened}.log"
        process = Process(self._model, address, log, connector=OPTIONS, dtype="float32", max_num_batched_tokens=512)
        process.wait_ready()
        return Opened(process)


class Opened(Engine):
    def __init__(self, process: Process) -> None:
        self._process = process

    def run(
        self, prompts: Sequence[Sequence[int]], *, salt: str = "", abort: Mapping[int, int] | None = None
    ) -> list[Answer]:
        more = {"salt": salt} if salt else {}
        if abort:
            more["abort"] = {str(index): max(1, after) for index, after in abort.items()}  # type: ignore[assignment]
        answers = self._process.run(*map(list, prompts), max_tokens=6, **more)
        return [
            Answer(None)
            if answer.get("aborted")
            else Answer(answer["tokens"], int((answer["params"] or {}).get("cachesvc", {}).get("hit_tokens", 0)))
            for answer in answers
        ]

    def close(self) -> None:
        self._process.close()


@pytest.mark.long
def test_every_rule_holds(tmp_path: Path) -> None:
    assert [(result.rule, result.violation) for result in check(VLLM(tmp_path), tmp_path) if result.violation] == []
