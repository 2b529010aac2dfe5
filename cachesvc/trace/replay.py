"""A grid of simulations over one stream of requests, and what came out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

from cachesvc.trace.curve import Curve
from cachesvc.trace.formats import Request
from cachesvc.trace.sampling import Estimate, Sampled, Sampler, estimate
from cachesvc.trace.simulate import HIT, INFINITE, NEVER_SEEN, PARTIAL_TAIL, REASONS, TTL, Counts, Simulation

ALL: Final = "all"
_CURVE_POINTS: Final = 64


def simulations(
    policies: Sequence[str], capacities: Sequence[int], ttls: Sequence[TTL | None], block: int
) -> list[Simulation]:
    """Every policy with every capacity (blocks) and TTL; an infinite cache only with every TTL."""
    return [
        Simulation(policy, capacity, ttl, block)
        for policy in policies
        for capacity in ([None] if policy == INFINITE else capacities)
        for ttl in ttls
    ]


def replay(requests: Iterable[Request], caches: Sequence[Simulation | Curve], scale: int = 1) -> None:
    """Asks all `caches` all requests; one block of `scale` where that is more than 1. Raises `TraceError`."""
    stream: Iterable[Request | Sampled] = requests if scale == 1 else Sampler(scale).sample(requests)
    asks = [cache.ask for cache in caches]
    if len(asks) == 1:
        (ask,) = asks
        for request in stream:
            ask(request)
        return
    for request in stream:
        for ask in asks:
            ask(request)


@dataclass(frozen=True)
class Row:
    """One class, or all, in one simulation; in tokens. Local tokens, hits and misses sum to the input."""

    traffic_class: str
    requests: int
    input_tokens: int
    local_tokens: int
    """Held by the engine itself; always 0 when sampled."""
    hit_tokens: int
    miss_tokens: dict[str, int]
    error_tokens: float
    """How far `hit_tokens` may be off for being sampled (twice the standard error); 0 if it is exact."""

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def hit_rate_error(self) -> float:
        return self.error_tokens / self.input_tokens if self.input_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "class": self.traffic_class,
            "requests": self.requests,
            "input_tokens": self.input_tokens,
            "local_tokens": self.local_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate": self.hit_rate,
            "hit_rate_error": self.hit_rate_error,
            "miss_tokens_by_reason": self.miss_tokens,
        }


def rows(simulation: Simulation, *, sampled: bool) -> list[Row]:
    """One row a class, and one for all."""
    block = simulation.block
    by_class = dict(sorted(simulation.counts.items()))
    return [_row(name, counts, block, sampled) for name, counts in [*by_class.items(), (ALL, _sum(by_class.values()))]]


def _sum(counts: Iterable[Counts]) -> Counts:
    return reduce(
        lambda one, other: Counts(
            one.requests + other.requests,
            one.input_tokens + other.input_tokens,
            one.blocks + other.blocks,
            one.hits + other.hits,
            {reason: one.misses[reason] + other.misses[reason] for reason in one.misses},
            one.local + other.local,
        ),
        counts,
        Counts(),
    )


def _row(name: str, counts: Counts, block: int, sampled: bool) -> Row:
    kinds = {HIT: counts.hits, **counts.misses}
    if sampled:
        references = sum(kinds.values(), Counter())
        found = {kind: estimate(of, references, counts.blocks) for kind, of in kinds.items()}
    else:
        found = {kind: Estimate(of[0], 0.0) for kind, of in kinds.items()}
    tokens = {kind: round(of.blocks) * block for kind, of in found.items()}
    tokens[PARTIAL_TAIL] = counts.input_tokens - counts.blocks * block
    # What rounding left over; nothing without sampling.
    tokens[NEVER_SEEN] += counts.input_tokens - sum(tokens.values())
    own = {kind: part - counts.local[kind] for kind, part in tokens.items()}
    return Row(
        name,
        counts.requests,
        counts.input_tokens,
        counts.local.total(),
        own[HIT],
        {reason: own[reason] for reason in REASONS},
        found[HIT].error * block,
    )


@dataclass(frozen=True)
class Point:
    """LRU at one capacity (blocks)."""

    capacity: int
    hit_tokens: int
    hit_rate: float
    hit_rate_error: float

    def to_json(self, block_bytes: float | None) -> dict[str, Any]:
        size = {} if block_bytes is None else {"capacity_bytes": round(self.capacity * block_bytes)}
        return {"capacity_blocks": self.capacity, **size} | {
            "hit_tokens": self.hit_tokens,
            "hit_rate": self.hit_rate,
            "hit_rate_error": self.hit_rate_error,
        }


def points(curve: Curve, block: int, capacities: Iterable[int]) -> list[Point]:
    """The curve at some capacities."""
    found = []
    for capacity in capacities:
        hits = curve.hits(capacity)
        total = curve.input_tokens or 1
        tokens = round(hits.blocks) * block
        found.append(Point(capacity, tokens, tokens / total, hits.error * block / total))
    return found


def spread_capacities(curve: Curve) -> list[int]:
    """Capacities that show the whole curve, evenly on a logarithmic axis."""
    most = max(1, curve.distinct_blocks)
    return sorted({round(most ** (i / (_CURVE_POINTS - 1))) for i in range(_CURVE_POINTS)})
