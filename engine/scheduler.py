"""Continuous batching: who runs, and how many tokens of each in the next step.

Order of arrival rules everywhere. All running requests are older than all waiting ones, admission never jumps the
queue, and the youngest is the one that gives its pages back; so the oldest always gets to its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from cachesvc.engine.errors import RequestError
from cachesvc.engine.kv import OutOfPagesError, PagePool
from cachesvc.engine.request import Request
from cachesvc.keys import BLOCK_TOKENS


class Chunk(NamedTuple):
    """Tokens `start` to `stop` of a request, to be computed in one step."""

    request: Request
    start: int
    stop: int
    samples: bool
    """Whether the step also yields the request's next token."""
    frozen: bool
    """Whether the tokens' stored KV came out of the cache: they are replayed for their windows only."""


class Scheduler:
    """At most `max_running` requests at a time and `max_batch_tokens` tokens per step."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_running: int,
        max_batch_tokens: int,
        before_release: Callable[[Request], None] = lambda request: None,
    ) -> None:
        """`before_release` is called with a request whose pages are about to be freed."""
        if not 0 < max_running <= max_batch_tokens:
            raise ValueError(
                f"max_running is {max_running} and max_batch_tokens {max_batch_tokens}; "
                "every running request needs a token per step"
            )
        self._pool = pool
        self._before_release = before_release
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def asking(self) -> list[Request]:
        """Running requests that wait for the cache's answer, oldest first."""
        return [request for request in self._running if request.asking]

    @property
    def requests(self) -> list[Request]:
        """All requests that are not finished, oldest first."""
        return [*self._running, *self._waiting]

    def add(self, request: Request) -> None:
        """Queues a request. Raises `RequestError` for one that could not run even on an empty pool."""
        # The last token is only handed out: its KV is never computed.
        longest = len(request.tokens) + request.params.max_new_tokens - 1
        needed = self._pool.pages_for(longest)
        if needed > self._pool.num_pages:
            raise RequestError(
                f"request {request.request_id!r} needs {needed} pages of {self._pool.page_size} tokens "
                f"({len(request.tokens)} input tokens and up to {request.params.max_new_tokens} new ones), the pool "
                f"has {self._pool.num_pages}; shorten it or enlarge the pool"
            )
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forgets a request, finished or aborted, and frees its pages."""
        (self._running if request in self._running else self._waiting).remove(request)
        self._before_release(request)
        request.table.release()

    def make_room(self) -> None:
        """Gives every running request the page that its next token needs, preempting the youngest where none is left.

        A preempted request goes back to the head of the queue and computes everything again.
        """
        for request in list(self._running):
            while request in self._running and request.wants_more:
                try:
                    request.table.ensure(request.num_known)
                    break
                except OutOfPagesError:
                    self._preempt_youngest()

    @property
    def must_preempt(self) -> bool:
        """Whether `make_room` will take pages from somebody: no step that uses them may be under way then."""
        needed = sum(
            max(0, self._pool.pages_for(request.num_known) - len(request.table.pages))
            for request in self._running
            if request.wants_more
        )
        return needed > self._pool.free_pages

    def admit(self) -> list[Request]:
        """Moves waiting requests to the running ones, with pages for all of their known tokens.

        Prompts get all of their pages here, so only decoding can run out later. One page per running request stays
        free, so that an admission is not undone by the next step.
        """
        admitted = []
        while self._waiting and len(self._running) < self._max_running:
            request = self._waiting[0]
            if self._pool.free_pages < self._pool.pages_for(len(request.tokens)) + len(self._running):
                break
            request.table.ensure(len(request.tokens))
            self._running.append(self._waiting.popleft())
            admitted.append(request)
        return admitted

    def plan(self) -> list[Chunk]:
        """The chunks of the next step: first one token for everyone who decodes, then prompts, oldest first.

        Requests that wait for the cache's answer are left out.

        A chunk that does not reach the end of its prompt ends at a multiple of 128 tokens where the budget allows it:
        blocks complete early, and runs with and without a cache hit cut the prompt at the same places.
        """
        budget = self._max_batch_tokens
        chunks: list[Chunk] = []
        ready = [request for request in self._running if not request.asking and request.wants_more]
        for request in sorted(ready, key=lambda r: r.num_known - r.num_computed > 1):
            start, end = request.num_computed, request.num_known
            stop = min(end, start + budget)
            aligned = stop - stop % BLOCK_TOKENS
            if stop < end and aligned > start:
                stop = aligned
            budget -= stop - start
            # What is replayed is computed in another way than what follows it.
            if start < request.frozen_until:
                middle = min(stop, request.frozen_until)
                if start < middle:
                    chunks.append(Chunk(request, start, middle, False, True))
                start = middle
            if start < stop:
                chunks.append(Chunk(request, start, stop, stop == end, False))
        return chunks

    def _preempt_youngest(self) -> None:
        victim = self._running.pop()
        self._before_release(victim)
        victim.table.release()
        victim.restart()
        victim.preemptions += 1
        self._waiting.appendleft(victim)
