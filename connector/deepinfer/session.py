"""The cache of one engine: requests that are tracked, and the two halves of the work, `Admission` and `Saving`."""

from __future__ import annotations

import logging
from typing import Any, Final

from deepinfer.worker.cache_engine import KVSTORE_GRAIN

from cachesvc.connector.deepinfer.admission import Admission, Limits
from cachesvc.connector.deepinfer.identity import hints_of, namespace_of
from cachesvc.connector.deepinfer.pages import PagedBlocks, Unsupported, payload_bytes_of
from cachesvc.connector.deepinfer.requests import Ledger, Phase, Tracked, has_ended
from cachesvc.connector.deepinfer.saving import Saving
from cachesvc.connector.deepinfer.settings import Settings
from cachesvc.connector.split import SplitPrefixCache
from cachesvc.keys import BLOCK_TOKENS, Namespace, PrefixHasher

logger = logging.getLogger("cachesvc.connector")

MAX_TRACKED: Final = 65_536
"""Requests that are tracked; past it one is neither looked up nor saved."""


def open_session(engine: Any, settings: Settings) -> Session | None:
    """None, and one line in the log, where this engine's KV cannot be stored."""
    try:
        return Session(engine, settings)
    except Unsupported as reason:
        logger.warning("this engine runs without cachesvc, which does not know how to store %s", reason)
    except Exception:  # another DeepInfer than this was written for
        logger.exception("this engine runs without cachesvc, which does not understand it")
    return None


class Session:
    """All calls come from the thread that steps the engine."""

    def __init__(self, engine: Any, settings: Settings) -> None:
        from deepinfer._C.engine import Sequence

        if not hasattr(Sequence, "block_table"):
            raise Unsupported(
                "sequences that do not say which blocks they have: DeepInfer 0.1.0 needs one more line in "
                "csrc/engine/pybind_sequence.cpp, see docs/deepinfer.md"
            )
        if engine.parallel_config.context_parallel_size > 1:
            raise Unsupported("context parallelism")
        cache_engine, cache_config = engine.driver_worker.cache_engine, engine.cache_config
        if KVSTORE_GRAIN != BLOCK_TOKENS:
            raise Unsupported(f"state of {KVSTORE_GRAIN} tokens; it knows {BLOCK_TOKENS}")
        layout = cache_engine.kvcache_layout
        payload_bytes = payload_bytes_of(layout, cache_config.bytes_per_block, cache_config.block_size)
        self._scheduler = engine.scheduler
        self.namespace: Namespace = namespace_of(engine.model_config, layout, payload_bytes, settings)
        self.cache = SplitPrefixCache(
            self.namespace,
            payload_bytes,
            address=settings.address,
            traffic_class=settings.traffic_class,
            options=settings.options,
        )
        pages = PagedBlocks(cache_engine.gpu_blocks, payload_bytes)
        window = max(0, engine.model_metadata.window_size)
        replay = -(-window // BLOCK_TOKENS) * BLOCK_TOKENS if settings.replay_tokens < 0 else settings.replay_tokens
        self.saving = Saving(
            self.cache,
            pages,
            engine.block_manager,
            max(1, int(settings.pinned_share * cache_config.num_gpu_blocks)),
            save_decoded=settings.save_decoded,
        )
        self.admission = Admission(
            self.cache,
            pages,
            engine.scheduler,
            engine.block_manager,
            Limits(engine.scheduler_config, cache_config),
            settings,
            replay,
            on_ended=self._forget,
        )
        self._vocabulary: int = engine.model_config.get_vocab_size()
        self._replay_tokens = replay
        self._options = settings.options
        self._tracked: dict[int, Tracked] = {}
        """By identity of the sequence, which lives as long as it is in here."""
        self._preempted = engine.scheduler.get_num_preempted_seqs()
        if engine.multi_modal_processor is not None:
            engine.multi_modal_processor.scheduler = _Gate(engine.scheduler, self.admission)
        self.cache.ready(settings.options.match_deadline_s)  # so that an engine that has just started hits at once
        logger.info(
            "cachesvc: namespace %s of %s, %d bytes per block of %d tokens, the last %d tokens of a hit are replayed",
            self.namespace.digest.hex()[:16],
            self.namespace.model,
            payload_bytes,
            BLOCK_TOKENS,
            replay,
        )

    def admit(self, seq: Any, extra: Any) -> None:
        """`extra`: what the request says beside its tokens."""
        if has_ended(seq) or len(self._tracked) >= MAX_TRACKED:
            return
        tokens = seq.data.get_token_ids()
        try:
            hints = hints_of(extra)
        except ValueError as error:
            logger.warning("request %s is not cached: %s", seq.request_id, error)
            return
        if max(tokens) >= self._vocabulary:
            return  # images: their tokens do not say what is in them
        t = Tracked(seq, store=not hints.no_store, traffic_class=hints.traffic_class, salt=hints.salt)
        self._tracked[id(seq)] = t
        self.admission.admit(t, tokens)

    def scheduled(self, outputs: Any) -> None:
        """A step has been scheduled: whose prompts it computes, and who was preempted for it."""
        if outputs.prompt_run:
            for seq in outputs.scheduled_seqs:
                self.admission.scheduled(seq)
            return
        preempted = self._scheduler.get_num_preempted_seqs()
        if preempted == self._preempted:
            return
        self._preempted = preempted
        waiting = {id(seq) for seq in self._scheduler.waiting}
        for t in list(self._tracked.values()):
            if t.phase is not Phase.RUNNING or t.seq.block_table:
                continue
            if has_ended(t.seq):
                self._forget(t)
            elif id(t.seq) in waiting:
                self.saving.end(t)
                t.seq.state_id = -1  # its state was freed with its blocks
                self.admission.admit(t, t.seq.data.get_token_ids())

    def computed(self, seq: Any, tokens: int, *, last: bool = False) -> None:
        """The first `tokens` of a sequence are in its blocks."""
        t = self._tracked.get(id(seq)) or self._adopt(seq)
        if t is not None:
            self.saving.offer(t, tokens, last=last)

    def ended(self, seq: Any) -> None:
        t = self._tracked.get(id(seq))
        if t is not None:
            self._forget(t)

    def metrics_line(self) -> str:
        s = self.cache.stats
        rate = 100 * s.loaded_tokens / s.input_tokens if s.input_tokens else 0.0
        rate = 100 * s.loaded_tokens / s.input_tokens if s.input_tokens else 0.0
        missed = s.dropped_blocks + s.refused_blocks + s.failed_blocks + self.saving.skipped_blocks
        return (
            f"cachesvc: {'attached' if s.attached else 'no daemon'}, loaded {rate:.1f} % of {s.input_tokens} "
            f"input tokens ({s.load_bytes_per_second / 1e9:.2f} GB/s, {s.failed_loads} loads failed), stored "
            f"{s.stored_blocks} blocks, not stored {missed}, pinned {self.saving.pinned_blocks}, declined "
            f"{self.admission.declined}, given back {self.admission.given_back}"
        )

    def abandon(self) -> None:
        """After an error of our own: nobody waits for the cache any more."""
        self.admission.give_up(2 * self._options.load_deadline_s)
        self.close()

    def close(self) -> None:
        """Stores what is queued, within `close_deadline_s`."""
        self.admission.close(self._options.load_deadline_s)
        self.saving.close(self._options.close_deadline_s)
        self.cache.close()

    def _adopt(self, seq: Any) -> Tracked | None:
        """A sequence that came another way than `add_request`: a fork, which has its parent's salt; else nobody knows
        whose it is, and it is not stored."""
        parent = next((t for t in self._tracked.values() if t.seq.request_id == seq.request_id), None)
        if len(self._tracked) >= MAX_TRACKED:
            return None
        t = Tracked(seq, store=parent is not None and parent.store, phase=Phase.RUNNING)
        self._tracked[id(seq)] = t
        if parent is None or not t.store:
            return t
        t.salt, t.traffic_class = parent.salt, parent.traffic_class
        p = self.cache.begin_keys([], seq.get_prompt_len(), pass_id=None, traffic_class=t.traffic_class)
        t.ledger = Ledger(p, PrefixHasher(self.namespace, salt=t.salt))
        if seq.cached_hit_tokens:  # what was replayed behind a hit is not exactly what was computed before
            t.seen_blocks = (seq.cached_hit_tokens + self._replay_tokens) // BLOCK_TOKENS
        return t

    def _forget(self, t: Tracked) -> None:
        self._tracked.pop(id(t.seq), None)
        self.saving.end(t)


class _Gate:
    """What DeepInfer's image processor tells the scheduler: a request may wait for both of us."""

    def __init__(self, scheduler: Any, admission: Admission) -> None:
        self._scheduler = scheduler
        self._admission = admission

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def set_schedulable(self, request_id: str) -> None:
        self._admission.release_engine_hold(request_id)
