"""A request: what the caller asks for, what the engine keeps about it, what comes back."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from cachesvc.connector.device import DeviceLoad
from cachesvc.connector.passes import Pass
from cachesvc.engine.errors import RequestError
from cachesvc.engine.kv import PageTable

if TYPE_CHECKING:
    from cachesvc.engine.receiving import Receiving

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. `temperature` 0 is greedy; then the seed and the cuts have no effect.

    The same seed gives the same tokens, whatever the request is batched with. `stop_token_ids` None means the end-of-
    sequence tokens of the model; `()` means none. Raises `RequestError` for a value that makes no sense.
    """

    temperature: float = 0.0
    top_k: int = 0
    """Keep only the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens whose probabilities reach p."""
    seed: int = 0
    max_new_tokens: int = 16
    stop_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}; it must be 0 (keep all) or a positive number")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {self.max_new_tokens}; ask for at least 1 token")


@dataclass(frozen=True)
class RequestOutput:
    """State of a request after a step. `tokens` are all tokens generated so far, a stop token included."""

    request_id: str
    tokens: tuple[int, ...]
    finished: bool
    finish_reason: FinishReason | None
    input_tokens: int
    hit_tokens: int
    """Tokens whose KV came out of the cache (loaded, not only promised)."""
    replayed_tokens: int
    """Of these, tokens computed again because their windows are not stored."""
    ttft_s: float | None
    """Seconds from `add_request` to the first token; None before it."""
    total_s: float
    """Seconds from `add_request` to the end, or until now."""
    preemptions: int
    handed_over: bool
    """Whether another engine has computed the prompt."""


@dataclass(eq=False)
class Request:
    """One request inside the engine. `tokens` is the prompt followed by what was generated."""

    request_id: str
    tokens: list[int]
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    table: PageTable
    traffic_class: str | None = None
    salt: bytes = b""
    arrived_at: float = field(default_factory=time.perf_counter)

    full_from: int | None = None
    """First token that goes through all layers, if the model's prefill can stop half-way."""

    publish_as: str | None = None
    """Hand the computed prompt to another engine under this name (`cachesvc.engine.handoff`)."""
    receiving: Receiving | None = None
    """Another engine computes the prompt: what to wait for."""
    handed_over: bool = False

    num_computed: int = 0
    """Leading tokens whose KV is in the pool, or will be by the end of the steps that are under way."""
    num_done: int = 0
    """Leading tokens whose KV is in the pool now."""
    pending: int = 0
    """Tokens that steps under way will sample: behind `tokens`, and not known yet."""
    seen_from: int = 0
    """First token whose window KV exists: more than 0 after a replay."""
    frozen_until: int = 0
    """Tokens below it were loaded; where they are computed again, their stored KV is not written."""
    cache_pass: Pass | None = None
    """Kept over a preemption, so that nothing is saved or counted twice."""
    asking: bool = False
    """Whether the cache's answer is still to come: until then the request is not scheduled."""
    load: DeviceLoad | None = None
    """A load onto a device, of which it is not yet known whether it is good."""
    offered_blocks: int = 0
    """Leading blocks that came from the cache or were offered to it."""
    hit_tokens: int = 0
    replayed_tokens: int = 0
    preemptions: int = 0
    first_token_at: float | None = None
    finished_at: float | None = None
    finish_reason: FinishReason | None = None
    input_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.input_tokens = len(self.tokens)

    @property
    def generated(self) -> Sequence[int]:
        return self.tokens[self.input_tokens :]

    @property
    def num_known(self) -> int:
        """Tokens that exist, those under way included."""
        return len(self.tokens) + self.pending

    @property
    def wants_more(self) -> bool:
        """Whether another token is to be computed behind those under way. A stop token may still end it."""
        return self.finish_reason is None and self.num_known - self.input_tokens < self.params.max_new_tokens

    def restart(self) -> None:
        """Forgets all computed KV: the pages are gone."""
        self.num_computed = self.num_done = self.seen_from = self.frozen_until = 0
        if self.receiving is not None:
            self.receiving.loaded, self.receiving.handed = 0, None

    def append(self, token: int, now: float) -> None:
        """Adds a sampled token and notes whether it ends the request."""
        self.tokens.append(token)
        if self.first_token_at is None:
            self.first_token_at = now
        if token in self.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) - self.input_tokens >= self.params.max_new_tokens:
            self.finish_reason = "length"

    def output(self) -> RequestOutput:
        """What the caller may know now."""
        end = time.perf_counter() if self.finished_at is None else self.finished_at
        return RequestOutput(
            request_id=self.request_id,
            tokens=tuple(self.generated),
            finished=self.finish_reason is not None,
            finish_reason=self.finish_reason,
            input_tokens=self.input_tokens,
            hit_tokens=self.hit_tokens,
            replayed_tokens=self.replayed_tokens,
            ttft_s=None if self.first_token_at is None else self.first_token_at - self.arrived_at,
            total_s=end - self.arrived_at,
            preemptions=self.preemptions,
            handed_over=self.handed_over,
        )
