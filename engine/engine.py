"""The engine: requests in, tokens out, with prefixes taken from a cache and given to it.

What an engine has to do to use `cachesvc` is all in `_match`, `_load`, `_save` and `_end`, and one `extend`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final

import torch

from cachesvc.connector.base import BasePrefixCache
from cachesvc.connector.device import DeviceLoads, DevicePayloads, DeviceStaging, Event
from cachesvc.connector.passes import Pass
from cachesvc.engine.errors import RequestError
from cachesvc.engine.kv import PagePool, PageTable
from cachesvc.engine.models.llama import LlamaModel
from cachesvc.engine.request import Request, RequestOutput, SamplingParams
from cachesvc.engine.runner import Runner
from cachesvc.engine.scheduler import Chunk, Scheduler
from cachesvc.kernels import kernels_for
from cachesvc.keys import BLOCK_TOKENS

_IDLE_WAIT_S: Final = 0.05
"""How long an idle step waits for the cache before it returns to the caller."""

_CLOSE_S: Final = 5.0
"""How long closing waits for loads under way."""


@dataclass(frozen=True)
class EngineConfig:
    """Sizes. The pool holds ``num_pages * page_size`` tokens of all running requests together."""

    num_pages: int = 512
    page_size: int = 16
    max_batch_tokens: int = 512
    """Tokens computed in one step; a longer prompt takes several."""
    max_running: int = 16


class Engine:
    """Generates tokens for many requests at once. One thread; the caller drives it with `step` or `generate`.

    The engine keeps no prefix of its own: all reuse comes from `cache`. Several engines can share one model.
    """

    def __init__(
        self,
        model: LlamaModel,
        cache: BasePrefixCache,
        config: EngineConfig | None = None,
        *,
        staging: DeviceStaging | None = None,
    ) -> None:
        """`staging`: that of `cache`, for a model on a device; without it KV passes through memory of the host."""
        config = config or EngineConfig()
        self._model = model
        self._cache = cache
        self._pool = PagePool(
            model.config,
            num_pages=config.num_pages,
            page_size=config.page_size,
            dtype=model.dtype,
            device=model.device,
        )
        self._kernels = kernels_for(model.device)
        self._transfers = staging.transfers(self._pool.as_paged()) if staging else None
        self._loads = DeviceLoads(self._transfers) if self._transfers else None
        self._pages_free: Event | None = None
        self._scheduler = Scheduler(
            self._pool,
            max_running=config.max_running,
            max_batch_tokens=config.max_batch_tokens,
            before_release=self._drop_load,
        )
        self._runner = Runner(model, self._pool)
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
    ) -> str:
        """Queues a prompt and returns its id. The time to the first token counts from here.

        `salt` keeps a tenant's blocks apart from those of others. Raises `RequestError` for a prompt that is empty,
        holds a token outside of the vocabulary, or does not fit into the context or the pool with `max_new_tokens`.
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
        if request_id is None:
            request_id, self._next_id = f"request-{self._next_id}", self._next_id + 1
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use")
        stop = params.stop_token_ids
        request = Request(
            request_id=request_id,
            tokens=list(tokens),
            params=params,
            stop_token_ids=self._model.config.eos_token_ids if stop is None else stop,
            table=PageTable(self._pool),
            traffic_class=traffic_class,
            salt=salt,
        )
        self._scheduler.add(request)
        self._requests[request_id] = request
        return request_id

    def step(self) -> list[RequestOutput]:
        """Runs one batch. Returns the state of every request that got a token in it."""
        self._scheduler.make_room()
        chunks = []
        if self._transfers is not None:
            # Who has lost pages so far uses them no more once this has come.
            self._pages_free = self._transfers.device.current().record()
            self._poll()
            chunks = self._scheduler.plan()
        if not chunks:  # else those that come next ask the cache while the device computes
            self._admit()
            chunks = self._scheduler.plan()
        if not chunks:
            # Everyone waits for the cache, which answers or gives up within its own deadline.
            for request in self._scheduler.asking[:1]:
                if request.load is not None:
                    request.load.wait_start(_IDLE_WAIT_S)
                else:
                    self._cache.wait(_pass(request), _IDLE_WAIT_S)
            return []
        if self._transfers is None:
            sampled = self._runner.run(chunks)
        else:
            sampled = self._runner.run(chunks, partial(self._wait_layer, chunks), self._admit)
        # What was computed behind a load that has failed is void: it is computed again.
        chunks = [chunk for chunk in chunks if self._load_is_good(chunk.request)]
        now = time.perf_counter()
        for chunk in chunks:
            chunk.request.num_computed = chunk.stop
            if chunk.request.request_id in sampled:
                token = sampled[chunk.request.request_id]
                chunk.request.append(token, now)
                self._cache.extend(_pass(chunk.request), [token])
        # Saving comes after the tokens are known, so that it delays nobody's first one.
        outputs = []
        for chunk in chunks:
            self._save(chunk.request)
            if chunk.request.finish_reason is not None:
                self._end(chunk.request)
            if chunk.request.request_id in sampled:
                outputs.append(chunk.request.output())
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
        request.finish_reason = "abort"
        self._end(request)
        return request.output()

    def close(self) -> None:
        """Aborts everything that is not finished. The cache belongs to the caller and stays open."""
        for request_id in list(self._requests):
            self.abort(request_id)
        if self._loads is not None:
            self._loads.close(_CLOSE_S)

    def _admit(self) -> None:
        for request in self._scheduler.admit():
            self._match(request)
        self._poll()

    def _poll(self) -> None:
        for request in self._scheduler.asking:
            self._load(request)

    def _match(self, request: Request) -> None:
        """Asks the cache for the longest stored prefix. The answer may take longer than the engine wants to wait."""
        if request.cache_pass is not None:
            return  # Preempted before: it is counted, and what it computed is saved. It computes everything again.
        request.cache_pass = self._cache.match(request.tokens, traffic_class=request.traffic_class, salt=request.salt)
        request.asking = True

    def _load(self, request: Request) -> None:
        """Loads what the cache has found, once it has answered, into the request's pages."""
        found = _pass(request)
        if request.load is not None or not self._cache.poll(found):
            self._go_on(request)
            return
        if found.hit_tokens and self._loads is not None:
            blocks = found.hit_tokens // BLOCK_TOKENS
            assert self._pages_free is not None, "a load outside of a step"
            tables = partial(_tables, request)
            request.load = self._loads.start(self._cache, found, tables, hit_blocks=blocks, after=self._pages_free)
            return
        request.asking = False
        if not found.hit_tokens:
            return

        def scatter(first_block: int, payloads: Sequence[memoryview]) -> None:
            self._kernels.scatter(payloads, self._pool.kv, self._block_slots(request, first_block, len(payloads)))

        # Fewer tokens than promised, or none, is not an error: the rest is computed, over what a failed load left.
        self._loaded(request, self._cache.load(found, scatter))

    def _go_on(self, request: Request) -> None:
        """Lets a request be computed whose load is under way, before it is known whether that is good."""
        if request.load is not None and request.load.can_start:
            request.asking = False
            request.num_computed = _pass(request).hit_tokens
            if request.load.ended:
                self._load_is_good(request)

    def _wait_layer(self, chunks: Sequence[Chunk], layer: int) -> None:
        for chunk in chunks:
            if chunk.request.load is not None and self._transfers is not None:
                chunk.request.load.wait_layer(self._transfers.device.current(), layer)

    def _load_is_good(self, request: Request) -> bool:
        """False when less was loaded than the request computes behind: it goes on from what there is."""
        if request.load is None or self._transfers is None:
            return True
        load, request.load = request.load, None
        self._loaded(request, load.result(self._transfers.device.current()))
        return request.hit_tokens == _pass(request).hit_tokens

    def _drop_load(self, request: Request) -> None:
        """Before a request loses its pages while they are being loaded. Its lease is used up: it computes all."""
        if request.load is not None and self._transfers is not None:
            request.load.abandon(self._transfers.device.current())
            request.load, request.asking = None, False

    def _loaded(self, request: Request, loaded: int) -> None:
        hit = _pass(request).hit_tokens
        if loaded % BLOCK_TOKENS or not 0 <= loaded <= hit < len(request.tokens):
            raise AssertionError(f"the cache loaded {loaded} of {hit} tokens of a prompt of {len(request.tokens)}")
        request.hit_tokens = request.num_computed = loaded
        request.offered_blocks = loaded // BLOCK_TOKENS

    def _save(self, request: Request) -> None:
        """Offers the blocks that the last step completed, those of the answer like those of the prompt.

        Once more at the end, for blocks that the save queue had no room for before.
        """
        blocks = request.num_computed // BLOCK_TOKENS
        if blocks <= request.offered_blocks and request.finish_reason is None:
            return

        def gather(first_block: int, payloads: Sequence[memoryview]) -> None:
            if self._transfers is not None and isinstance(payloads, DevicePayloads):
                payloads.filled(self._transfers.stage(_tables(request, first_block, len(payloads)), payloads.blocks))
                return
            self._kernels.gather(self._pool.kv, self._block_slots(request, first_block, len(payloads)), payloads)

        self._cache.save(_pass(request), request.num_computed, gather)
        request.offered_blocks = max(request.offered_blocks, blocks)

    def _end(self, request: Request) -> None:
        """Frees what a finished or aborted request holds, here and in the cache."""
        request.finished_at = time.perf_counter()
        del self._requests[request.request_id]
        self._scheduler.remove(request)
        if request.cache_pass is not None:
            self._cache.finish(request.cache_pass)

    def _block_slots(self, request: Request, first_block: int, count: int) -> torch.Tensor:
        return request.table.slots(first_block * BLOCK_TOKENS, (first_block + count) * BLOCK_TOKENS)


def _tables(request: Request, first_block: int, count: int) -> list[list[int]]:
    """Pages of blocks, for the one group of the pool."""
    return [request.table.units(first_block, count)]


def _pass(request: Request) -> Pass:
    """The pass of a request that has been admitted."""
    if request.cache_pass is None:
        raise AssertionError(f"request {request.request_id!r} runs without having asked the cache")
    return request.cache_pass
