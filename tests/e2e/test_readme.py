"""The example of the README runs as it stands, against a real daemon."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conftest import Daemon

README = (Path(__file__).parents[2] / "README.md").read_text()


@dataclass
class Step:
    computed: int
    new_tokens: list[int]


def test_the_integration_example_saves_and_hits(daemon: Daemon, monkeypatch: Any) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) < 30
    monkeypatch.setenv("CACHESVC_ADDRESS", daemon.address)
    loaded: dict[int, bytes] = {}
    starts: list[int] = []

    def scatter(first: int, payloads: Sequence[memoryview]) -> None:
        loaded.update({first + i: bytes(payload[:4]) for i, payload in enumerate(payloads)})

    def gather(first: int, buffers: Sequence[memoryview]) -> None:
        for index, buffer in enumerate(buffers, first):
            buffer[:4] = index.to_bytes(4, "little")

    def compute(tokens: Sequence[int], start: int) -> Iterator[Step]:
        starts.append(start)
        yield Step(len(tokens), [1])
        yield Step(len(tokens) + 1, [2])

    names: dict[str, Any] = {"scatter": scatter, "gather": gather, "compute": compute, "weights_digest": "abc"}
    exec(compile(example, "README.md", "exec"), names)
    cache, run = names["cache"], names["run"]
    cache.match_budget_s = 20.0  # a busy test machine may take longer than an engine would wait
    cache.options = replace(cache.options, match_deadline_s=20.0)
    try:
        assert cache.ready(20)
        prompt = list(range(300))
        run(prompt)
        assert cache.flush(20)
        run([*prompt, 7])
    finally:
        cache.close()
    assert starts == [0, 256]
    assert loaded == {0: bytes(4), 1: b"\1\0\0\0"}
