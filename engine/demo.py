"""The demonstration: one agent conversation on a real model, with the cache off, cold, warm and after a restart.

Every turn gets a new engine with an empty KV pool, so all reuse comes from the cache.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from rich.console import Console

from cachesvc.connector.base import BasePrefixCache, RestoreCheckpoint, Scatter
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.passes import Pass
from cachesvc.connector.prefix_cache import NullPrefixCache, PrefixCache
from cachesvc.engine.cache import block_layout, cache_namespace
from cachesvc.engine.convert import ensure_model
from cachesvc.engine.daemon_process import DaemonProcess
from cachesvc.engine.demo_report import DemoResult, KillResult, TurnResult
from cachesvc.engine.demo_split import SplitRoles
from cachesvc.engine.engine import Engine, EngineConfig
from cachesvc.engine.errors import DemoError
from cachesvc.engine.made import made_beside
from cachesvc.engine.models.base import Model
from cachesvc.engine.models.loading import load_model
from cachesvc.engine.request import SamplingParams
from cachesvc.engine.tokenizer import ChatTokenizer, Conversation, Message
from cachesvc.engine.transcript import load_transcript
from cachesvc.keys import Namespace

_READY_TIMEOUT_S: Final = 30.0
_FLUSH_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class DemoSettings:
    """What can be chosen. `store` None means a temporary directory that is removed at the end."""

    turns: int | None = None
    max_new_tokens: int = 16
    page_size: int = 16
    store: Path | None = None
    kill_at_turn: int | None = None
    model: Literal["smollm2", "ced"] = "smollm2"
    """`ced` has random weights: it shows what is stored and computed again, and says nothing that makes sense."""
    roles: Literal["both", "split"] = "both"
    """`split` computes prompts and answers in two processes, in all rounds but the one without the cache."""


class Demo:
    """Loads the model once and plays the conversation as often as asked; says on `console` what happens."""

    def __init__(self, settings: DemoSettings, console: Console) -> None:
        transcript = load_transcript()
        count = len(transcript.turns) if settings.turns is None else settings.turns
        if not 1 <= count <= len(transcript.turns):
            raise DemoError(f"--turns is {count}; the conversation has 1 to {len(transcript.turns)}")
        if settings.kill_at_turn is not None and not 1 <= settings.kill_at_turn <= count:
            raise DemoError(f"--kill-at-turn is {settings.kill_at_turn}; this run has the turns 1 to {count}")
        if settings.page_size < 1 or settings.max_new_tokens < 1:
            raise DemoError("--page-size and --max-new-tokens must be at least 1")
        _check_store(settings.store)
        self._settings = settings
        self._console = console
        self._name = transcript.name
        self._turns = transcript.turns[:count]
        self._threads = _use_all_cores()

        if settings.roles == "split" and settings.kill_at_turn is not None:
            raise DemoError("--kill-at-turn is for one process; leave out --roles split")
        path = ensure_model(console)
        if settings.model == "ced":
            path = made_beside(path)
        # Random weights decide by less than rounding does: there only the same bits give the same words.
        self._invariant = settings.model == "ced"
        self._path = path
        with console.status(f"Loading {path.name}"):
            self._model: Model[Any] = load_model(path)
            self._tokenizer = ChatTokenizer(path)
            self._namespace: Namespace = cache_namespace(path, self._model.config, self._model.dtype)
        self._payload_bytes = block_layout(self._model.config, self._model.dtype).payload_bytes
        if settings.max_new_tokens * count > self._model.config.max_position_embeddings:
            raise DemoError(
                f"--max-new-tokens {settings.max_new_tokens} in {count} turns exceeds the model's context of "
                f"{self._model.config.max_position_embeddings} tokens"
            )

    def run(self) -> DemoResult:
        """All rounds. Raises `DemoError` when the daemon does not come up or does not stop as it should."""
        settings = self._settings
        with tempfile.TemporaryDirectory(prefix="cachesvc-demo-") as scratch:
            daemon = DaemonProcess(settings.store or Path(scratch) / "store", Path(scratch))
            try:
                with self._daemon_cache(daemon) as cache, self._workers(daemon) as split:
                    off = self._play("off", NullPrefixCache())
                    cold = self._play("cold", cache, split=split)
                    warm = self._play("warm", cache, split=split)
                daemon.stop()
                self._console.print("The daemon was stopped; it starts again on the same store.")
                with self._daemon_cache(daemon) as cache, self._workers(daemon) as split:
                    restart = self._play("restart", cache, split=split)
                killed = None
                if settings.kill_at_turn is not None:
                    killed = self._play_killed(daemon, settings.kill_at_turn)
            finally:
                daemon.close()
        return DemoResult(
            model=self._namespace.model,
            conversation=self._name,
            settings={
                "dtype": self._namespace.dtype,
                "threads": self._threads,
                "page_size": settings.page_size,
                "max_new_tokens": settings.max_new_tokens,
                "roles": settings.roles,
                "block_bytes": self._payload_bytes,
            },
            off=off,
            cold=cold,
            warm=warm,
            restart=restart,
            killed=killed,
        )

    def _play(
        self,
        label: str,
        cache: BasePrefixCache,
        before_turn: Callable[[int], None] = lambda turn: None,
        split: SplitRoles | None = None,
    ) -> list[TurnResult]:
        """One round: the whole conversation from its beginning, each turn resending everything before it."""
        conversation = Conversation(self._tokenizer)
        results = []
        for number, messages in enumerate(self._turns, start=1):
            before_turn(number)
            prompt = conversation.ask(messages)
            result = self._turn(prompt, cache) if split is None else split.turn(prompt, self._settings.max_new_tokens)
            conversation.answer(result.tokens)
            results.append(result)
            self._say(label, number, messages, result)
        return results

    def _turn(self, prompt: Sequence[int], cache: BasePrefixCache) -> TurnResult:
        """One turn on a new engine. What it saves is stored before the next one asks; that time is not counted."""
        settings = self._settings
        pages = -(-(len(prompt) + settings.max_new_tokens) // settings.page_size)
        config = EngineConfig(
            num_pages=pages, page_size=settings.page_size, max_running=1, batch_invariant=self._invariant
        )
        with Engine(self._model, cache, config) as engine:
            (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=settings.max_new_tokens))
        if not cache.flush(_FLUSH_TIMEOUT_S):
            self._console.print("[yellow]The blocks of this turn are not all stored yet; the next may hit less.[/]")
        if output.ttft_s is None:
            raise AssertionError("a finished request has no first token")
        return TurnResult(output.input_tokens, output.hit_tokens, output.ttft_s, output.total_s, output.tokens)

    def _play_killed(self, daemon: DaemonProcess, turn: int) -> KillResult:
        """A round on the full store; the daemon dies while `turn` loads its prefix, and does not come back."""
        options = CacheOptions()
        cache = _KillsItsDaemon(self._namespace, self._payload_bytes, daemon)
        try:
            self._wait_for(daemon, cache)
            results = self._play("killed", cache, lambda number: cache.arm(number == turn))
        finally:
            cache.close()
        if daemon.running:
            raise DemoError(f"turn {turn} loaded nothing from the cache, so the daemon was not killed; choose another")
        return KillResult(turn, results, options.match_deadline_s + options.load_deadline_s)

    @contextmanager
    def _workers(self, daemon: DaemonProcess) -> Iterator[SplitRoles | None]:
        """Two processes of their own for prompts and answers, if that is wanted."""
        if self._settings.roles == "both":
            yield None
            return
        with SplitRoles(self._path, daemon.address, invariant=self._invariant) as split:
            yield split

    @contextmanager
    def _daemon_cache(self, daemon: DaemonProcess) -> Iterator[PrefixCache]:
        """A started daemon, and a connector of ours that has reached it."""
        daemon.start()
        try:
            cache = PrefixCache(self._namespace, self._payload_bytes, address=daemon.address)
        except ValueError as error:  # the path of the temporary directory is too long for a socket
            raise DemoError(f"{error}; set TMPDIR") from error
        try:
            self._wait_for(daemon, cache)
            yield cache
        finally:
            cache.close()

    def _wait_for(self, daemon: DaemonProcess, cache: PrefixCache) -> None:
        for _ in range(int(_READY_TIMEOUT_S)):
            if not daemon.running:
                raise DemoError(f"the daemon did not start: {daemon.last_words()}")
            if cache.ready(1.0):
                return
        raise DemoError(f"the daemon did not answer within {_READY_TIMEOUT_S:.0f} s: {daemon.last_words()}")

    def _say(self, label: str, number: int, messages: Sequence[Message], result: TurnResult) -> None:
        self._console.print(
            f"{label:<7} turn {number:2}/{len(self._turns)}: {result.input_tokens:5,} tokens, "
            f"{result.hit_tokens:5,} of them cached; first token after {result.ttft_s:5.2f} s",
            highlight=False,
            soft_wrap=True,
        )
        if label == "off":
            question = next(message["content"] for message in messages if message["role"] == "user")
            for who, text in (("user", question), ("model", self._tokenizer.decode(result.tokens))):
                line = " ".join(text.split())
                self._console.print(
                    f"  {who + ':':<7}{line}",
                    style="dim",
                    markup=False,
                    highlight=False,
                    no_wrap=True,
                    overflow="ellipsis",
                )


class _KillsItsDaemon(PrefixCache):
    """A connector whose daemon gets SIGKILL as soon as the first payloads of an armed load have arrived."""

    def __init__(self, namespace: Namespace, payload_bytes: int, daemon: DaemonProcess) -> None:
        super().__init__(namespace, payload_bytes, address=daemon.address)
        self._daemon = daemon
        self._armed = False

    def arm(self, armed: bool) -> None:
        self._armed = armed

    def load(self, p: Pass, scatter: Scatter, restore: RestoreCheckpoint | None = None) -> int:
        def scatter_then_kill(first_block: int, payloads: Sequence[memoryview]) -> None:
            scatter(first_block, payloads)
            if self._daemon.running:
                self._daemon.kill()

        return super().load(p, scatter_then_kill if self._armed else scatter, restore)


def _check_store(store: Path | None) -> None:
    if store is None or not store.exists():
        return
    if not store.is_dir():
        raise DemoError(f"--store {store} is not a directory")
    if any(store.iterdir()):
        raise DemoError(f"--store {store} is not empty; the cold round must start with an empty store")


def _use_all_cores() -> int:
    """Makes torch use every core that this process may run on; returns how many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(cores)
    return cores
