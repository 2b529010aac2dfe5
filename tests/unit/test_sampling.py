"""Sampled replays: hot blocks are exact, the rest is estimated with an error that it keeps to."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cachesvc.trace.curve import Curve
from cachesvc.trace.formats import Request
from cachesvc.trace.replay import replay, rows, simulations
from cachesvc.trace.sampling import EXACT, TAGS, Sampler, estimate
from cachesvc.trace.simulate import TTL

HEAD = 40
SCALE = 20


def traffic(count: int) -> list[Request]:
    """One system prompt of `HEAD` blocks before all, then users who come back with longer and longer prompts."""
    draw = random.Random(1)
    users: list[list[int]] = [[] for _ in range(300)]
    fresh = HEAD
    requests = []
    for number in range(count):
        user = users[int(300 * draw.random() ** 3)]
        added = draw.randrange(1, 12)
        if len(user) > 120:
            user.clear()
        user.extend(range(fresh, fresh + added))
        fresh += added
        keys = [*range(HEAD), *user]
        requests.append(Request(float(number), "chat", 128 * len(keys) + 5, keys))
    return requests


def test_hot_blocks_become_exact_and_stay_so() -> None:
    *_, last = Sampler(SCALE).sample(traffic(3_000))
    assert [key >> 5 for key in last.keys if key & TAGS == EXACT] == list(range(HEAD))
    assert last.written == last.keys and last.blocks > HEAD


def test_the_first_block_of_every_prompt_is_exact_from_the_start() -> None:
    (first,) = Sampler(1 << 60).sample([Request(0.0, "chat", 384, [7, 8, 9])])
    assert first.keys == [7 << 5 | EXACT]


@pytest.mark.parametrize("policy", ["lru", "fifo", pytest.param("s3fifo", marks=pytest.mark.long), "infinite"])
@pytest.mark.parametrize("ttl", [None, TTL("", plain=400.0), TTL("", plain=400.0, sliding=False)])
def test_the_estimate_is_as_near_as_it_says(policy: str, ttl: TTL | None) -> None:
    requests = traffic(6_000)
    (exact,), (sampled,) = (simulations([policy], [3_000], [ttl], 128) for _ in range(2))
    replay(requests, [exact])
    replay(requests, [sampled], SCALE)
    true, guess = (rows(cache, sampled=cache is sampled)[-1] for cache in (exact, sampled))
    assert true.error_tokens == 0 < guess.error_tokens < 0.08 * guess.input_tokens
    assert abs(true.hit_tokens - guess.hit_tokens) <= 1.5 * guess.error_tokens
    assert guess.input_tokens == true.input_tokens == guess.hit_tokens + sum(guess.miss_tokens.values())
    assert guess.miss_tokens["partial_tail"] == true.miss_tokens["partial_tail"] == 5 * 6_000


def test_the_sampled_curve_is_sampled_lru() -> None:
    requests, curve = traffic(4_000), Curve()
    caches = simulations(["lru"], [1_000, 2_500, 5_000], [None], 128)
    replay(requests, [*caches, curve], SCALE)
    for cache in caches:
        assert cache.capacity is not None
        row, point = rows(cache, sampled=True)[-1], curve.hits(cache.capacity)
        assert point.blocks * 128 == pytest.approx(row.hit_tokens, rel=0.01)


def test_without_a_sample_there_is_no_knowledge() -> None:
    nothing: Counter[int] = Counter()
    assert estimate(nothing, nothing, 100) == (0, 100)
    assert estimate(Counter({EXACT: 3}), Counter({EXACT: 5}), 5) == (3, 0)
