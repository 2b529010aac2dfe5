"""Runs one store and its client in an environment of its own: ``worker.py MODULE CLASS DIRECTORY MEMORY``.

Takes orders as lines of JSON on its standard input and answers each with one on its standard output. What is timed is
timed here, so that no order counts.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from sides.base import Buffers, Side


class Worker:
    def __init__(self, side: Side) -> None:
        self._side = side
        self._keys: list[bytes] = []
        self._source: Buffers = []
        self._target: Buffers = []

    def start(self) -> None:
        self._side.start()

    def allocate(self, size: int, count: int) -> None:
        self._forget()
        self._source = self._target = []
        self._source, self._target = self._side.allocate(size, count)
        pattern = random.Random(size).randbytes(min(size, 1 << 16))
        for index, view in enumerate(self._source):
            for start in range(0, size, len(pattern)):
                part = pattern[: size - start]
                view[start : start + len(part)] = part
            view[:8] = index.to_bytes(8, "little")
        self._clear()

    def fresh(self) -> None:
        """New keys for the next put."""
        self._forget()
        self._keys = [os.urandom(16) for _ in self._source]

    def put(self) -> float:
        return _timed(lambda: self._side.put(self._keys, self._source))

    def settle(self) -> None:
        self._side.settle()

    def get(self) -> float:
        return _timed(lambda: self._side.get(self._keys, self._target))

    def check(self) -> None:
        """Whether a get brings what the put took."""
        self._clear()
        self._side.get(self._keys, self._target)
        wrong = [i for i, (a, b) in enumerate(zip(self._source, self._target, strict=True)) if a != b]
        if wrong:
            raise RuntimeError(f"block {wrong[0]} does not come back as it was put, nor do {len(wrong) - 1} others")

    def exists(self, calls: int) -> list[float]:
        taken = []
        for _ in range(calls):
            taken.append(_timed(lambda: self._exists(len(self._keys))))
            self._side.release()
        return taken

    def stop(self) -> None:
        self._keys = []
        self._source = self._target = []
        self._side.stop()

    def _forget(self) -> None:
        if self._keys:
            self._side.forget(self._keys)
        self._keys = []

    def _exists(self, expected: int) -> None:
        if (found := self._side.exists(self._keys)) != expected:
            raise RuntimeError(f"{found} keys of {expected} exist")

    def _clear(self) -> None:
        zeros = bytes(len(self._target[0]))
        for view in self._target:
            view[:] = zeros


def _timed(call: Callable[[], None]) -> float:
    gc.disable()
    try:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    finally:
        gc.enable()


def _answers() -> TextIO:
    """Standard output, which from now on is only ours: what a library prints goes to standard error."""
    own = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return own


def main(module: str, name: str, directory: str, memory: str) -> None:
    answers = _answers()
    worker: Worker | None = None
    try:
        for line in sys.stdin:
            order: dict[str, Any] = json.loads(line)
            try:
                if worker is None:
                    side: Side = getattr(importlib.import_module(module), name)(Path(directory), int(memory))
                    worker = Worker(side)
                answer = {"answer": getattr(worker, order.pop("do"))(**order)}
            except Exception as error:  # noqa: BLE001  whatever a rival raises is the reason why it is left out
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers)
    finally:
        if worker is not None:
            worker.stop()


if __name__ == "__main__":
    main(*sys.argv[1:5])
