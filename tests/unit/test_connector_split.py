"""Two sides of one engine: one has the tokens and asks, the other has the pages and moves them by the same keys."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from connector_fakes import NAMESPACE, PAYLOAD_BYTES, QUICK, Engine, FakeDaemon, eventually

from cachesvc.connector.memory import FailedKeys, RecentKeys
from cachesvc.connector.passes import KeyedPass
from cachesvc.connector.split import SplitPrefixCache
from cachesvc.keys import BLOCK_TOKENS
from cachesvc.rpc import cache_pb2 as pb

Sides = tuple[SplitPrefixCache, SplitPrefixCache]
PROMPT = list(range(4 * BLOCK_TOKENS + 9))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path)
    yield fake
    fake.stop()


@pytest.fixture
def sides(daemon: FakeDaemon) -> Iterator[Sides]:
    made = [SplitPrefixCache(NAMESPACE, PAYLOAD_BYTES, address=daemon.address, options=QUICK) for _ in range(2)]
    assert all(cache.ready(10) for cache in made)
    yield made[0], made[1]
    for cache in made:
        cache.close()


def store(asks: SplitPrefixCache, has: SplitPrefixCache, daemon: FakeDaemon) -> None:
    p = asks.match(PROMPT)
    assert (p.stored_blocks, p.hit_tokens) == (0, 0)
    keyed = has.begin_keys(p.keys[:3], len(PROMPT), pass_id=p.id)
    has.learn(keyed.keys, p.stored_blocks)
    engine = Engine(PROMPT)
    assert has.take_stored() == []
    assert has.save(keyed, len(PROMPT), engine.gather) == 3
    has.extend_keys(keyed, p.keys[3:])
    assert has.save(keyed, len(PROMPT), engine.gather) == 1
    assert engine.gathered == [0, 1, 2, 3]
    has.finish(keyed)
    asks.finish(p)
    assert has.flush(10) and len(daemon.blocks) == 4
    assert (has.take_stored(), has.take_stored()) == (p.keys, [])
    assert has.stats.lookups == 0  # a pass that only saves is nobody's look-up


def test_of_several_workers_one_carries_the_id_and_is_counted(sides: Sides, daemon: FakeDaemon) -> None:
    p = sides[0].match(PROMPT)
    first, second = (sides[1].begin_keys(p.keys, len(PROMPT), pass_id=one) for one in (p.id, None))
    assert (first.id, first.counted) == (p.id, True)
    assert second.id not in (p.id, b"") and not second.counted
    for one in (first, second):
        sides[1].finish(one)
    sides[0].finish(p)


def load(asks: SplitPrefixCache, has: SplitPrefixCache) -> tuple[KeyedPass, Engine]:
    p = asks.match(PROMPT)
    keyed = has.begin_keys(p.keys, len(PROMPT), pass_id=p.id, local_tokens=BLOCK_TOKENS)
    has.look_up(keyed)
    assert has.wait(keyed, 5.0)
    engine = Engine(PROMPT)
    has.load(keyed, engine.scatter)
    has.finish(keyed)
    asks.finish(p)
    return keyed, engine


def test_one_side_asks_and_the_other_loads(sides: Sides, daemon: FakeDaemon) -> None:
    store(*sides, daemon)
    keyed, engine = load(*sides)
    assert keyed.loaded_tokens == 4 * BLOCK_TOKENS and sorted(engine.loaded) == [1, 2, 3]
    eventually(lambda: not daemon.read_leases)


def test_a_block_that_one_side_could_not_load_is_not_offered_by_the_other(sides: Sides, daemon: FakeDaemon) -> None:
    store(*sides, daemon)
    p = sides[0].match(PROMPT)
    assert (p.hit_tokens, p.stored_blocks) == (4 * BLOCK_TOKENS, 4)
    sides[0].distrust(p.keys[2])
    sides[0].finish(p)
    again = sides[0].match(PROMPT)
    assert (again.hit_tokens, again.stored_blocks) == (2 * BLOCK_TOKENS, 4)
    sides[0].finish(again)


def test_a_declined_hit_gives_its_lease_back_and_can_still_save(sides: Sides, daemon: FakeDaemon) -> None:
    store(*sides, daemon)
    p = sides[0].match(PROMPT)
    sides[0].decline(p)
    eventually(lambda: daemon.released[-1:] == [(0, pb.BYPASSED)] and not daemon.read_leases)
    assert sides[0].load(p, Engine(PROMPT).scatter) == 0
    sides[0].extend(p, range(BLOCK_TOKENS))
    assert sides[0].save(p, len(PROMPT) + BLOCK_TOKENS, Engine([*PROMPT, *range(BLOCK_TOKENS)]).gather) == 1
    sides[0].finish(p)


def test_a_hit_that_waits_keeps_its_lease_and_counts_once(sides: Sides, daemon: FakeDaemon) -> None:
    store(*sides, daemon)
    asks = sides[0]
    p = asks.match(PROMPT)
    matches = daemon.requests["Match"]
    asked, counted = len(matches), asks.stats
    asks.keep(p)
    assert not p.pending and len(matches) == asked  # its lease is young
    assert p.lease is not None
    old = p.lease
    p.lease = replace(old, match=replace(old.match, ends=time.monotonic() + QUICK.read_lease_s / 2 - 1))
    asks.keep(p)
    assert p.pending and asks.wait(p, 5.0)
    assert p.hit_tokens == 4 * BLOCK_TOKENS and p.lease is not None and p.lease is not old
    assert len(matches) == asked + 1 and matches[-1].pass_id == matches[-2].pass_id == p.id
    assert (asks.stats.lookups, asks.stats.hits) == (counted.lookups, counted.hits)
    daemon.stop()
    p.lease = replace(p.lease, match=replace(old.match, ends=time.monotonic()))
    asks.keep(p)
    assert asks.wait(p, 5.0) and p.hit_tokens == 0
    asks.finish(p)


def test_a_keyed_pass_takes_no_tokens_and_without_a_daemon_it_is_a_miss(daemon: FakeDaemon) -> None:
    cache = SplitPrefixCache(NAMESPACE, PAYLOAD_BYTES, address="unix:/nowhere", options=QUICK)
    p = cache.begin_keys([bytes(16)], 200, pass_id=bytes(16))
    with pytest.raises(TypeError):
        cache.extend(p, [1])
    cache.look_up(p)
    assert cache.wait(p, 1.0) and (p.hit_tokens, p.reason) == (0, "unreachable")
    cache.finish(p)
    cache.close()
    late = cache.begin_keys([bytes(16)], 200, pass_id=bytes(16))
    cache.look_up(late)
    assert cache.wait(late, 1.0) and late.hit_tokens == 0
    assert not cache.attached


def test_keys_are_remembered_for_a_while_and_the_oldest_forgotten_first() -> None:
    now = [0.0]
    keys = [bytes([number]) * 16 for number in range(4)]
    recent = RecentKeys(2, 10.0, lambda: now[0])
    for key in keys[:3]:
        recent.add(key)
    assert [key in recent for key in keys] == [False, True, True, False]
    now[0] = 9.0
    recent.add(keys[1])
    recent.discard([keys[2]])
    now[0] = 11.0
    assert [key in recent for key in keys] == [False, True, False, False]
    failed = FailedKeys(4, 10.0, lambda: now[0])
    failed.add(keys[2])
    assert failed.good_prefix(keys) == 2
    now[0] = 22.0
    assert failed.good_prefix(keys) == 4 and keys[2] not in failed
