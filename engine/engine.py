"""The engine: requests in, tokens out, with prefixes taken from a cache and given to it.

What an engine has to do to use `cachesvc` is all in `_match`, `_load`, `_save` and `_end`, and one `extend`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NamedTuple

from cachesvc.connector.base import BasePrefixCache
from cachesvc.connector.device import DeviceLoad, DevicePayloads, DeviceStaging
from cachesvc.connector.layout import StorePolicy
from cachesvc.connector.passes import Pass
from cachesvc.engine.cache import BlockMover, block_layout, needs_replay
from cachesvc.engine.device_path import DevicePath
from cachesvc.engine.errors import RequestError
from cachesvc.engine.handoff import HandoffStore
from cachesvc.engine.kv import PagePool, PageTable
from cachesvc.engine.models.base import Model
from cachesvc.engine.receiving import Receiver, Receiving
from cachesvc.engine.replay import Replay, replay_start
from cachesvc.engine.request import Request, RequestOutput, SamplingParams
from cachesvc.engine.runner import Runner
from cachesvc.engine.scheduler import Chunk, Scheduler
from cachesvc.kernels import kernels_for
from cachesvc.keys import BLOCK_TOKENS

_IDLE_WAIT_S: Final = 0.05
"""How long an idle step waits for the cache before it returns to the caller."""

_RECEIVE_WAIT_S: Final = 0.002
"""The same while another engine computes the prompt."""


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and modes. The pool holds ``num_pages * page_size`` tokens of all running requests together."""

    num_pages: int = 512
    page_size: int = 16
    max_batch_tokens: int = 512
    """Tokens computed in one step; a longer prompt takes several."""
    max_running: int = 16
    windows: StorePolicy | None = None
    """What the cache keeps of layers that see only a window; None: the model's own policy."""
    replay: Replay = "exact"
    """How windows that are not kept are computed again after a hit (`cachesvc.engine.replay`)."""
    batch_invariant: bool = False
    """Give a prompt the same bits of KV and logits however it is batched, chunked or cached. Slower."""
    async_scheduling: bool = False
    """Prepare the next step, and save and report the last one, while the device is at it."""


class _Flight(NamedTuple):
    """A step that is under way."""

    chunks: list[Chunk]
    sampled: Future[dict[str, int]]

    def has(self, request: Request) -> bool:
        return any(chunk.request is request for chunk in self.chunks)


class Engine:
    """Generates tokens for many requests at once. One thread; the caller drives it with `step` or `generate`.

    The engine keeps no prefix of its own: all reuse comes from `cache`. Several engines can share one model.
    """

    def __init__(
        self,
        model: Model[Any],
        cache: BasePrefixCache,
        config: EngineConfig | None = None,
        *,
        handoffs: BasePrefixCache | None = None,
        staging: DeviceStaging | None = None,
    ) -> None:
        """`handoffs` is a cache of the namespace and payload size that `cachesvc.engine.handoff` says.

        `staging`: that of `cache`, for a model on a device; without it KV passes through memory of the host. Raises
        `ValueError` with one for a model with windows, with `handoffs`, and with `async_scheduling`.
        """
        config = config or EngineConfig()
        if staging is not None and (handoffs is not None or config.async_scheduling):
            raise ValueError("with `staging` there are neither handoffs nor async_scheduling")
        self._model = model
        self._cache = cache
        self._pool = PagePool(
            model.config,
            num_pages=config.num_pages,
            page_size=config.page_size,
            dtype=model.dtype,
            device=model.device,
        )
        layout = block_layout(model.config, model.dtype, config.windows)
        kernels = kernels_for(model.device)
        self._mover = BlockMover(layout, self._pool, kernels)
        self._handoffs = None if handoffs is None else HandoffStore(handoffs, layout, self._pool, kernels)
        self._receiver = None if self._handoffs is None else Receiver(cache, self._handoffs, self._mover)
        if model.config.prefill_keep is not None and not needs_replay(layout):
            raise ValueError("windows of this model cannot be stored: most of a prompt has none in the decoder half")
        self._layout = layout
        window = max((group.window or 0 for group in layout.groups), default=0)
        self._replayed_window = window if needs_replay(layout) else 0
        self._stored_window = window if layout.checkpoint_bytes else 0
        self._replay = config.replay
        self._device = None if staging is None else DevicePath(staging, self._pool, layout)
        self._scheduler = Scheduler(
            self._pool,
            max_running=config.max_running,
            max_batch_tokens=config.max_batch_tokens,
            before_release=self._device.drop if self._device else lambda request: None,
        )
        self._async = config.async_scheduling
        self._runner = Runner(
            model,
            self._pool,
            bounded=config.replay == "bounded",
            invariant=config.batch_invariant,
            threaded=config.async_scheduling,
        )
        self._flight: _Flight | None = None
        self._outbox: list[RequestOutput] = []
        self._requests: dict[str, Request] = {}
        self._next_id = 0

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def free_pages(self) -> int:
        """Pages that no request holds."""
        return self._pool.free_pages

    @property
    def has_requests(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._requests)

    def add_request(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        traffic_class: str | None = None,
        salt: bytes = b"",
        publish_as: str | None = None,
        receive: str | None = None,
        receive_deadline_s: float = 30.0,
    ) -> str:
        """Queues a prompt and returns its id. The time to the first token counts from here.

        `salt` keeps a tenant's blocks apart from those of others. `publish_as` hands the prompt, computed up to its
        first token, to an engine that is given the same name as `receive`; what has not come to that one when nothing
        has for `receive_deadline_s`, it computes itself. Raises `RequestError` for a prompt that is empty, holds a
        token outside of the vocabulary, or does not fit into the context or the pool with `max_new_tokens`.
        """
        params = params or SamplingParams()
        limit = self._model.config.max_position_embeddings
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        wrong = next((token for token in tokens if not 0 <= token < self._model.config.vocab_size), None)
        if wrong is not None:
            raise RequestError(f"token ids must lie in [0, {self._model.config.vocab_size}); got {wrong}")
        if len(tokens) + params.max_new_tokens > limit:
            raise RequestError(
                f"{len(tokens)} input tokens and {params.max_new_tokens} new ones exceed the model's context of {limit}"
            )
        if (publish_as or receive) and self._handoffs is None:
            raise RequestError("this engine has no cache for handing prompts over")
        if (publish_as or receive) and self._stored_window:
            raise RequestError("prompts are not handed over where windows are stored at checkpoints; store them never")
        if request_id is None:
            request_id, self._next_id = f"request-{self._next_id}", self._next_id + 1
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use")
        stop, keep = params.stop_token_ids, self._model.config.prefill_keep
        request = Request(
            request_id=request_id,
            tokens=list(tokens),
            params=params,
            stop_token_ids=self._model.config.eos_token_ids if stop is None else stop,
            table=PageTable(self._pool),
            traffic_class=traffic_class,
            salt=salt,
            publish_as=publish_as,
            receiving=None if receive is None else Receiving(receive, receive_deadline_s),
            full_from=None if keep is None else max(0, len(tokens) - keep),
        )
        self._scheduler.add(request)
        self._requests[request_id] = request
        return request_id

    def step(self) -> list[RequestOutput]:
        """Runs one batch. Returns the state of every request that got a token.

        With `async_scheduling` the batch is only started, and what is returned comes from the one before it.
        """
        for request in self._scheduler.asking:
            if request.receiving is not None:
                self._receive(request, request.receiving)
        if self._scheduler.must_preempt:
            self._land()
        self._scheduler.make_room()
        if self._device is not None:
            self._device.begin_step()
            self._poll()
        if self._device is None or not self._scheduler.plan():  # else they ask while the device computes
            self._admit()
        before, self._flight = self._flight, self._launch()
        if before is not None:
            self._finish(before)
        if not self._async:
            self._land()
        elif before is None and self._flight is None:
            self._idle()
        outputs, self._outbox = self._outbox, []
        return outputs

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Runs prompts to their end, together; outputs in the order of the prompts. Raises as `add_request`."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        ids: list[str] = []
        try:
            for prompt, wanted in zip(prompts, params, strict=True):
                ids.append(self.add_request(prompt, wanted))
            done: dict[str, RequestOutput] = {}
            while len(done) < len(ids):
                done.update((out.request_id, out) for out in self.step() if out.finished and out.request_id in ids)
        finally:
            for request_id in ids:
                self.abort(request_id)
        return [done[request_id] for request_id in ids]

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request at once and frees its pages; None when there is no such request (it may have just ended)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if self._flight is not None and self._flight.has(request):
            self._land()
            if request_id not in self._requests:
                return request.output()
        request.finish_reason = "abort"
        self._end(request)
        return request.output()

    def close(self) -> None:
        """Aborts everything that is not finished. The cache belongs to the caller and stays open."""
        for request_id in list(self._requests):
            self.abort(request_id)
        self._runner.close()
        if self._device is not None:
            self._device.close()

    def _admit(self) -> None:
        for request in self._scheduler.admit():
            self._match(request)
        self._poll()

    def _poll(self) -> None:
        for request in self._scheduler.asking:
            if request.receiving is None:
                self._load(request)

    def _launch(self) -> _Flight | None:
        """Starts what is due, if anything is."""
        chunks = self._scheduler.plan()
        if not chunks:
            if not self._async:
                self._idle()
            return None
        if self._device is None:
            sampled = self._runner.launch(chunks)
        else:
            kv = self._device.layers([chunk.request for chunk in chunks])
            sampled = self._runner.launch(chunks, kv, self._admit)
        flight = _Flight(chunks, sampled)
        for chunk in chunks:
            chunk.request.num_computed = chunk.stop
            chunk.request.pending += chunk.samples
        return flight

    def _land(self) -> None:
        """Waits for the step that is under way."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._finish(flight)

    def _finish(self, flight: _Flight) -> None:
        """Takes a step's tokens, saves what it completed, ends what it ended."""
        sampled = flight.sampled.result()
        now = time.perf_counter()
        got_token = []
        for chunk in flight.chunks:
            chunk.request.pending -= chunk.samples
        # What was computed behind a load that has failed is void: it is computed again.
        chunks = [chunk for chunk in flight.chunks if self._load_is_good(chunk.request)]
        for chunk in chunks:
            request = chunk.request
            before, request.num_done = request.num_done, chunk.stop
            if chunk.samples and request.finish_reason is None:
                token = sampled[request.request_id]
                request.append(token, now)
                self._cache.extend(_pass(request), [token])
                got_token.append(request)
                if request.publish_as is not None and self._handoffs is not None and len(request.generated) == 1:
                    self._handoffs.publish(request.publish_as, request)
            if self._stored_window:
                self._save_checkpoints(request, before)
        # Saving comes after the tokens are known, so that it delays nobody's first one.
        for request in dict.fromkeys(chunk.request for chunk in chunks):
            if request.finish_reason is None or request in got_token:
                self._save(request)
            # The next step may have begun to compute behind a stop token: its pages are in use until it is over.
            if request.finish_reason is not None:
                request.finished_at = request.finished_at or now
                if self._flight is None or not self._flight.has(request):
                    self._end(request)
        self._outbox += [request.output() for request in got_token]

    def _idle(self) -> None:
        """Everyone waits for the cache, which answers or gives up within its own deadline."""
        for request in self._scheduler.asking[:1]:
            if request.receiving is not None:
                time.sleep(_RECEIVE_WAIT_S)
            elif request.load is not None:
                request.load.wait_start(_IDLE_WAIT_S)
            else:
                self._cache.wait(_pass(request), _IDLE_WAIT_S)

    def _match(self, request: Request) -> None:
        """Asks the cache for the longest stored prefix. The answer may take longer than the engine wants to wait."""
        if request.cache_pass is not None:
            return  # Preempted before: it is counted, and what it computed is saved. It computes everything again.
        if request.receiving is not None:
            request.asking = True
            return
        request.cache_pass = self._cache.match(request.tokens, traffic_class=request.traffic_class, salt=request.salt)
        request.asking = True

    def _load(self, request: Request) -> None:
        """Loads what the cache has found, once it has answered, into the request's pages."""
        found = _pass(request)
        if request.load is not None:
            self._go_on(request, request.load)
            return
        if not self._cache.poll(found):
            return
        if found.hit_tokens and self._device is not None:
            request.load = self._device.start(self._cache, found, request.table)
            return
        request.asking = False
        if not found.hit_tokens:
            return

        def scatter(first_block: int, payloads: Sequence[memoryview]) -> None:
            self._mover.scatter(request.table, first_block, payloads)

        def restore(blocks: int, payload: memoryview) -> None:
            self._mover.restore(request.table, blocks, payload)

        # Fewer tokens than promised, or none, is not an error: the rest is computed, over what a failed load left.
        self._loaded(request, self._cache.load(found, scatter, restore))

    def _go_on(self, request: Request, load: DeviceLoad) -> None:
        """Lets a request be computed whose load is under way, before it is known whether that is good."""
        if load.can_start:
            request.asking = False
            request.num_computed = request.num_done = _pass(request).hit_tokens
            if load.ended:
                self._load_is_good(request)

    def _load_is_good(self, request: Request) -> bool:
        """False when less was loaded than the request computes behind: it goes on from what there is."""
        if request.load is None or self._device is None:
            return True
        load, request.load = request.load, None
        self._loaded(request, self._device.result(load))
        return request.hit_tokens == _pass(request).hit_tokens

    def _loaded(self, request: Request, loaded: int) -> None:
        hit = _pass(request).hit_tokens
        if loaded % BLOCK_TOKENS or not 0 <= loaded <= hit < len(request.tokens):
            raise AssertionError(f"the cache loaded {loaded} of {hit} tokens of a prompt of {len(request.tokens)}")
        self._resume(request, loaded)

    def _resume(self, request: Request, loaded: int) -> None:
        """Notes that the first `loaded` tokens came out of the cache, and where to begin to compute."""
        request.hit_tokens = request.num_computed = request.num_done = loaded
        request.offered_blocks = loaded // BLOCK_TOKENS
        if self._stored_window:
            request.seen_from = max(0, loaded - self._stored_window)
        if loaded and self._replayed_window:
            start = replay_start(self._model.config, self._replayed_window, loaded, request.full_from, self._replay)
            request.num_computed = request.num_done = request.seen_from = start
            request.frozen_until, request.replayed_tokens = loaded, loaded - start

    def _receive(self, request: Request, receiving: Receiving) -> None:
        """Takes what the other engine has stored so far. Goes on when that is all, or when it takes too long."""
        if self._receiver is None:
            raise AssertionError(f"request {request.request_id!r} waits for a prompt without a cache to take it from")
        if not self._receiver.advance(request, receiving):
            return
        request.receiving, request.asking = None, False
        request.cache_pass = self._cache.begin(
            request.tokens, traffic_class=request.traffic_class, salt=request.salt, counted=False
        )
        if receiving.handed is None:
            self._resume(request, min(receiving.loaded, (request.input_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS))
            return
        request.num_computed = request.num_done = request.input_tokens
        request.hit_tokens, request.handed_over = request.input_tokens, True
        request.offered_blocks = request.input_tokens // BLOCK_TOKENS
        if self._replayed_window:
            request.seen_from = max(0, request.input_tokens - self._replayed_window)
        token = receiving.handed.first_token
        request.append(token, time.perf_counter())
        self._cache.extend(request.cache_pass, [token])
        self._outbox.append(request.output())
        if request.finish_reason is not None:
            self._end(request)

    def _save(self, request: Request) -> None:
        """Offers the blocks that the last step completed, those of the answer like those of the prompt.

        Once more at the end, for blocks that the save queue had no room for before.
        """
        done = min(request.num_done, len(request.tokens) - 1)  # What a stop token follows is nobody's.
        blocks = done // BLOCK_TOKENS
        if blocks <= request.offered_blocks and request.finish_reason is None:
            return

        def gather(first_block: int, payloads: Sequence[memoryview]) -> None:
            if self._device is not None and isinstance(payloads, DevicePayloads):
                self._device.stage(request.table, first_block, payloads)
            else:
                self._mover.gather(request.table, first_block, payloads)

        self._cache.save(_pass(request), done, gather)
        request.offered_blocks = max(request.offered_blocks, blocks)

    def _save_checkpoints(self, request: Request, before: int) -> None:
        """Offers the windows behind the blocks that the last step completed; the cache says which of them are due."""

        def gather(blocks: int, payload: memoryview) -> None:
            self._mover.gather_checkpoint(request.table, blocks, payload)

        done = min(request.num_done, len(request.tokens) - 1)
        if done // BLOCK_TOKENS > before // BLOCK_TOKENS:
            self._cache.save_checkpoints(_pass(request), before, done, gather)

    def _end(self, request: Request) -> None:
        """Frees what a finished or aborted request holds, here and in the cache."""
        request.finished_at = request.finished_at or time.perf_counter()
        del self._requests[request.request_id]
        self._scheduler.remove(request)
        if request.receiving is not None and self._receiver is not None:
            self._receiver.stop(request.receiving)
        if request.cache_pass is not None:
            self._cache.finish(request.cache_pass)


def _pass(request: Request) -> Pass:
    """The pass of a request that has been admitted."""
    if request.cache_pass is None:
        raise AssertionError(f"request {request.request_id!r} runs without having asked the cache")
    return request.cache_pass
