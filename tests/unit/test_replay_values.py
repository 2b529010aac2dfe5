"""Hit tokens of two real traces, as others computed them: exact to the token."""

from __future__ import annotations

from functools import cache
from itertools import takewhile

import pytest
from trace_files import real

from cachesvc.policy import LRU
from cachesvc.trace.curve import Curve
from cachesvc.trace.formats import Request, merged, open_trace
from cachesvc.trace.replay import replay, rows, simulations
from cachesvc.trace.simulate import TTL

pytestmark = pytest.mark.long

CONVERSATION = "conversation_trace.jsonl", 512, 144_793_823
AGENT = "agent_sample.jsonl", 128, 565_515_277


@cache
def requests(name: str, block: int) -> list[Request]:
    return list(merged([open_trace(real(name))], block, 60.0))


def hit_tokens(trace: tuple[str, int, int], policy: str, capacity: int | None, ttl: TTL | None) -> int:
    name, block, total = trace
    (simulation,) = simulations([policy], [capacity or 0], [ttl], block)
    replay(requests(name, block), [simulation])
    row = rows(simulation, sampled=False)[-1]
    assert row.input_tokens == total == row.hit_tokens + sum(row.miss_tokens.values())
    return row.hit_tokens


@pytest.mark.parametrize(
    ("trace", "policy", "capacity", "expected"),
    [
        (CONVERSATION, "infinite", None, 54_063_104),
        (CONVERSATION, "lru", 1_000, 6_650_880),
        (CONVERSATION, "lru", 10_000, 31_746_560),
        (CONVERSATION, "lru", 50_000, 52_594_688),
        (CONVERSATION, "fifo", 10_000, 27_674_624),
        (CONVERSATION, "s3fifo", 10_000, 29_504_512),
        (AGENT, "infinite", None, 545_039_232),
        (AGENT, "lru", 5_000, 237_397_120),
        (AGENT, "lru", 20_000, 520_888_576),
        (AGENT, "fifo", 20_000, 497_570_176),
        ((AGENT[0], 64, AGENT[2]), "lru", 40_000, 520_991_552),
        ((AGENT[0], 256, AGENT[2]), "lru", 8_000, 504_844_288),
    ],
)
def test_capacities(trace: tuple[str, int, int], policy: str, capacity: int | None, expected: int) -> None:
    assert hit_tokens(trace, policy, capacity, None) == expected


@pytest.mark.parametrize(
    ("trace", "ttl", "sliding", "expected"),
    [
        (CONVERSATION, 60.0, True, 15_242_240),
        (CONVERSATION, 600.0, True, 50_661_888),
        (CONVERSATION, 300.0, False, 36_647_936),
        (AGENT, 300.0, True, 519_800_576),
        (AGENT, 3_600.0, True, 543_480_960),
    ],
)
def test_ttls(trace: tuple[str, int, int], ttl: float, sliding: bool, expected: int) -> None:
    assert hit_tokens(trace, "infinite", None, TTL("", plain=ttl, sliding=sliding)) == expected


@pytest.mark.parametrize(
    ("trace", "policy", "capacity", "ttl", "sliding", "expected"),
    [
        (CONVERSATION, "lru", 3_000, 200.0, False, 9_917_952),
        (CONVERSATION, "fifo", 10_000, 120.0, False, 24_099_840),
        ((CONVERSATION[0], 1024, CONVERSATION[2]), "lru", 5_000, 300.0, False, 25_144_320),
        (CONVERSATION, "s3fifo", 20_000, 200.0, False, 30_965_760),
    ],
)
def test_capacities_with_ttls(
    trace: tuple[str, int, int], policy: str, capacity: int, ttl: float, sliding: bool, expected: int
) -> None:
    assert hit_tokens(trace, policy, capacity, TTL("", plain=ttl, sliding=sliding)) == expected


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        (CONVERSATION, {1_000: 6_650_880, 10_000: 31_746_560, 50_000: 52_594_688, 10**9: 54_063_104}),
        (AGENT, {5_000: 237_397_120, 20_000: 520_888_576, 10**9: 545_039_232}),
    ],
)
def test_the_curve_in_one_pass(trace: tuple[str, int, int], expected: dict[int, int]) -> None:
    name, block, total = trace
    curve = Curve()
    replay(requests(name, block), [curve])
    assert curve.input_tokens == total
    assert {capacity: curve.hits(capacity).blocks * block for capacity in expected} == expected


def test_touching_the_head_first_would_cost_hits() -> None:
    """The naive order, which we do not use: a full cache loses heads before their tails."""
    lru: LRU[int] = LRU()
    held: set[int] = set()
    hits = 0
    for request in requests(*AGENT[:2]):
        hits += len(list(takewhile(held.__contains__, request.keys)))
        held.update(request.keys)
        for key in request.keys:
            lru.insert(key)
        held.difference_update(lru.evict(len(lru) - 20_000))
    assert hits * 128 == 516_435_072


@pytest.mark.parametrize(("trace", "scale"), [(CONVERSATION, 20), (AGENT, 20)])
def test_a_sample_is_as_near_as_it_says(trace: tuple[str, int, int], scale: int) -> None:
    name, block, _ = trace
    capacities = [5_000, 10_000, 20_000, 50_000]
    sampled, exact, curve = simulations(["lru"], capacities, [None], block), Curve(), Curve()
    replay(requests(name, block), [*sampled, curve], scale)
    replay(requests(name, block), [exact])
    for simulation, capacity in zip(sampled, capacities, strict=True):
        row = rows(simulation, sampled=True)[-1]
        assert row.input_tokens == row.hit_tokens + sum(row.miss_tokens.values())
        assert abs(row.hit_tokens - exact.hits(capacity).blocks * block) <= row.error_tokens
        assert 0 < row.hit_rate_error < 0.03
        assert abs(curve.hits(capacity).blocks * block - row.hit_tokens) < 0.002 * row.input_tokens
