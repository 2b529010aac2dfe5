"""The pass of an engine against a daemon that behaves: match, load, save, finish."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from connector_fakes import NAMESPACE, PAYLOAD_BYTES, QUICK, Engine, FakeDaemon, eventually, payload_of, run

from cachesvc.connector.prefix_cache import NullPrefixCache, PrefixCache
from cachesvc.keys import BLOCK_TOKENS, chain_keys
from cachesvc.rpc import cache_pb2 as pb


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path)
    yield fake
    fake.stop()


@pytest.fixture
def cache(daemon: FakeDaemon) -> Iterator[PrefixCache]:
    made = PrefixCache(NAMESPACE, PAYLOAD_BYTES, address=daemon.address, options=QUICK)
    assert made.ready(10)
    yield made
    made.close()


def test_what_was_saved_is_loaded_byte_for_byte(cache: PrefixCache, daemon: FakeDaemon) -> None:
    prompt = list(range(5 * BLOCK_TOKENS + 17))
    cold, _ = run(cache, prompt)
    assert cold.hit_tokens == 0 and cold.reason == "miss"
    assert len(daemon.blocks) == 5
    warm, engine = run(cache, prompt)
    assert warm.hit_tokens == warm.loaded_tokens == 5 * BLOCK_TOKENS
    assert sorted(engine.loaded) == [0, 1, 2, 3, 4] and engine.gathered == []
    eventually(lambda: daemon.released == [(5, pb.MISS_REASON_UNSPECIFIED)])
    assert daemon.read_leases == {} and daemon.write_leases == {}


def test_one_token_is_left_to_compute(cache: PrefixCache, daemon: FakeDaemon) -> None:
    prompt = list(range(3 * BLOCK_TOKENS))
    run(cache, prompt)
    assert len(daemon.blocks) == 3
    warm, _ = run(cache, prompt)
    assert warm.hit_tokens == 2 * BLOCK_TOKENS
    assert run(cache, [*prompt, 7])[0].hit_tokens == 3 * BLOCK_TOKENS


def test_a_prompt_below_one_block_is_accounted_and_saves_nothing(cache: PrefixCache, daemon: FakeDaemon) -> None:
    p, engine = run(cache, range(100))
    assert (p.hit_tokens, engine.gathered) == (0, [])
    assert daemon.requests["Match"][0].input_tokens == 100


def test_decoded_blocks_are_saved_and_found_by_the_next_turn(cache: PrefixCache, daemon: FakeDaemon) -> None:
    engine = Engine(range(BLOCK_TOKENS + 100))
    p = cache.match(engine.tokens)
    assert cache.save(p, len(engine.tokens), engine.gather) == 1
    for token in range(1000, 1000 + 2 * BLOCK_TOKENS):
        engine.tokens.append(token)
        cache.extend(p, [token])
        cache.save(p, len(engine.tokens) - 1, engine.gather)  # the newest token has no KV yet
    cache.finish(p)
    assert cache.flush(10)
    assert engine.gathered == [0, 1, 2]
    assert run(cache, [*engine.tokens, 5, 6])[0].hit_tokens == 3 * BLOCK_TOKENS


def test_the_prompt_is_copied_so_that_the_engine_may_change_its_list(cache: PrefixCache, daemon: FakeDaemon) -> None:
    tokens = list(range(300))
    p = cache.begin(tokens)
    tokens[:] = [9] * 300
    cache.wait(p, 5)
    engine = Engine(range(300))
    cache.save(p, 300, engine.gather)
    assert cache.flush(10)
    assert set(daemon.blocks) == set(chain_keys(NAMESPACE, range(300)))


@pytest.mark.parametrize("kind", [list, tuple, lambda t: array("i", t), lambda t: memoryview(array("i", t))])
def test_any_kind_of_token_sequence_names_the_same_blocks(cache: PrefixCache, daemon: FakeDaemon, kind) -> None:
    run(cache, range(20_000))  # longer than what is hashed at a stretch
    p = cache.match(kind(list(range(20_000))))
    assert p.hit_tokens == 20_000 // BLOCK_TOKENS * BLOCK_TOKENS
    cache.finish(p)


def test_bad_tokens_are_no_hit_and_are_not_saved(cache: PrefixCache, daemon: FakeDaemon) -> None:
    p = cache.match([1] * 200 + [-5] + [1] * 200)
    assert p.hit_tokens == 0 and not p.pending
    assert cache.save(p, 401, Engine([1] * 401).gather) == 0
    cache.finish(p)
    assert run(cache, range(300))[0].reason == "miss"  # the thread that met it goes on


def test_salt_adapter_and_extra_keep_prompts_apart(cache: PrefixCache) -> None:
    prompt = list(range(300))
    run(cache, prompt)
    for apart in ({"salt": b"tenant"}, {"adapter": b"lora"}, {"extra": {0: b"image"}}):
        assert cache.match(prompt, **apart).hit_tokens == 0
    assert cache.match(prompt).hit_tokens == 256


def test_local_tokens_are_not_loaded_again(cache: PrefixCache, daemon: FakeDaemon) -> None:
    prompt = list(range(6 * BLOCK_TOKENS))
    run(cache, prompt)
    engine = Engine(prompt)
    p = cache.match(prompt, local_tokens=2 * BLOCK_TOKENS + 40)
    assert p.hit_tokens == 5 * BLOCK_TOKENS
    assert cache.load(p, engine.scatter) == 5 * BLOCK_TOKENS
    assert sorted(engine.loaded) == [2, 3, 4]
    engine.check()
    cache.finish(p)
    more = cache.match(prompt, local_tokens=5 * BLOCK_TOKENS)
    assert more.hit_tokens == 0, "there is nothing beyond what the engine has"
    assert daemon.requests["Match"][-1].min_blocks == 6


def test_batches_are_bounded_and_in_order(daemon: FakeDaemon) -> None:
    options = replace(QUICK, load_batch_bytes=2 * PAYLOAD_BYTES, save_batch_bytes=3 * PAYLOAD_BYTES)
    cache = PrefixCache(NAMESPACE, PAYLOAD_BYTES, address=daemon.address, options=options)
    assert cache.ready(10)
    prompt = list(range(7 * BLOCK_TOKENS + 1))
    run(cache, prompt)
    assert [len(r.keys) // 16 for r in daemon.requests["Reserve"]] == [3, 3, 1]
    _, engine = run(cache, prompt)
    assert engine.scatter_calls == 4 and len(engine.loaded) == 7
    cache.close()


def test_a_bypassed_hit_and_a_hit_that_is_not_loaded_give_the_lease_back(
    cache: PrefixCache, daemon: FakeDaemon
) -> None:
    run(cache, range(300))
    p = cache.match(range(300))
    cache.finish(p)
    cache.finish(p)
    eventually(lambda: daemon.released == [(0, pb.BYPASSED)])
    engine = Engine(range(300))
    assert cache.load(p, engine.scatter) == 0 and engine.loaded == {}


def test_a_second_load_and_a_save_after_finish_do_nothing(cache: PrefixCache, daemon: FakeDaemon) -> None:
    run(cache, range(300))
    engine = Engine(range(300))
    p = cache.match(range(300))
    assert cache.load(p, engine.scatter) == 256
    assert cache.load(p, engine.scatter) == 0
    cache.finish(p)
    assert cache.save(p, 300, engine.gather) == 0


def test_known_blocks_are_not_gathered_again_until_a_match_misses_them(cache: PrefixCache, daemon: FakeDaemon) -> None:
    prompt = list(range(4 * BLOCK_TOKENS + 1))
    first, second = cache.match(prompt), cache.match(prompt)  # both miss
    engine = Engine(prompt)
    assert cache.save(first, len(prompt), engine.gather) == 4
    assert cache.save(second, len(prompt), engine.gather) == 0
    assert cache.flush(10)
    cache.finish(first)
    cache.finish(second)
    daemon.blocks.clear()  # evicted
    _, again = run(cache, prompt)
    assert again.gathered == [0, 1, 2, 3] and len(daemon.blocks) == 4


def test_what_scatter_or_gather_raises_is_the_engines(cache: PrefixCache, daemon: FakeDaemon) -> None:
    run(cache, range(300))

    def broken(first: int, payloads: object) -> None:
        raise KeyError("mine")

    p = cache.match(range(300))
    with pytest.raises(KeyError, match="mine"):
        cache.load(p, broken)
    eventually(lambda: daemon.released == [(0, pb.BYPASSED)])
    cache.finish(p)
    p = cache.match(range(1, 300))
    with pytest.raises(KeyError, match="mine"):
        cache.save(p, 299, broken)
    assert cache.stats.queued_bytes == 0
    engine = Engine(range(1, 300))
    assert cache.save(p, 299, engine.gather) == 2, "it can be tried again"
    assert cache.match(range(300)).hit_tokens == 256, "the daemon is not blamed"


def test_present_and_busy_blocks_are_left_alone_and_the_rest_is_stored(cache: PrefixCache, daemon: FakeDaemon) -> None:
    prompt = list(range(4 * BLOCK_TOKENS))
    keys = chain_keys(NAMESPACE, prompt)
    states = {keys[0]: pb.PRESENT, keys[2]: pb.BUSY}
    daemon.reserve_states = states.get
    run(cache, prompt)
    assert set(daemon.blocks) == {keys[1], keys[3]}
    assert daemon.blocks[keys[3]] == payload_of(prompt, 3)
    stats = cache.stats
    assert (stats.stored_blocks, stats.present_blocks, stats.busy_blocks, stats.failed_blocks) == (2, 1, 1, 0)


def test_stats_add_up(cache: PrefixCache) -> None:
    prompt = list(range(3 * BLOCK_TOKENS + 1))
    for _ in range(3):
        run(cache, prompt)
    stats = cache.stats
    assert (stats.lookups, stats.hits, stats.misses) == (3, 2, 1)
    assert stats.input_tokens == 3 * len(prompt) and stats.hit_tokens == stats.loaded_tokens == 6 * BLOCK_TOKENS
    assert stats.loaded_bytes == 6 * PAYLOAD_BYTES and stats.stored_bytes == 3 * PAYLOAD_BYTES
    assert stats.queued_blocks == stats.stored_blocks == 3 and stats.queued_bytes == 0
    assert stats.attached and stats.breaker == "closed" and stats.load_bytes_per_second > 0


def test_an_unknown_traffic_class_falls_back(cache: PrefixCache, daemon: FakeDaemon) -> None:
    for name in ("chat", "from a request"):
        p = cache.match(range(300), traffic_class=name)
        cache.save(p, 300, Engine(range(300)).gather)
        cache.finish(p)
        assert cache.flush(10)
        daemon.blocks.clear()
    for call in ("Match", "Reserve"):
        assert [r.traffic_class for r in daemon.requests[call]] == ["chat", "agent"]
    assert cache.stats.failed_blocks == 0


def test_many_threads_share_one_cache(cache: PrefixCache, daemon: FakeDaemon) -> None:
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(1, 6):
                run(cache, [seed % 3, *range(turn * 2 * BLOCK_TOKENS)], flush=False)
        except BaseException as error:
            faults.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults and cache.flush(20)
    assert len(daemon.blocks) == 3 * 10
    eventually(lambda: not daemon.read_leases)


def test_the_asynchronous_variants(cache: PrefixCache) -> None:
    async def turn() -> int:
        engine = Engine(range(300))
        p = await cache.amatch(engine.tokens)
        loaded = await cache.aload(p, engine.scatter)
        cache.save(p, 300, engine.gather)
        cache.finish(p)
        assert await cache.aflush(10)
        return loaded

    assert asyncio.run(turn()) == 0
    assert asyncio.run(turn()) == 256


def test_the_null_cache_has_the_same_interface() -> None:
    cache = NullPrefixCache()
    engine = Engine(range(300))
    p = cache.match(engine.tokens, salt=b"x", local_tokens=5)
    assert not p.pending and p.hit_tokens == 0
    assert cache.load(p, engine.scatter) == 0
    cache.extend(p, [1, 2])
    assert cache.save(p, 300, engine.gather) == 0
    cache.finish(p)
    assert cache.flush(0) and not cache.ready(0)
    assert asyncio.run(cache.amatch(range(9))).hit_tokens == 0
    cache.close()
    missing = {name for name in vars(PrefixCache) if not name.startswith("_")} - {
        *dir(NullPrefixCache),
    }
    assert not missing


@pytest.mark.parametrize(
    ("size", "options", "shard"),
    [(0, QUICK, 0), (8, replace(QUICK, save_queue_bytes=7), 0), (8, QUICK, 1), (8, QUICK, -1)],
)
def test_sizes_that_make_no_sense_are_refused(size: int, options: object, shard: int) -> None:
    with pytest.raises(ValueError, match=r"payload_bytes|save_queue_bytes"):
        PrefixCache(NAMESPACE, size, address="unix:/nowhere", options=options, shard=shard)  # type: ignore[arg-type]


def test_importing_and_constructing_make_no_channel(tmp_path: Path) -> None:
    code = (
        "import grpc, sys\n"
        "def no(*a, **k): raise AssertionError('a channel')\n"
        "grpc.insecure_channel = no\n"
        "from cachesvc.connector.prefix_cache import CacheOptions, PrefixCache\n"
        "from cachesvc.connector.client import Client\n"
        "from cachesvc.rpc.address import parse_address\n"
        "Client(parse_address('unix:/tmp/none.sock'), CacheOptions())\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'numba', 'llvmlite', 'pickle5')]\n"
        "own = [m for m in sys.modules if m.startswith('cachesvc.')\n"
        "       and m.split('.')[1] not in ('connector', 'rpc', 'keys', 'kernels')]\n"
        "assert not bad and not own, (bad, own)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
