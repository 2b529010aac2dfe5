"""A request until it is computed: it waits unschedulable while its prefix is looked up and loaded.

========================  ==========================================================================================
a waiting request         what happens here
========================  ==========================================================================================
has been added            `admit`: the look-up begins, the scheduler leaves the request alone
is a miss                 it is let go: the scheduler allocates and computes, as without a cache
is a hit                  once it is its turn and there is room, it gets blocks, and a thread loads into them
has been loaded           its cached tokens are set, never more than what was loaded, and it is let go
was preempted             `admit` again: another pass, over the answer so far too
was aborted               its load is stopped, and its blocks are freed once nobody writes into them any more
========================  ==========================================================================================

The scheduler serves its queue in order, and allocates nothing while too little is free. So blocks are held in the
order of the queue only, below the scheduler's watermark, and are given back when nothing else can go on (`_unblock`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from cachesvc.connector.deepinfer.pages import Fence, PagedBlocks
from cachesvc.connector.deepinfer.requests import Ledger, Phase, Tracked, has_ended
from cachesvc.connector.deepinfer.settings import Settings
from cachesvc.connector.split import SplitPrefixCache
from cachesvc.connector.workers import Workers
from cachesvc.keys import BLOCK_TOKENS

logger = logging.getLogger("cachesvc.connector")

WATERMARK: Final = 0.9
"""Above this share of blocks in use DeepInfer's scheduler begins no prompt (``GPU_CACHE_PREFILL_WATERMARK``)."""

MAX_LOADS: Final = 4096
"""Loads that wait for a thread; past it a request is computed."""

HELD: Final = (Phase.LOOKING, Phase.WANTS_ROOM, Phase.LOADING)
"""The scheduler is told to leave such a request alone."""


class Limits:
    """What DeepInfer's scheduler checks only for requests that have no blocks yet, so that we have to."""

    def __init__(self, scheduler_config: Any, cache_config: Any) -> None:
        whole = scheduler_config.max_model_len
        self.prompt_tokens: int = (
            whole if scheduler_config.chunked_prefill else min(whole, scheduler_config.max_num_batched_tokens)
        )
        self.blocks: int = cache_config.num_gpu_blocks
        self.lookahead_tokens: int = max(1, cache_config.lookahead_tokens)


class Admission:
    """The engine's thread calls it; loads run in threads of their own."""

    def __init__(
        self,
        cache: SplitPrefixCache,
        pages: PagedBlocks,
        scheduler: Any,
        block_manager: Any,
        limits: Limits,
        settings: Settings,
        replay_tokens: int,
        on_ended: Callable[[Tracked], None],
    ) -> None:
        """`on_ended` is told of requests that ended before they ran."""
        self._cache = cache
        self._pages = pages
        self._scheduler = scheduler
        self._block_manager = block_manager
        self._limits = limits
        self._replay_tokens = replay_tokens
        self._on_ended = on_ended
        self._loader = Workers("cachesvc-load", threads=settings.load_threads, limit=MAX_LOADS)
        self._progress = threading.Event()
        self._waiting: dict[int, Tracked] = {}
        """By identity of the sequence: not yet computed, or not completely."""
        self.declined = 0
        self.given_back = 0

    def admit(self, t: Tracked, tokens: Sequence[int]) -> None:
        """Begins the look-up. Call it while the scheduler has not seen the request, or has just preempted it."""
        t.ledger = Ledger(self._cache.begin(tokens, traffic_class=t.traffic_class, salt=t.salt))
        t.given_tokens, t.seen_blocks = len(tokens), 0
        t.loaded_tokens, t.cancelled, t.computed_once = 0, False, False
        t.loaded = threading.Event()
        self._waiting[id(t.seq)] = t
        if self._cache.poll(t.p) and not t.p.hit_tokens:
            t.phase = Phase.READY
            return
        t.waits_for_engine = not t.seq.schedulable
        t.seq.schedulable = False
        t.phase = Phase.LOOKING

    def advance(self) -> None:
        """What has changed since the last step. Before each `schedule`; never waits."""
        self._progress.clear()
        for t in list(self._waiting.values()):
            if has_ended(t.seq) or t.cancelled:
                self._end(t)
            elif t.phase is Phase.LOOKING and self._cache.poll(t.p):
                if t.p.hit_tokens:
                    t.phase = Phase.WANTS_ROOM
                else:
                    self._let_go(t)
            elif t.phase is Phase.LOADING and t.loaded.is_set():
                self._take_loaded(t)
        if any(t.phase is Phase.WANTS_ROOM for t in self._waiting.values()):
            self._give_room()
        self._unblock()

    def idle(self, seconds: float) -> None:
        """Waits for progress, if nothing else is to be done: every request waits for the cache."""
        held = [t for t in self._waiting.values() if t.phase in (Phase.LOOKING, Phase.LOADING)]
        waiting = self._scheduler.waiting
        if not held or self._scheduler.running or not waiting or waiting[0].schedulable:
            return
        if held[0].phase is Phase.LOOKING:
            self._cache.wait(held[0].p, seconds)
        else:
            self._progress.wait(seconds)

    def scheduled(self, seq: Any) -> None:
        """The scheduler has taken it into a step that computes prompts."""
        t = self._waiting.get(id(seq))
        if t is None:
            return
        t.holds_blocks, t.computed_once = False, True
        if not seq.chunked_rest_len:
            t.phase = Phase.RUNNING
            del self._waiting[id(seq)]

    def release_engine_hold(self, request_id: str) -> None:
        """DeepInfer's own reason to wait has gone: its images are there."""
        for t in self._waiting.values():
            if t.seq.request_id == request_id and t.phase in HELD:
                t.waits_for_engine = False
                return
        self._scheduler.set_schedulable(request_id)

    def give_up(self, timeout_s: float) -> None:
        """After an error of our own: whatever waits for the cache is let go, to be computed from its first token.

        A request whose blocks are still being written after `timeout_s` is aborted.
        """
        for t in list(self._waiting.values()):
            if t.phase is Phase.LOADING:
                self._cache.finish(t.p)
                if not t.loaded.wait(timeout_s):
                    t.seq.status = type(t.seq.status).FINISHED_ABORTED
                    continue
            self._let_go(t)

    def close(self, timeout_s: float) -> None:
        self._loader.close(timeout_s)

    # From a hit to its blocks

    def _give_room(self) -> None:
        """Allocates for the first request of the queue that has no blocks, and for those behind it as long as it
        goes."""
        for seq in self._scheduler.waiting:
            t = self._waiting.get(id(seq))
            if seq.block_table or has_ended(seq):
                continue
            if t is None or t.phase is not Phase.WANTS_ROOM:
                return  # it goes first, and is to find what room there is
            if self._start(t.p.hit_tokens) <= 0 or not self._fits_at_all(t):
                self._decline(t)
                continue
            if not self._has_room(t):
                if not self._scheduler.running and not self._others_hold(t):
                    self._decline(t)  # nothing will become free
                return
            if not self._scheduler.try_allocate_seq(seq):
                return
            t.holds_blocks = True
            t.phase = Phase.LOADING
            job = partial(self._load, t, self._pages.fence(), list(seq.block_table))
            if not self._loader.submit(job):
                t.loaded.set()

    def _fits_at_all(self, t: Tracked) -> bool:
        used_by_nobody = 1  # block 0
        return (
            t.length <= self._limits.prompt_tokens
            and self._blocks_of(t) + used_by_nobody <= WATERMARK * self._limits.blocks
        )

    def _has_room(self, t: Tracked) -> bool:
        """Also after it the scheduler must begin prompts."""
        free = self._block_manager.get_num_free_blocks() - self._blocks_of(t)
        return bool(free >= 0 and self._limits.blocks - free <= WATERMARK * self._limits.blocks)

    def _others_hold(self, t: Tracked) -> bool:
        return any(other.holds_blocks or other.computed_once for other in self._waiting.values() if other is not t)

    def _blocks_of(self, t: Tracked) -> int:
        return -(-t.length // BLOCK_TOKENS)

    def _start(self, loaded_tokens: int) -> int:
        """Where computing begins after so many tokens were loaded: the last window of them is computed again."""
        start = loaded_tokens - self._replay_tokens
        return start if start >= self._limits.lookahead_tokens else 0

    # In threads of the loader

    def _load(self, t: Tracked, fence: Fence, table: list[int]) -> None:
        def scatter(first_block: int, payloads: Sequence[memoryview]) -> None:
            self._pages.scatter(table[first_block : first_block + len(payloads)], payloads)

        try:
            fence.wait()  # what was computed into these blocks for others before
            t.loaded_tokens = self._cache.load(t.p, scatter)
        except Exception:  # the request waits for the end of this load, whatever happens to it
            logger.exception("a load failed")
            t.loaded_tokens = 0
        finally:
            t.loaded.set()
            self._progress.set()

    # In the engine's thread

    def _take_loaded(self, t: Tracked) -> None:
        start = min(self._start(t.loaded_tokens), t.length - self._limits.lookahead_tokens)
        if start > 0:
            t.seq.num_cached_tokens = start
            t.seq.cached_hit_tokens = start
            t.seq.swa_valid_start = start if self._replay_tokens else 0
            t.seen_blocks = t.loaded_tokens // BLOCK_TOKENS
        self._let_go(t)

    def _decline(self, t: Tracked) -> None:
        self.declined += 1
        self._cache.decline(t.p)
        self._let_go(t)

    def _let_go(self, t: Tracked) -> None:
        held = t.phase in HELD
        t.phase = Phase.READY
        if held and not t.waits_for_engine:
            t.seq.schedulable = True  # it may not be in the queue yet
            self._scheduler.set_schedulable(t.seq.request_id)

    def _end(self, t: Tracked) -> None:
        """It was aborted, or is to give its blocks back. They are freed once nobody writes into them."""
        ended = has_ended(t.seq)
        if ended and t.phase in HELD:
            self._cache.finish(t.p)  # stops the load
        if t.phase is Phase.LOADING and not t.loaded.is_set():
            return
        if ended and any(seq is t.seq for seq in self._scheduler.running):
            del self._waiting[id(t.seq)]  # a step was computing it: the scheduler finalizes it
            return
        if t.seq.block_table:  # the scheduler frees none of a request that is not running
            self._scheduler.free_seq(t.seq)
            t.seq.state_id = -1
        t.holds_blocks = False
        t.cancelled = False
        if ended:
            del self._waiting[id(t.seq)]
            self._on_ended(t)
            return
        t.seq.num_cached_tokens = t.seq.cached_hit_tokens = t.seq.swa_valid_start = t.seen_blocks = 0
        self._let_go(t)

    def _unblock(self) -> None:
        """Nothing runs and the head of the queue cannot begin, because requests behind it hold blocks: one gives its
        own back, the last first. It is computed as if it had missed."""
        waiting = self._scheduler.waiting
        if self._scheduler.running or not waiting:
            return
        free = self._block_manager.get_num_free_blocks()
        head = waiting[0]
        needed = 0 if head.block_table else -(-head.get_len() // BLOCK_TOKENS)
        if free >= needed and self._limits.blocks - free <= WATERMARK * self._limits.blocks:
            return
        for seq in reversed(waiting[1:]):
            t = self._waiting.get(id(seq))
            if t is not None and t.holds_blocks and not t.cancelled:
                self.given_back += 1
                t.cancelled = True
                self._end(t)
                return
