"""The receiving side of a hand-over: blocks are loaded as the other engine stores them, its record at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from cachesvc.connector.base import BasePrefixCache
from cachesvc.connector.passes import Pass
from cachesvc.engine.cache import BlockMover
from cachesvc.engine.handoff import Handed, HandoffStore
from cachesvc.engine.request import Request
from cachesvc.keys import BLOCK_TOKENS

_ASK_AGAIN_S: Final = 0.01
"""How long to wait before asking for what was not there yet."""


class Receiving:
    """A request that waits for another engine: its blocks are loaded as they come, its record at the end."""

    def __init__(self, handoff: str, deadline_s: float) -> None:
        self.handoff = handoff
        self._patience_s = deadline_s
        self.renew()
        self.loaded = 0
        self.handed: Handed | None = None
        self.blocks: Pass | None = None
        self.record: Pass | None = None
        self._next_ask = 0.0

    def may_ask(self) -> bool:
        """Whether enough time is over since something was asked for last."""
        now = time.monotonic()
        if now < self._next_ask:
            return False
        self._next_ask = now + _ASK_AGAIN_S
        return True

    def renew(self) -> None:
        """Something has come: the time to wait begins anew."""
        self._deadline = time.monotonic() + self._patience_s

    @property
    def expired(self) -> bool:
        """Whether nothing has come for too long."""
        return time.monotonic() >= self._deadline


class Receiver:
    """Loads into the pages of requests what other engines hand over."""

    def __init__(self, cache: BasePrefixCache, handoffs: HandoffStore, mover: BlockMover) -> None:
        self._cache = cache
        self._handoffs = handoffs
        self._mover = mover

    def advance(self, request: Request, receiving: Receiving) -> bool:
        """Takes what has come since the last call, and asks for more. Does not wait.

        True when there is no more to wait for: `receiving.handed` then says whether all has come. What has been loaded
        of the blocks, `receiving.loaded` tokens, is right in any case.
        """
        whole = request.input_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        self._take(request, receiving)
        if receiving.handed is not None and receiving.loaded >= whole:
            self.stop(receiving)
            return True
        if receiving.expired:
            self.stop(receiving)
            receiving.handed = None
            return True
        if receiving.may_ask():
            if receiving.loaded < whole and receiving.blocks is None:
                # One token more than the prompt, so that its last block can be hit even if it is full.
                receiving.blocks = self._cache.begin(
                    [*request.tokens, 0],
                    traffic_class=request.traffic_class,
                    salt=request.salt,
                    local_tokens=receiving.loaded,
                    counted=False,
                )
            if receiving.handed is None and receiving.record is None:
                receiving.record = self._handoffs.ask(receiving.handoff)
        return False

    def stop(self, receiving: Receiving) -> None:
        """Ends what is still being asked for."""
        if receiving.blocks is not None:
            self._cache.finish(receiving.blocks)
        if receiving.record is not None:
            self._handoffs.cache.finish(receiving.record)
        receiving.blocks = receiving.record = None

    def _take(self, request: Request, receiving: Receiving) -> None:
        def scatter(first_block: int, payloads: Sequence[memoryview]) -> None:
            self._mover.scatter(request.table, first_block, payloads)

        if receiving.blocks is not None and self._cache.poll(receiving.blocks):
            if receiving.blocks.hit_tokens > receiving.loaded:
                loaded = self._cache.load(receiving.blocks, scatter)
                if loaded > receiving.loaded:
                    receiving.loaded = loaded
                    receiving.renew()
            self._cache.finish(receiving.blocks)
            receiving.blocks = None
        if receiving.record is not None and self._handoffs.cache.poll(receiving.record):
            receiving.handed = receiving.handed or self._handoffs.take(receiving.record, request)
            self._handoffs.cache.finish(receiving.record)
            receiving.record = None
