"""Replacement policies: the order in which keys leave."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from cachesvc.policy import FIFO, LRU, S3FIFO, Policy


def simulate(policy: Policy[int], references: Sequence[int], capacity: int) -> list[bool]:
    """Hits of a cache of that many keys."""
    held: set[int] = set()
    hits = []
    for key in references:
        hits.append(key in held)
        if key in held:
            policy.touch(key)
            continue
        while len(held) >= capacity:
            victim = next(iter(policy.victims()))
            policy.remove(victim)
            held.remove(victim)
        policy.insert(key)
        held.add(key)
        assert len(policy) == len(held)
    return hits


REFERENCES = st.lists(st.integers(0, 12), max_size=120)


@given(REFERENCES, st.integers(1, 8))
def test_lru_keeps_the_most_recent_keys(references: list[int], capacity: int) -> None:
    hits = simulate(LRU(), references, capacity)
    for position, key in enumerate(references):
        earlier = [i for i in range(position) if references[i] == key]
        distinct = len(set(references[earlier[-1] + 1 : position])) if earlier else capacity
        assert hits[position] == (distinct < capacity)


@given(REFERENCES, st.integers(1, 8))
def test_s3fifo_keeps_its_books(references: list[int], capacity: int) -> None:
    policy: S3FIFO[int] = S3FIFO()
    simulate(policy, references, capacity)
    assert len(set(policy.victims())) == len(policy)


@given(REFERENCES, st.integers(1, 8))
def test_fifo_keeps_the_last_to_come(references: list[int], capacity: int) -> None:
    hits = simulate(FIFO(), references, capacity)
    came: list[int] = []
    for key, hit in zip(references, hits, strict=True):
        assert hit == (key in came[-capacity:])
        if not hit:
            came.append(key)


@given(REFERENCES, st.integers(0, 15), st.sampled_from([LRU, FIFO, S3FIFO]))
def test_evict_is_one_victim_after_the_other(references: list[int], count: int, kind: type[Policy[int]]) -> None:
    one, other = kind(), kind()
    for policy in (one, other):
        policy.insert_all(dict.fromkeys(references))
        policy.touch_all(references)
    expected = []
    while len(other) and len(expected) < count:
        expected.append(next(iter(other.victims())))
        other.remove(expected[-1])
    assert one.evict(count) == expected
    assert list(one.victims()) == list(other.victims())


def test_s3fifo_lets_a_scan_pass_by_the_hot_keys() -> None:
    hot = [0, 1, 2, 3] * 3
    scan = list(range(100, 200))
    references = [*hot, *scan, 0, 1, 2, 3]
    assert sum(simulate(S3FIFO(), references, 10)[-4:]) == 4
    assert sum(simulate(LRU(), references, 10)[-4:]) == 0


@given(st.lists(st.sampled_from("itrv"), max_size=60), st.lists(st.integers(0, 5), min_size=60, max_size=60))
def test_any_use_of_a_policy_is_survived(calls: list[str], keys: list[int]) -> None:
    for policy in (LRU[int](), FIFO[int](), S3FIFO[int]()):
        known: set[int] = set()
        for call, key in zip(calls, keys, strict=False):
            if call == "i":
                policy.insert(key)
                known.add(key)
            elif call == "t":
                policy.touch(key)
            elif call == "r":
                policy.remove(key)
                known.discard(key)
            assert set(policy.victims()) == known
