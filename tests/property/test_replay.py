"""Simulations beside plain ones that are obviously right, and the one-pass curve beside LRU at every capacity."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_files import paths

from cachesvc.errors import TraceError
from cachesvc.policy import LRU, Policy
from cachesvc.trace.curve import Curve
from cachesvc.trace.formats import Request
from cachesvc.trace.replay import ALL, replay, rows, simulations
from cachesvc.trace.simulate import POLICIES, TTL

REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=40).map(paths)
BLOCK = 128


def plainly(requests: list[Request], policy: Policy[int] | None, capacity: int, ttl: TTL | None) -> int:
    """Hit blocks, block by block."""
    since: dict[int, float] = {}
    lives: dict[int, float] = {}
    hits = 0
    for request in requests:
        for key in [key for key in since if request.at - since[key] > lives[key]]:
            del since[key]
            if policy is not None:
                policy.remove(key)
        hits += len(list(takewhile(since.__contains__, request.keys)))
        own = ttl.of(request.traffic_class) if ttl else float("inf")
        for key in reversed(request.keys):
            if key in since:
                if policy is not None:
                    policy.touch(key)
                if ttl is None or ttl.sliding:
                    since[key], lives[key] = request.at, max(lives[key], own)
                continue
            while policy is not None and len(since) >= capacity:
                victim = next(iter(policy.victims()))
                policy.remove(victim)
                del since[victim]
            if policy is not None:
                policy.insert(key)
            since[key], lives[key] = request.at, own
    return hits


@given(
    REQUESTS,
    st.sampled_from([*POLICIES, "infinite"]),
    st.integers(1, 30),
    st.sampled_from([None, {"agent": 2.0, "chat": 5.0}, {"agent": 4.0, "chat": 4.0}, {"agent": 9.0, "chat": 1.0}]),
    st.booleans(),
)
def test_a_simulation_does_what_a_plain_one_does(
    requests: list[Request], policy: str, capacity: int, ttls: dict[str, float] | None, sliding: bool
) -> None:
    ttl = None if ttls is None else TTL("", ttls, sliding=sliding)
    (simulation,) = simulations([policy], [capacity], [ttl], BLOCK)
    replay(requests, [simulation])
    found = {row.traffic_class: row for row in rows(simulation, sampled=False)}
    expected = plainly(requests, POLICIES[policy]() if policy in POLICIES else None, capacity, ttl)
    assert found[ALL].hit_tokens == expected * BLOCK
    for row in found.values():
        assert row.hit_tokens + sum(row.miss_tokens.values()) == row.input_tokens
    never_seen = len({key for request in requests for key in request.keys}) * BLOCK
    assert found[ALL].miss_tokens["never_seen"] == never_seen


def test_a_block_that_leaves_for_one_of_its_own_request_forgets_the_longer_ttl_of_another_class() -> None:
    requests = paths([(0, 1), (0, 0), *[(0, 0)] * 5, (0, 2), (0, 0), (0, 1)])
    ttl = TTL("", {"agent": 9.0, "chat": 1.0})
    (simulation,) = simulations(["lru"], [1], [ttl], BLOCK)
    replay(requests, [simulation])
    (found,) = (row for row in rows(simulation, sampled=False) if row.traffic_class == ALL)
    assert found.hit_tokens == plainly(requests, LRU(), 1, ttl) * BLOCK


@given(REQUESTS)
def test_the_curve_is_lru_at_every_capacity(requests: list[Request]) -> None:
    curve = Curve()
    replay(requests, [curve])
    distinct = len({key for request in requests for key in request.keys})
    assert curve.distinct_blocks == distinct
    for capacity in range(1, distinct + 3):
        assert curve.hits(capacity).blocks == plainly(requests, LRU(), capacity, None)


def test_the_curve_outlives_its_table_of_requests() -> None:
    """More requests than the table first has slots, with old ones still on the stack."""
    requests = paths([(number * 7 if number % 3 else 0, 4) for number in range(9_000)])
    curve = Curve()
    replay(requests, [curve])
    for capacity in (1, 10, 1_000, 20_000):
        assert curve.hits(capacity).blocks == plainly(requests, LRU(), capacity, None)


def test_ids_that_are_not_chained_have_no_curve() -> None:
    for second in ([9, 1], [1]):
        requests = [Request(0.0, "chat", 256, [1, 2]), Request(1.0, "chat", 256, second)]
        if second == [1]:
            requests.append(Request(2.0, "chat", 256, [5, 2]))
        with pytest.raises(TraceError, match="not chained"):
            replay(requests, [Curve()])
