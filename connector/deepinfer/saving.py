"""Blocks that are full are pinned in DeepInfer's pool, copied by a thread of ours, and unpinned.

A step is not delayed: the engine's thread only notes which blocks these are. DeepInfer may free or preempt the request
at any time; a pinned block keeps its content until its last pin is gone. All passes are extended, saved and finished by
the one thread, in the order in which the engine said so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from cachesvc.connector.deepinfer.pages import PagedBlocks
from cachesvc.connector.deepinfer.requests import Ledger, Tracked
from cachesvc.connector.passes import KeyedPass
from cachesvc.connector.split import SplitPrefixCache
from cachesvc.connector.workers import Workers
from cachesvc.keys import BLOCK_TOKENS

logger = logging.getLogger("cachesvc.connector")

MAX_JOBS: Final = 65_536
"""Jobs that wait for the thread; past it blocks are not saved."""


class Saving:
    """`offer` and `end` are called by the engine's thread."""

    def __init__(
        self, cache: SplitPrefixCache, pages: PagedBlocks, block_manager: Any, max_pinned: int, *, save_decoded: bool
    ) -> None:
        self._cache = cache
        self._pages = pages
        self._block_manager = block_manager
        self._max_pinned = max_pinned
        self._save_decoded = save_decoded
        self._lock = threading.Lock()
        self._pinned = 0
        self.skipped_blocks = 0  # not saved: no room among the pins before the request was freed
        self._worker = Workers("cachesvc-pins", threads=1, limit=MAX_JOBS)

    @property
    def pinned_blocks(self) -> int:
        with self._lock:
            return self._pinned

    def offer(self, t: Tracked, computed_tokens: int, *, last: bool = False) -> None:
        """The KV of so many tokens is in the pool, and will not change. `last`: the request is about to be freed.

        What finds no room among the pins is offered again with the next step of the request.
        """
        if t.ledger is None or not t.store or not self._cache.attached:
            return
        if not self._save_decoded:
            computed_tokens = min(computed_tokens, t.p.prompt_tokens)
        goal = computed_tokens // BLOCK_TOKENS
        first, end = t.seen_blocks, min(goal, t.seen_blocks + self._room())
        if end > first:
            table = t.seq.block_table[first:end]
            tokens = t.seq.data.get_token_ids()[t.given_tokens : end * BLOCK_TOKENS]
            self._pin(table)
            if self._worker.submit(partial(self._save, t.ledger, tokens, dict(enumerate(table, first)), end)):
                t.given_tokens = max(t.given_tokens, end * BLOCK_TOKENS)
                t.seen_blocks = end
            else:
                self._unpin(table)
        if last:
            self.skipped_blocks += max(0, goal - t.seen_blocks)

    def end(self, t: Tracked) -> None:
        """The last word about a pass."""
        ledger, t.ledger = t.ledger, None
        if ledger is not None and not self._worker.submit(partial(self._finish, ledger)):
            self._cache.finish(ledger.p)

    def flush(self, timeout_s: float) -> bool:
        """True once what was offered is stored, or given up."""
        return self._worker.wait_idle(timeout_s) and self._cache.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        self._worker.close(timeout_s)

    # On the thread

    def _save(self, ledger: Ledger, tokens: Sequence[int], pages: dict[int, int], end: int) -> None:
        p, unsaved = ledger.p, ledger.unsaved
        unsaved.update(pages)
        try:
            self._extend(ledger, tokens)
            p.next_save = max(p.next_save, min(unsaved))
            self._cache.save(p, end * BLOCK_TOKENS, partial(self._gather, ledger))
            done = [block for block in unsaved if block < p.next_save]
        except Exception:  # what cannot be saved must not end the thread that unpins
            logger.exception("blocks are not saved")
            done = list(unsaved)
        self._unpin([unsaved.pop(block) for block in done])

    def _extend(self, ledger: Ledger, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        if ledger.hasher is None:
            self._cache.extend(ledger.p, tokens)
            return
        known = len(ledger.hasher.keys)
        ledger.hasher.extend(tokens)
        assert isinstance(ledger.p, KeyedPass)
        self._cache.extend_keys(ledger.p, ledger.hasher.keys[known:])

    def _gather(self, ledger: Ledger, first_block: int, payloads: Sequence[memoryview]) -> None:
        blocks = range(first_block, first_block + len(payloads))
        self._pages.gather([ledger.unsaved[block] for block in blocks], payloads)

    def _finish(self, ledger: Ledger) -> None:
        if ledger.unsaved:  # the queue was full: once more, and no longer
            self._save(ledger, (), {}, max(ledger.unsaved) + 1)
            self._unpin(list(ledger.unsaved.values()))
            ledger.unsaved.clear()
        self._cache.finish(ledger.p)

    # Pins

    def _room(self) -> int:
        with self._lock:
            return self._max_pinned - self._pinned

    def _pin(self, blocks: list[int]) -> None:
        with self._lock:
            self._pinned += len(blocks)
        self._block_manager.pin_blocks(blocks)

    def _unpin(self, blocks: list[int]) -> None:
        if blocks:
            self._block_manager.unpin_blocks(blocks)
            with self._lock:
                self._pinned -= len(blocks)
