"""The scheduler's side: which prefixes are stored, what is to be loaded into which pages, and what is to be saved.

=========================  ======================================================================================
a request                  what happens here
=========================  ======================================================================================
is about to be scheduled   `match`: the look-up begins; "ask later" while it is pending; a hit is offered once
has its pages              `allocated`: a load job, if vLLM took the offer
is computed                `step`: a save job for the blocks that are full after this step
has failed to load         `heard`: its block is distrusted; nothing is offered to the request again
was preempted              `match` again: another pass, over the answer so far too
is finished                `finished`: the pass ends; what was hit goes into the response
=========================  ======================================================================================

Nothing waits here beyond `match_budget_s` in all per step, and nothing is copied.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace
from typing import Any, Final

from cachesvc.connector.memory import RecentKeys
from cachesvc.connector.passes import Pass
from cachesvc.connector.rates import Prediction
from cachesvc.connector.split import SplitPrefixCache
from cachesvc.connector.vllm import identity
from cachesvc.connector.vllm.events import Events
from cachesvc.connector.vllm.geometry import Geometry
from cachesvc.connector.vllm.metadata import LoadJob, LoadResult, SaveJob, Setup, StepMetadata, WorkerReport
from cachesvc.connector.vllm.settings import Settings
from cachesvc.keys import Namespace
from cachesvc.rpc import cache_pb2 as pb

logger = logging.getLogger("cachesvc.connector")

SAVING_S: Final = 30.0
"""How long a block that a worker was told to save counts as stored, though no match has shown it yet."""

TIER_NAMES: Final[dict[int, str]] = {pb.TIER_DRAM: "dram", pb.TIER_DISK: "disk", pb.TIER_REMOTE: "remote"}


class RequestState:
    """What the connector knows of one request of vLLM's."""

    def __init__(self, request: Any, *, cacheable: bool) -> None:
        hints = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else {}
        named = hints.get("traffic_class")
        self.request = request
        self.cacheable = cacheable
        self.store = cacheable and not hints.get("no_store")
        self.traffic_class: str | None = named if isinstance(named, str) else None
        self.adapter = b""
        self.p: Pass | None = None
        self.life = -1  # how often it had been preempted when the pass began
        self.offered = False  # the hit of this pass; it is not offered again
        self.local_tokens = 0
        self.hit_tokens = 0
        self.tiers: Counter[str] = Counter()
        self.begin_saving(0)

    def begin_saving(self, stored_blocks: int) -> None:
        self.told_blocks = 0  # whose keys the workers have
        self.seen_blocks = stored_blocks  # below: stored, or a worker was told to save it
        self.given_tokens = 0  # to the pass, for their keys


class SchedulerSide:
    """Not thread-safe: vLLM's scheduler calls it from one thread."""

    def __init__(self, namespace: Namespace, geometry: Geometry, settings: Settings, events: Events | None) -> None:
        self._namespace = namespace
        self._geometry = geometry
        self._settings = settings
        self._events = events
        self._requests: dict[str, RequestState] = {}
        self._saving = RecentKeys(settings.options.known_keys, SAVING_S, time.monotonic)
        self.prediction = Prediction()
        self._loads: list[LoadJob] = []
        self._ended: list[str] = []
        self._setup: Setup | None = None
        self._waited_s = 0.0
        self.cache = self._open(namespace)
        self.cache.ready(settings.options.match_deadline_s)  # so that an engine that has just started hits at once

    def _open(self, namespace: Namespace) -> SplitPrefixCache:
        """It only asks, and loads nothing, so it does not map the arena."""
        self._setup = Setup(namespace.canonical_json(), self._geometry.payload_bytes)
        return SplitPrefixCache(
            namespace,
            self._geometry.payload_bytes,
            address=self._settings.address,
            traffic_class=self._settings.traffic_class,
            options=replace(self._settings.options, shared_memory=False, save_queue_bytes=0),
        )

    # What vLLM's scheduler asks

    def match(self, request: Any, local_tokens: int) -> int | None:
        """How many tokens behind the local ones can be loaded; None: ask later."""
        state = self._state_of(request)
        if not state.cacheable or request.skip_reading_prefix_cache:
            return 0
        if state.p is None or state.life != request.num_preemptions:
            self._begin(state, local_tokens)
        p = state.p
        if p is None or state.offered:
            return 0
        self.cache.keep(p)  # it may have been found long ago, and waited for pages since
        if p.pending and not self._poll(p):
            return None
        state.seen_blocks = max(state.seen_blocks, p.stored_blocks)
        hit = p.hit_tokens - p.hit_tokens % self._geometry.align_tokens
        if hit <= local_tokens:
            return 0
        tokens = hit - local_tokens
        size = tokens * self._geometry.payload_bytes // self._geometry.block_tokens  # each rank loads its own shard
        if self._settings.decline_slow_loads and not self.prediction.worth_loading(tokens, size):
            state.offered = True
            self.cache.decline(p)
            return 0
        state.local_tokens = local_tokens
        return tokens

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], external_tokens: int) -> None:
        state = self._requests.get(request.request_id)
        if state is None or state.p is None or state.offered:
            return
        state.offered = True
        if external_tokens <= 0:
            self.cache.decline(state.p)
            return
        end = state.local_tokens + external_tokens
        blocks = -(-end // self._geometry.block_tokens)
        state.hit_tokens = external_tokens
        self._count_tiers(state, state.local_tokens, end)
        self._loads.append(
            LoadJob(
                request_id=request.request_id,
                pass_id=state.p.id,
                tenant=state.p.tenant,
                traffic_class=state.p.traffic_class,
                keys=state.p.keys[:blocks],
                prompt_tokens=state.p.prompt_tokens,
                local_tokens=state.local_tokens,
                end_tokens=end,
                pages=self._geometry.pages_of(block_ids, state.local_tokens // self._geometry.block_tokens, blocks),
            )
        )
        state.told_blocks = blocks

    def step(self, scheduler_output: Any) -> StepMetadata:
        """What the workers are to do in the step that was just scheduled."""
        metadata = StepMetadata(scheduler_output.total_num_scheduled_tokens, self._setup)
        self._setup = None
        metadata.loads, self._loads = self._loads, []
        metadata.ended, self._ended = self._ended, []
        self._waited_s = 0.0
        tables = scheduler_output.kv_connector_block_state
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None or state.p is None or not state.store:
                continue
            try:
                job = self._save_job(state, tokens, tables)
            except Exception:  # what cannot be saved must not end the engine
                logger.exception("a request is not saved")
                state.store, job = False, None
            if job is not None:
                metadata.saves.append(job)
            if state.told_blocks:
                metadata.scheduled[request_id] = state.p.id
        return metadata

    def heard(self, report: WorkerReport) -> None:
        """What workers have done since they last said so."""
        if report.lost_saves:
            self._saving.clear()
        if self._events is not None:
            self._events.stored(report.stored)
        self.prediction.computing.add(report.tokens, report.seconds)
        for result in report.results:
            self._loaded(result)

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Ends the pass. What the response says about this request, for a client that wants to know."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return None
        if state.told_blocks:
            self._ended.append(request.request_id)
        if state.p is None:
            return None
        self.cache.finish(state.p)
        reason = "hit" if state.hit_tokens else "bypassed" if state.p.reason == "hit" else state.p.reason
        return {
            "cachesvc": {
                "prompt_tokens": request.num_prompt_tokens,
                "hit_tokens": state.hit_tokens,
                "source": dict(state.tiers),
                "reason": reason,
            }
        }

    def sources(self, request: Any) -> Counter[str]:
        """Tokens of the hit that is being loaded, by tier."""
        state = self._requests.get(request.request_id)
        return state.tiers if state is not None else Counter()

    def reset(self) -> None:
        """The weights may have changed: from now on nothing of before is hit, and nothing is shared with others."""
        for request_id, state in self._requests.items():
            if state.p is not None:
                self.cache.finish(state.p)
                state.p, state.store, state.cacheable = None, False, False
            if state.told_blocks:
                self._ended.append(request_id)
        self.cache.close()
        self._namespace = identity.private(self._namespace)
        self._saving.clear()
        self.cache = self._open(self._namespace)

    def take_events(self) -> list[Any]:
        return self._events.take() if self._events is not None else []

    def close(self) -> None:
        self.cache.close()

    def _state_of(self, request: Any) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            state = RequestState(request, cacheable=identity.cacheable(request))
            if state.cacheable:
                try:
                    state.adapter = identity.adapter_of(request)
                except (OSError, ValueError) as error:
                    state.cacheable = state.store = False
                    logger.warning("requests with LoRA %s are not cached: %s", request.lora_request.lora_name, error)
            self._requests[request.request_id] = state
        return state

    def _begin(self, state: RequestState, local_tokens: int) -> None:
        request = state.request
        if state.p is not None:
            self.cache.finish(state.p)
        if state.told_blocks:
            self._ended.append(request.request_id)  # the workers' part of the earlier pass
        state.life, state.offered, state.hit_tokens = request.num_preemptions, False, 0
        state.tiers.clear()
        state.begin_saving(0)
        tokens = list(request.all_token_ids)
        if len(tokens) < self._geometry.block_tokens:
            state.p = None
            if len(tokens) + request.max_tokens < self._geometry.block_tokens:
                return  # it will never have a full block
        state.given_tokens = len(tokens)
        state.p = self.cache.begin(
            tokens,
            traffic_class=state.traffic_class,
            salt=identity.salt_of(request),
            adapter=state.adapter,
            extra=identity.extra_of(request, self._geometry.block_tokens),
            local_tokens=local_tokens,
        )

    def _poll(self, p: Pass) -> bool:
        """Waits for an answer within what is left of this step's budget."""
        started = time.monotonic()
        settled = self.cache.wait(p, max(0.0, self._settings.options.match_budget_s - self._waited_s))
        self._waited_s += time.monotonic() - started
        return settled

    def _save_job(self, state: RequestState, scheduled_tokens: int, tables: Any) -> SaveJob | None:
        """The blocks that are full after this step and not yet stored.

        A token counts when it is computed and known: in asynchronous scheduling, or with speculation, one may be
        computed before it is known, or computed in vain. The last one of an answer is known only when the request ends,
        so a block that it would complete is not saved.
        """
        request, p, block_tokens = state.request, state.p, self._geometry.block_tokens
        assert p is not None
        computed = min(request.num_computed_tokens + scheduled_tokens, request.num_tokens)
        if not self._settings.save_decoded:
            computed = min(computed, request.num_prompt_tokens)
        end = computed // block_tokens
        if end <= state.seen_blocks or not self.cache.attached or p.pending:
            return None
        if end * block_tokens > state.given_tokens:
            self.cache.extend(p, request.all_token_ids[state.given_tokens : end * block_tokens])
            state.given_tokens = end * block_tokens
        if not p.hash(wait=False) or len(p.keys) < end:
            return None
        block_ids = tables.get_block_ids(request.request_id)
        pages = {}
        for block in range(state.seen_blocks, end):
            if p.keys[block] in self._saving:
                continue
            mine = self._geometry.pages_of(block_ids, block, block + 1)
            if not self._geometry.complete(mine):
                state.store = False  # behind a window already: what follows would lie behind a hole
                break
            pages[block] = mine
        end = end if state.store else max(pages, default=state.seen_blocks - 1) + 1
        state.seen_blocks = max(state.seen_blocks, end)
        if not pages:
            return None
        for block in pages:
            self._saving.add(p.keys[block])
            if self._events is not None:
                self._events.expect(p.keys, block, request.all_token_ids, request.lora_request)
        first, state.told_blocks = state.told_blocks, max(state.told_blocks, end)
        return SaveJob(
            request_id=request.request_id,
            pass_id=p.id,
            tenant=p.tenant,
            traffic_class=p.traffic_class,
            first_block=first,
            keys=p.keys[first:end],
            prompt_tokens=p.prompt_tokens,
            stored_blocks=p.stored_blocks if first == 0 else None,
            pages=pages,
        )

    def _loaded(self, result: LoadResult) -> None:
        self.prediction.loading.add(result.loaded_bytes, result.seconds)
        state = self._requests.get(result.request_id)
        if state is None or state.p is None:
            return
        end = state.local_tokens + state.hit_tokens
        if result.loaded_tokens >= end:
            return
        block = result.loaded_tokens // self._geometry.block_tokens
        self.cache.distrust(state.p.keys[block])
        self._saving.discard(state.p.keys[block:])
        usable = state.local_tokens if self._geometry.several_groups else result.loaded_tokens
        state.hit_tokens = max(0, usable - state.local_tokens)
        self._count_tiers(state, state.local_tokens, state.local_tokens + state.hit_tokens)
        state.seen_blocks = min(state.seen_blocks, block)

    def _count_tiers(self, state: RequestState, start: int, end: int) -> None:
        assert state.p is not None
        size = self._geometry.block_tokens
        state.tiers.clear()
        for block in range(start // size, -(-end // size)):
            tier = TIER_NAMES.get(state.p.tiers[block], "other") if block < len(state.p.tiers) else "other"
            state.tiers[tier] += min(end, (block + 1) * size) - max(start, block * size)
