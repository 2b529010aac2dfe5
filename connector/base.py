"""What an engine programs against: `BasePrefixCache`, of which one implementation asks a daemon and one never hits."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from cachesvc.connector.passes import Pass
from cachesvc.connector.stats import CacheStats
from cachesvc.keys import Tokens

Scatter = Callable[[int, Sequence[memoryview]], None]
"""Copies payloads, from the block of that index on, into the engine's pages. Read-only, valid meanwhile."""

Gather = Callable[[int, Sequence[memoryview]], None]
"""Fills payload buffers, for the block of that index and those after it, from the engine's pages."""

GatherCheckpoint = Callable[[int, memoryview], None]
"""Fills a payload with the state behind that many blocks (windows and the like), from the engine's pages."""

RestoreCheckpoint = Callable[[int, memoryview], None]
"""Copies the state behind that many blocks into the engine's pages. The payload is read-only, valid meanwhile."""


class BasePrefixCache(ABC):
    """One pass is `match` → `load` → compute → `save` (any number of times) → `finish`.

    Nothing here raises because of the cache: trouble is a miss. What `scatter` or `gather` raises is the engine's own
    and reaches it. Different passes may be used by different threads at once; one pass by one thread at a time, except
    that `finish` may end a `load` that another thread is in: pages may be reused once that `load` has returned.
    """

    match_budget_s: float = 0.0
    """How long `match` waits, seconds."""

    def match(
        self,
        tokens: Tokens,
        *,
        traffic_class: str | None = None,
        salt: bytes = b"",
        adapter: bytes = b"",
        extra: Mapping[int, bytes] | None = None,
        local_tokens: int = 0,
    ) -> Pass:
        """`begin`, and a wait of at most `match_budget_s`. If the pass is still pending then, compute or `poll`."""
        begun = self.begin(
            tokens, traffic_class=traffic_class, salt=salt, adapter=adapter, extra=extra, local_tokens=local_tokens
        )
        self.wait(begun, self.match_budget_s)
        return begun

    @abstractmethod
    def begin(
        self,
        tokens: Tokens,
        *,
        traffic_class: str | None = None,
        salt: bytes = b"",
        adapter: bytes = b"",
        extra: Mapping[int, bytes] | None = None,
        local_tokens: int = 0,
        counted: bool = True,
    ) -> Pass:
        """Starts the look-up of a prompt and returns at once.

        `salt` separates tenants, `adapter` names a LoRA, `extra` maps a block's index to the digests of images or audio
        in it; `local_tokens` are already in the engine's own cache and are not loaded.
        A pass that is not `counted` is not accounted: another engine asks for the same prompt, and is.
        """

    @abstractmethod
    def poll(self, p: Pass) -> bool:
        """True when the pass is settled: found, not found, or given up at `match_deadline_s`. Never waits."""

    @abstractmethod
    def wait(self, p: Pass, timeout_s: float) -> bool:
        """`poll`, after waiting up to `timeout_s` for the answer."""

    @abstractmethod
    def load(self, p: Pass, scatter: Scatter, restore: RestoreCheckpoint | None = None) -> int:
        """Brings the hit into the engine's pages; at most `load_deadline_s` and what `scatter` takes.

        `scatter` is called in prefix order, with verified payloads only. Returns the length in tokens of the prefix
        that is usable now, counted from the first token: `hit_tokens`, less when a block failed, 0 when nothing was
        loaded. The first block loaded is the one that holds token `local_tokens`. A second call loads nothing.
        Where checkpoints are stored `restore` is called after that, once; then it is all or nothing.
        """

    @abstractmethod
    def extend(self, p: Pass, tokens: Tokens) -> None:
        """Appends tokens that the engine has decoded, so that their blocks can be saved."""

    @abstractmethod
    def save(self, p: Pass, computed_tokens: int, gather: Gather) -> int:
        """Queues the full blocks below `computed_tokens` that are not yet stored; returns how many were queued.

        `gather` is called within, so the pages may be reused afterwards. Never waits for the network. When the queue is
        full, the rest is taken by a later `save` of this pass, if one comes.
        """

    def save_checkpoints(self, p: Pass, start: int, end: int, gather: GatherCheckpoint) -> int:
        """Queues the checkpoints that are due among tokens (`start`, `end`], which were computed just now.

        `gather` is called within, in order. The last one of the answer is copied now and queued when the pass ends.
        Returns how many were copied; what does not fit into the queue is left out. See `checkpoints`.
        """
        return 0

    @abstractmethod
    def finish(self, p: Pass) -> None:
        """Ends the pass, in whatever state. Idempotent, and does not wait."""

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Waits until all queued saves are done with (stored, or given up). False when that took longer."""

    @abstractmethod
    def ready(self, timeout_s: float) -> bool:
        """Asks the daemon now; True as soon as it has answered. For start-up: no engine needs to wait for a cache."""

    @abstractmethod
    def close(self) -> None:
        """Stores what is queued, within `close_deadline_s`, and ends the threads. Idempotent."""

    @property
    @abstractmethod
    def stats(self) -> CacheStats:
        """A snapshot."""

    async def amatch(
        self,
        tokens: Tokens,
        *,
        traffic_class: str | None = None,
        salt: bytes = b"",
        adapter: bytes = b"",
        extra: Mapping[int, bytes] | None = None,
        local_tokens: int = 0,
    ) -> Pass:
        """`begin`, and a wait until the pass is settled; the event loop goes on meanwhile."""
        begun = self.begin(
            tokens, traffic_class=traffic_class, salt=salt, adapter=adapter, extra=extra, local_tokens=local_tokens
        )
        while not self.poll(begun):
            await asyncio.to_thread(self.wait, begun, 1.0)
        return begun

    async def aload(self, p: Pass, scatter: Scatter, restore: RestoreCheckpoint | None = None) -> int:
        """`load` in a thread, where `scatter` and `restore` are called too."""
        return await asyncio.to_thread(self.load, p, scatter, restore)

    async def aflush(self, timeout_s: float) -> bool:
        return await asyncio.to_thread(self.flush, timeout_s)
