"""A worker's side: loads into and saves from vLLM's KV tensors, as the scheduler's side has decided.

Loads run in threads of their own, since the pages that they fill belong to a request that vLLM does not run meanwhile.
Saves are copied into the save queue at the end of the step that completed them, and travel in the background: vLLM may
free or overwrite pages whenever it likes, and no request is kept waiting by a slow daemon.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from cachesvc.connector.passes import KeyedPass
from cachesvc.connector.split import SplitPrefixCache
from cachesvc.connector.vllm.geometry import Geometry, PagedKV, Unsupported
from cachesvc.connector.vllm.metadata import LoadJob, LoadResult, Pages, SaveJob, Setup, StepMetadata, WorkerReport
from cachesvc.connector.vllm.settings import Settings
from cachesvc.connector.workers import Workers
from cachesvc.keys import Namespace

logger = logging.getLogger("cachesvc.connector")

MAX_LOADS: Final = 4096
"""Loads that wait for a thread; past it a load fails at once, and is computed."""

IDLE_WAIT_S: Final = 0.005
"""How long a step that computes nothing waits for a load to end, instead of spinning."""

MEASURED_TOKENS: Final = 64
"""A step that computes fewer says nothing about the rate of prefill."""


@dataclass
class Request:
    """What a worker has of one request. `pages`: of blocks still to be saved, by index."""

    p: KeyedPass
    pass_id: bytes
    """Of the scheduler's side."""
    pages: dict[int, Pages] = field(default_factory=dict)


class WorkerSide:
    """vLLM calls it from one thread."""

    def __init__(self, geometry: Geometry, settings: Settings, rank: int, *, events: bool) -> None:
        """`rank`: tensor-parallel rank + size × pipeline rank. `events`: report what is stored."""
        self._events = events
        self._geometry = geometry
        self._settings = settings
        self._shard = rank // geometry.replicas
        self._saves_here = rank % geometry.replicas == 0
        self._counted_here = rank == 0
        self._kv: PagedKV | None = None
        self._requests: dict[str, Request] = {}
        self._loader = Workers("cachesvc-load", threads=settings.load_threads, limit=MAX_LOADS)
        self._changed = threading.Condition()
        self._done: list[tuple[LoadJob, LoadResult]] = []
        self._under_way = 0
        self._step = StepMetadata()
        self._step_began = 0.0
        self._measured = (0, 0.0)
        self._met = False  # a load has waited for the daemon once
        self._given_up = 0  # blocks that could not be copied
        self._reported_lost = 0
        self._bad_pages: set[int] = set()
        self.cache: SplitPrefixCache | None = None

    def register(self, kv_caches: dict[str, torch.Tensor], num_pages: int) -> None:
        try:
            self._kv = PagedKV(self._geometry, kv_caches, num_pages)
        except Unsupported as reason:
            logger.error("no KV is loaded or saved here: %s", reason)

    def begin_step(self, metadata: StepMetadata) -> None:
        self._step, self._step_began = metadata, time.monotonic()
        if metadata.setup is not None:
            self._attach(metadata.setup)
        for request_id in metadata.ended:
            self._end(request_id)

    def start_loads(self) -> None:
        for job in self._step.loads:
            request = self._request(job.request_id, job.pass_id, job)
            with self._changed:
                self._under_way += 1
            if request is None or not self._loader.submit(partial(self._load, job, request.p)):
                self._note(job, job.local_tokens, 0.0)

    def end_step(self) -> None:
        """After the forward pass."""
        if self._step.tokens >= MEASURED_TOKENS:
            self._measured = (self._step.tokens, time.monotonic() - self._step_began)
        for job in self._step.saves:
            self._take(job)
        for request_id, pass_id in self._step.scheduled.items():
            request = self._requests.get(request_id)
            if request is not None and request.pass_id == pass_id and request.pages:
                self._save(request)
        if not self._step.tokens:
            with self._changed:
                if self._under_way:
                    self._changed.wait_for(lambda: bool(self._done), IDLE_WAIT_S)

    def results(self) -> tuple[set[str], set[str], WorkerReport | None]:
        """Requests whose load has ended, those among them that failed as a whole, and a report for the scheduler."""
        with self._changed:
            done, self._done = self._done, []
        ended, failed = {job.request_id for job, _ in done}, set[str]()
        for job, result in done:
            if result.loaded_tokens >= job.end_tokens:
                continue
            if self._geometry.several_groups:
                failed.add(job.request_id)
            else:
                self._bad_pages |= self._pages_behind(job, result.loaded_tokens)
        stored = self.cache.take_stored() if self._events and self.cache is not None else []
        report = WorkerReport([result for _, result in done], *self._measured, self._newly_lost(), stored)
        self._measured = (0, 0.0)
        return ended, failed, report if report != WorkerReport() else None

    def take_bad_pages(self) -> set[int]:
        """Page ids whose load has failed. With one KV group only: elsewhere the ids say too little."""
        bad, self._bad_pages = self._bad_pages, set()
        return bad

    def close(self) -> None:
        """Stores what is queued, within `close_deadline_s`."""
        self._loader.close(self._settings.options.load_deadline_s)
        if self.cache is not None:
            self.cache.close()

    def _attach(self, setup: Setup) -> None:
        for request_id in list(self._requests):
            self._end(request_id)
        if self.cache is not None:
            self.cache.close()
            self._given_up = self._reported_lost = 0
            self.cache = None
        if self._kv is None:
            return
        if setup.payload_bytes != self._geometry.payload_bytes:
            logger.error(
                "no KV is loaded or saved here: a block has %d bytes, but %d as the scheduler sees it",
                self._geometry.payload_bytes,
                setup.payload_bytes,
            )
            return
        self.cache = SplitPrefixCache(
            Namespace(**json.loads(setup.namespace_json)),
            self._geometry.payload_bytes,
            address=self._settings.address,
            traffic_class=self._settings.traffic_class,
            options=self._settings.options,
            shard=self._shard,
        )

    def _request(self, request_id: str, pass_id: bytes, job: LoadJob | SaveJob) -> Request | None:
        """The request with this pass; another pass of it has ended."""
        known = self._requests.get(request_id)
        if known is not None and known.pass_id == pass_id:
            return known
        self._end(request_id)
        if self.cache is None:
            return None
        p = self.cache.begin_keys(
            job.keys,
            job.prompt_tokens,
            pass_id=pass_id if self._counted_here else None,
            tenant=job.tenant,
            traffic_class=job.traffic_class,
            local_tokens=job.local_tokens if isinstance(job, LoadJob) else 0,
        )
        self._requests[request_id] = Request(p, pass_id)
        return self._requests[request_id]

    def _end(self, request_id: str) -> None:
        """Also a load under way: it stops, and is reported as ended."""
        request = self._requests.pop(request_id, None)
        if request is not None and self.cache is not None:
            self.cache.finish(request.p)

    # In threads of the loader

    def _load(self, job: LoadJob, p: KeyedPass) -> None:
        started, loaded = time.monotonic(), 0
        try:
            assert self.cache is not None, "a load without a cache"
            if not self._met:  # the first one may come while this worker is still being attached
                self.cache.ready(self._settings.options.match_deadline_s)
                self._met, started = True, time.monotonic()
            self.cache.look_up(p)
            self.cache.wait(p, self._settings.options.match_deadline_s)
            loaded = self.cache.load(p, partial(self._scatter, job))
        except Exception:  # vLLM waits for the end of this load, whatever happens to it
            logger.exception("a load failed")
        self._note(job, max(job.local_tokens, min(loaded, job.end_tokens)), time.monotonic() - started)

    def _scatter(self, job: LoadJob, first_block: int, payloads: Sequence[memoryview]) -> None:
        assert self._kv is not None, "a load without pages"
        size = self._geometry.block_tokens
        base = job.local_tokens // size
        start, end = first_block - base, first_block - base + len(payloads)
        pages = tuple(
            ids[start * part.pages : end * part.pages]
            for part, ids in zip(self._geometry.parts, job.pages, strict=True)
        )
        self._kv.scatter(payloads, pages, max(0, job.local_tokens - first_block * size))

    def _note(self, job: LoadJob, loaded_tokens: int, seconds: float) -> None:
        size = (loaded_tokens - job.local_tokens) * self._geometry.payload_bytes // self._geometry.block_tokens
        result = LoadResult(job.request_id, loaded_tokens, size, seconds)
        with self._changed:
            self._under_way -= 1
            self._done.append((job, result))
            self._changed.notify_all()

    # In vLLM's thread

    def _take(self, job: SaveJob) -> None:
        """Notes a save job; `_save` follows in the same step."""
        if not self._saves_here or self.cache is None:
            return
        known = self._requests.get(job.request_id)
        told = len(known.p.keys) if known is not None and known.pass_id == job.pass_id else 0
        if told != job.first_block:  # a key must never be taken for that of another block
            logger.error("blocks from %d on are not saved, for those from %d on are not known", job.first_block, told)
            return
        request = self._request(job.request_id, job.pass_id, job)
        assert request is not None, "there is a cache"
        if told:
            self.cache.extend_keys(request.p, job.keys)
        elif job.stored_blocks is not None:
            self.cache.learn(request.p.keys, job.stored_blocks)
        keys = request.p.keys
        stored = [keys[block] for block in range(len(keys) - len(job.keys), len(keys)) if block not in job.pages]
        self.cache.learn(stored, len(stored))
        request.pages.update(job.pages)
        request.p.next_save = min(request.p.next_save, min(job.pages))

    def _save(self, request: Request) -> None:
        """Offers what is to be saved; the rest is offered again with the next step of the request."""
        assert self.cache is not None
        p = request.p
        p.next_save = max(p.next_save, min(request.pages))
        try:
            self.cache.save(p, (max(request.pages) + 1) * self._geometry.block_tokens, partial(self._gather, request))
        except Exception:  # what cannot be saved must not end the engine
            logger.exception("blocks are not saved")
            self._given_up += len(request.pages)
            request.pages.clear()
        for block in [block for block in request.pages if block < p.next_save]:
            del request.pages[block]

    def _gather(self, request: Request, first_block: int, payloads: Sequence[memoryview]) -> None:
        assert self._kv is not None, "a save without pages"
        blocks = [request.pages[block] for block in range(first_block, first_block + len(payloads))]
        pages = tuple([page for block in blocks for page in block[index]] for index in range(len(self._geometry.parts)))
        self._kv.gather(payloads, pages)

    def _pages_behind(self, job: LoadJob, loaded_tokens: int) -> set[int]:
        bad: set[int] = set()
        start = job.local_tokens // self._geometry.block_tokens * self._geometry.block_tokens
        for part, ids in zip(self._geometry.parts, job.pages, strict=True):
            bad.update(ids[(loaded_tokens - start) // part.page_tokens : (job.end_tokens - start) // part.page_tokens])
        return bad

    def _newly_lost(self) -> int:
        if self.cache is None:
            return 0
        stats = self.cache.stats
        lost = stats.dropped_blocks + stats.refused_blocks + stats.failed_blocks + stats.unsaved_blocks + self._given_up
        new, self._reported_lost = lost - self._reported_lost, lost
        return new
