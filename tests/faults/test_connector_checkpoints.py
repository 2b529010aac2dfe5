"""Checkpoints of windows through a real daemon: stored at few positions, found again, and all or nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from conftest import Client, Daemon

from cachesvc.connector.options import CacheOptions
from cachesvc.connector.prefix_cache import PrefixCache
from cachesvc.keys import BLOCK_TOKENS, Namespace

SIZE, WINDOW = 5_000, 70_001
OPTIONS = CacheOptions(match_budget_s=1.0, load_deadline_s=2.0, checkpoint_interval_tokens=8 * BLOCK_TOKENS)
STEP = 300
"""Tokens computed at once."""
BOUND = 20.0


def kv(prompt: list[int], end: int, size: int, what: str) -> bytes:
    """Stands for what depends on all tokens before `end`."""
    return f"{what} of {hash(tuple(prompt[:end]))} up to {end}. ".encode().ljust(64)[:64] * (size // 64 + 1)


class Engine:
    """Computes a prompt and an answer in steps, and checks every byte that it is given."""

    def __init__(self, cache: PrefixCache, prompt: list[int], answer: list[int]) -> None:
        self.cache, self.tokens, self.prompt_tokens = cache, prompt + answer, len(prompt)
        self.loaded: list[int] = []
        self.restored: list[int] = []
        self.saved: list[int] = []
        self.hit = 0

    def run(self) -> None:
        cache, p = self.cache, self.cache.match(self.tokens[: self.prompt_tokens])
        computed = cache.load(p, self.scatter, self.restore)
        cache.extend(p, self.tokens[self.prompt_tokens :])
        while computed < len(self.tokens):
            room = self.prompt_tokens - computed if computed < self.prompt_tokens else 1
            before, computed = computed, computed + min(STEP, room)
            cache.save(p, computed, self.gather)
            cache.save_checkpoints(p, before, computed, self.gather_window)
        cache.finish(p)
        assert cache.flush(BOUND)
        self.hit = p.loaded_tokens

    def content(self, blocks: int, size: int, what: str) -> bytes:
        return kv(self.tokens, blocks * BLOCK_TOKENS, size, what)[:size]

    def scatter(self, first: int, payloads: Any) -> None:
        for block, view in enumerate(payloads, first):
            assert bytes(view) == self.content(block + 1, SIZE, "block")
            self.loaded.append(block)

    def restore(self, blocks: int, view: memoryview) -> None:
        assert self.loaded[-1] == blocks - 1, "it comes behind its blocks"
        assert bytes(view) == self.content(blocks, WINDOW, "window")
        self.restored.append(blocks)

    def gather(self, first: int, buffers: Any) -> None:
        for block, buffer in enumerate(buffers, first):
            buffer[:] = self.content(block + 1, SIZE, "block")

    def gather_window(self, blocks: int, buffer: memoryview) -> None:
        self.saved.append(blocks)
        buffer[:] = self.content(blocks, WINDOW, "window")


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return make_daemon("--listen", f"127.0.0.1:{port}").start()


@pytest.fixture(params=["shared memory", "bulk", "grpc"])
def cache(request: pytest.FixtureRequest, daemon: Daemon, namespace: Namespace) -> Iterator[PrefixCache]:
    made = PrefixCache(
        replace(namespace, shards=4),
        SIZE,
        address=daemon.arguments[1] if request.param == "bulk" else daemon.address,
        options=replace(OPTIONS, shared_memory=request.param == "shared memory"),
        shard=0,
        checkpoint_bytes=WINDOW,
    )
    # Its other rank has everything at once: blocks count when all shards are there.
    other = PrefixCache(
        replace(namespace, shards=4), SIZE, address=daemon.address, options=OPTIONS, shard=1, checkpoint_bytes=WINDOW
    )
    assert made.ready(BOUND) and other.ready(BOUND)
    made.other = other  # type: ignore[attr-defined]
    yield made
    made.close()
    other.close()


def run(cache: PrefixCache, prompt: list[int], answer: list[int]) -> Engine:
    Engine(cache.other, prompt, answer).run()  # type: ignore[attr-defined]
    engine = Engine(cache, prompt, answer)
    engine.run()
    return engine


def test_checkpoints_lie_at_the_ends_at_intervals_and_where_prompts_part(cache: PrefixCache) -> None:
    shared, answer = list(range(1500)), list(range(9000, 9300))
    one = run(cache, shared + [1] * 900, answer)
    assert one.saved == [8, 16, 18, 19, 20, 21] and one.restored == []  # of the answer only 21 is kept

    # The next turn begins with all of it.
    turn = shared + [1] * 900 + answer + [5] * 200
    two = run(cache, turn, [])
    assert two.restored == [21] and two.loaded == list(range(21)) and two.saved == [22]

    # Another prompt leaves it behind token 1,500: nothing to restore but at 8, and from now on at 11.
    three = run(cache, shared + [2] * 900, [])
    assert three.restored == [8] and three.loaded == list(range(8)) and three.saved == [11, 16, 18]
    four = run(cache, shared + [3] * 900, [])
    assert four.restored == [11] and four.saved == [16, 18]


def test_a_damaged_checkpoint_is_a_miss_and_is_stored_again(
    make_daemon: Callable[..., Daemon], namespace: Namespace
) -> None:
    daemon, prompt = make_daemon().start(), list(range(700))

    def pass_of_a_new_client() -> Engine:
        windows = replace(namespace, shards=2)
        made = PrefixCache(windows, SIZE, address=daemon.address, options=OPTIONS, checkpoint_bytes=WINDOW)
        with closing(made) as cache:
            assert cache.ready(BOUND)
            engine = Engine(cache, prompt, [])
            engine.run()
            return engine

    assert pass_of_a_new_client().saved == [5]
    assert daemon.stop() == 0
    (windows,) = [path for path in daemon.store.rglob("*.seg") if path.stat().st_size > 50_000]
    data = bytearray(windows.read_bytes())
    data[len(data) // 2] ^= 1
    windows.write_bytes(data)
    daemon.start()
    damaged = pass_of_a_new_client()
    assert damaged.loaded == list(range(5)) and damaged.restored == [] and damaged.hit == 0
    assert damaged.saved == [5]
    again = pass_of_a_new_client()
    assert again.restored == [5] and again.hit == 5 * BLOCK_TOKENS
    row = Client(daemon.address).report().lookups[0]
    assert (row.hit_tokens["dram"], row.miss_tokens["corrupt"]) == (5 * BLOCK_TOKENS, 5 * BLOCK_TOKENS)
