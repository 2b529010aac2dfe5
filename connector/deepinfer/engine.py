"""`CachedLLMEngine`: the hooks of DeepInfer's engine, each handed to where its work is done. No policy here.

Written for DeepInfer 0.1.0. Everything runs on the thread that steps the engine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final, Self, TypeVar

import numpy as np
from deepinfer.engine.llm_engine import LLMEngine
from deepinfer.sequence import Sequence

from cachesvc.connector.deepinfer.session import Session, open_session
from cachesvc.connector.deepinfer.settings import Settings, parse_settings
from cachesvc.connector.stats import CacheStats

logger = logging.getLogger("cachesvc.connector")

IDLE_WAIT_S: Final = 0.005
"""How long a step waits for the cache when every request does."""

Hook = TypeVar("Hook", bound=Callable[..., Any])


def _harmless(hook: Hook) -> Hook:
    """What goes wrong in here ends the cache, and not the engine."""

    @functools.wraps(hook)
    def guarded(self: CachedLLMEngine, *args: Any, **kwargs: Any) -> Any:
        if self._session is None:
            return None
        try:
            return hook(self, *args, **kwargs)
        except Exception:
            logger.exception("this engine goes on without cachesvc")
            session, self._session = self._session, None
            session.abandon()
            return None

    return guarded  # type: ignore[return-value]


class CachedLLMEngine(LLMEngine):
    """Where a model's KV cannot be stored, it says so once and the engine runs as without it.

    Raises `ValueError` for options that make no sense: that is found out before the model is loaded.
    """

    cachesvc_settings: ClassVar[Settings | None] = None
    _session: Session | None = None

    @classmethod
    def configured(cls, cachesvc: Mapping[str, Any] | None) -> type[Self]:
        """This class with options, for an entry point that takes a class. Raises `ValueError`."""
        return type(cls.__name__, (cls,), {"cachesvc_settings": parse_settings(cachesvc)})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = self.cachesvc_settings or parse_settings(None)
        super().__init__(*args, **kwargs)
        self._session = open_session(self, settings)

    @property
    def cache_stats(self) -> CacheStats | None:
        """Numbers of the cache; None without it."""
        return self._session.cache.stats if self._session is not None else None

    def flush_cache(self, timeout_s: float) -> bool:
        """Waits until what was computed is stored, or given up. False when that took longer."""
        return self._session is None or self._session.saving.flush(timeout_s)

    def close(self) -> None:
        if not self.closed and self._session is not None:
            session, self._session = self._session, None
            session.close()
        super().close()

    # Requests

    def add_request(
        self,
        /,
        user_id: str,
        request_id: str,
        sampling_params: Any,
        prompt_token_ids: np.ndarray[Any, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Sequence | None:
        extra = args[2] if len(args) > 2 else kwargs.get("extra")
        seq = super().add_request(user_id, request_id, sampling_params, prompt_token_ids, *args, **kwargs)
        enqueued = args[3] if len(args) > 3 else kwargs.get("enqueue", True)
        if seq is not None and enqueued:
            self._admit(seq, extra)
        return seq

    def abort_request(self, request_id: str | Iterable[str]) -> tuple[int, int]:
        aborted: tuple[int, int] = super().abort_request(request_id)
        self._advance()
        return aborted

    @_harmless
    def _admit(self, seq: Sequence, extra: Any) -> None:
        assert self._session is not None
        self._session.admit(seq, extra)

    @_harmless
    def _advance(self) -> None:
        assert self._session is not None
        self._session.admission.advance()

    @_harmless
    def _idle(self) -> None:
        assert self._session is not None
        self._session.admission.idle(IDLE_WAIT_S)

    def step(self) -> np.ndarray[Any, Any]:
        self._advance()
        self._idle()
        outputs: np.ndarray[Any, Any] = super().step()
        return outputs

    # DeepInfer's hooks

    @_harmless
    def post_schedule(self, scheduler_outputs: Any) -> None:
        assert self._session is not None
        self._session.scheduled(scheduler_outputs)

    @_harmless
    def pe_do_save_kvcache(self, scheduled: list[Sequence], finished: list[Sequence]) -> None:
        """The step that computed these prompts, or parts of them, has ended on the device."""
        assert self._session is not None
        for seq in scheduled:
            self._session.computed(seq, seq.get_len() - seq.chunked_rest_len)

    @_harmless
    def do_save_kvcache(self, scheduled: list[Sequence], finished: list[Sequence]) -> None:
        """A step of decoding. What earlier steps have computed has ended on the device, and is committed."""
        assert self._session is not None
        for seq in scheduled:
            self._session.computed(seq, seq.num_cached_tokens)
        for seq in finished:
            self._session.computed(seq, seq.num_cached_tokens, last=True)

    def finalize_seq(self, seq: Sequence) -> None:
        """Frees the request's blocks; those that are still to be copied are pinned."""
        super().finalize_seq(seq)
        self._ended(seq)

    @_harmless
    def _ended(self, seq: Sequence) -> None:
        assert self._session is not None
        self._session.ended(seq)

    def build_extra_metrics_log(self) -> str | None:
        return self._session.metrics_line() if self._session is not None else None
