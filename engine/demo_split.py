"""The demonstration's turns with prompts and answers computed in two processes, which hand over through the cache."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from cachesvc.engine.demo_report import TurnResult
from cachesvc.engine.errors import DemoError
from cachesvc.engine.request import SamplingParams
from cachesvc.engine.serving.backend import Job
from cachesvc.engine.serving.router import Router

_SETTLE_S: Final = 0.3
"""After a turn, until what the decoding process has saved is stored too. Not counted."""
_STOP_TIMEOUT_S: Final = 20.0


class WorkerProcess:
    """One ``engine serve`` of ours, ended by its process id. Raises `DemoError` when it does not come up."""

    def __init__(self, role: str, model: Path, *options: str) -> None:
        command = [sys.executable, "-m", "cachesvc.engine", "serve", "--role", role, "--model", str(model)]
        self._process = subprocess.Popen([*command, "--port", "0", *options], stdout=subprocess.PIPE, text=True)
        # It says where it listens when it is ready to, and nothing if it ends before.
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if "http://" not in line:
            raise DemoError(f"the {role} worker did not start; it says why above")
        self.url = "http://" + line.split("http://")[1].strip()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()


class SplitRoles:
    """A worker for prompts, one for answers, and the router before them."""

    def __init__(self, model: Path, cache: str, *, invariant: bool) -> None:
        options = ["--cache", cache, *(["--batch-invariant"] if invariant else [])]
        self._workers = [WorkerProcess("prefill", model, *options)]
        try:
            self._workers.append(WorkerProcess("decode", model, *options))
        except DemoError:
            self._workers[0].stop()
            raise
        self._router = Router([self._workers[0].url], [self._workers[1].url])
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> SplitRoles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.close()
        for worker in self._workers:
            worker.stop()

    def turn(self, prompt: Sequence[int], max_new_tokens: int) -> TurnResult:
        """Has one prompt computed and answered."""
        result = self._loop.run_until_complete(self._turn(list(prompt), max_new_tokens))
        time.sleep(_SETTLE_S)
        return result

    async def _turn(self, prompt: list[int], max_new_tokens: int) -> TurnResult:
        began, first, hits, tokens = time.perf_counter(), 0.0, 0, []
        async for event in self._router.generate(Job(prompt, SamplingParams(max_new_tokens=max_new_tokens))):
            first = first or time.perf_counter() - began
            hits = hits if event.hit_tokens is None else event.hit_tokens
            tokens.append(event.token)
        return TurnResult(len(prompt), hits, first, time.perf_counter() - began, tuple(tokens))
