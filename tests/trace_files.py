"""Small trace files for tests, and where the two real ones lie."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cachesvc.trace.formats import Request

REAL = Path(__file__).parents[2] / "shared" / "data" / "traces"


def real(name: str) -> Path:
    """A real trace; skips the test where it is not at hand."""
    path = REAL / name
    if not path.exists():
        pytest.skip(f"the real traces are not at hand: {path} is missing")
    return path


def write(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mooncake(at_ms: float, tokens: int, ids: Sequence[int]) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": 1, "hash_ids": list(ids)}


def session(*reqs: tuple[float, int, list[list[int]]], block: int = 64) -> dict[str, Any]:
    return {"id": "s", "block_size": block, "reqs": [[at, tokens, 1, 0, ranges] for at, tokens, ranges in reqs]}


def ask(at: float, keys: Sequence[int], *, tokens: int | None = None, block: int = 128, **more: Any) -> dict[str, Any]:
    packed = base64.b64encode(b"".join(key.to_bytes(8, "little") for key in keys)).decode()
    tokens = len(keys) * block if tokens is None else tokens
    row = {"event": "ask", "at": at, "pass": "01", "class": "agent", "block": block, "input": tokens, "local": 0}
    return row | {"keys": packed} | more


HEADER = {"cachesvc_trace": 1}


def paths(lengths: Sequence[tuple[int, int]]) -> list[Request]:
    """A request for each (parent, length): the parent's first blocks, half of them, then fresh ones."""
    fresh, requests = 0, list[Request]()
    for number, (parent, length) in enumerate(lengths):
        keys = requests[parent % number].keys[: 1 + length // 2] if number else []
        added = max(0, length - len(keys))
        keys = keys[:length] + list(range(fresh, fresh + added))
        fresh += added
        traffic_class = ("agent", "chat")[number % 2]
        requests.append(Request(float(number), traffic_class, 128 * len(keys) + number % 128, keys))
    return requests
