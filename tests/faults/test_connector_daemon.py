"""The connector against a real daemon that is absent, killed, stopped, restarted, full; and in several processes.

Only generous upper bounds of time are asserted: that a delay is bounded, not how long it is.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Client, Daemon

from cachesvc.connector.options import CacheOptions
from cachesvc.connector.prefix_cache import CacheStats, Pass, PrefixCache
from cachesvc.keys import BLOCK_TOKENS, Namespace, chain_keys

SIZE = 300_000  # not a multiple of a page
BIG = 8 << 20  # several chunks, and long enough on the wire to be met under way
BLOCKS = 8
PROMPT = list(range(BLOCKS * BLOCK_TOKENS + 5))
BOUND = 20.0
OPTIONS = CacheOptions(match_budget_s=1.0, match_deadline_s=1.0, load_deadline_s=2.0, load_stall_s=0.5, probe_max_s=0.3)


def payload(prompt: list[int], block: int, size: int) -> bytes:
    """Stands for the KV of a block: it depends on the whole prefix."""
    key = chain_keys(Namespace("kv", "0", "uint8"), prompt[: (block + 1) * BLOCK_TOKENS])[block]
    return (key * (size // 16 + 1))[:size]


class Engine:
    def __init__(self, prompt: list[int], size: int) -> None:
        self.prompt, self.size = prompt, size
        self.loaded: dict[int, bytes] = {}
        self.gathered: list[int] = []

    def scatter(self, first: int, payloads: Any) -> None:
        for block, view in enumerate(payloads, first):
            self.loaded[block] = bytes(view)

    def gather(self, first: int, buffers: Any) -> None:
        for block, buffer in enumerate(buffers, first):
            self.gathered.append(block)
            buffer[:] = payload(self.prompt, block, self.size)

    def check(self) -> None:
        assert sorted(self.loaded) == list(range(len(self.loaded))), "a hole in the prefix"
        for block, data in self.loaded.items():
            assert data == payload(self.prompt, block, self.size)


def run(cache: PrefixCache, prompt: list[int] = PROMPT, *, flush: bool = True) -> tuple[Pass, Engine]:
    engine = Engine(prompt, cache.payload_bytes)
    p = cache.match(prompt)
    cache.load(p, engine.scatter)
    engine.check()
    cache.save(p, len(prompt), engine.gather)
    cache.finish(p)
    if flush:
        assert cache.flush(BOUND)
    return p, engine


def eventually(condition: Callable[[], bool], seconds: float = BOUND) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """Reachable over TCP too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return make_daemon("--listen", f"127.0.0.1:{port}").start()


def tcp_address(daemon: Daemon) -> str:
    return daemon.arguments[1]


@pytest.fixture
def make_cache(namespace: Namespace) -> Iterator[Callable[..., PrefixCache]]:
    made: list[PrefixCache] = []

    def make(daemon: Daemon, size: int = SIZE, *, way: str = "shared memory", **changes: Any) -> PrefixCache:
        options = replace(OPTIONS, shared_memory=way == "shared memory", **changes)
        address = tcp_address(daemon) if way == "bulk" else daemon.address
        made.append(PrefixCache(namespace, size, address=address, options=options))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


Make = Callable[..., PrefixCache]
EVERY_WAY = pytest.mark.parametrize("way", ["wire", "shared memory", "bulk"])


def test_a_conversation_is_accounted_to_the_token(daemon: Daemon, make_cache: Make) -> None:
    cache = make_cache(daemon)
    assert cache.ready(BOUND)
    turns = [list(range(length)) for length in (100, 700, 1500, 2000)]
    hits = [run(cache, turn)[0].loaded_tokens for turn in turns + turns]
    assert hits == [0, 0, 640, 1408, 0, 640, 1408, 1920]
    with Client(daemon.address) as client:
        eventually(lambda: client.report().lookups[0].pending_tokens == 0)
        (row,) = client.report().lookups
    assert row.input_tokens == 2 * sum(map(len, turns)) == sum(row.hit_tokens.values()) + sum(row.miss_tokens.values())
    assert sum(row.hit_tokens.values()) == sum(hits)
    assert row.passes == 8 and row.traffic_class == "agent"


def test_absent_at_the_start_then_it_appears(make_daemon: Callable[..., Daemon], make_cache: Make) -> None:
    daemon = make_daemon()
    started = time.monotonic()
    cache = make_cache(daemon)
    for _ in range(20):
        p, engine = run(cache)
        assert p.hit_tokens == 0 and not engine.gathered
    assert time.monotonic() - started < 5.0, "no daemon, no waiting"
    daemon.start()
    eventually(lambda: cache.stats.attached)
    run(cache)
    assert run(cache)[0].loaded_tokens == BLOCKS * BLOCK_TOKENS
    with Client(daemon.address) as client:
        (row,) = client.report().lookups
    assert row.miss_tokens["unreachable"] == 20 * len(PROMPT)


@EVERY_WAY
def test_a_restart_costs_no_hit(daemon: Daemon, make_cache: Make, way: str) -> None:
    cache = make_cache(daemon, way=way)
    assert cache.ready(BOUND)
    run(cache)
    for boot in range(1, 4):
        daemon.restart()
        assert cache.ready(BOUND)
        p, engine = run(cache)
        assert p.loaded_tokens == BLOCKS * BLOCK_TOKENS and engine.gathered == []
        assert cache.stats.boot_changes == boot


def test_a_restart_nobody_told_the_engine_about(daemon: Daemon, make_cache: Make) -> None:
    cache = make_cache(daemon)
    assert cache.ready(BOUND)
    run(cache)
    daemon.restart()
    time.sleep(1.0)  # the connection is found broken meanwhile
    assert run(cache)[0].loaded_tokens == BLOCKS * BLOCK_TOKENS


@EVERY_WAY
def test_killed_while_loading(daemon: Daemon, make_cache: Make, way: str) -> None:
    cache = make_cache(daemon, BIG, load_batch_bytes=BIG, way=way)
    assert cache.ready(BOUND)
    run(cache)
    engine = Engine(PROMPT, BIG)
    p = cache.match(PROMPT)
    assert p.hit_tokens == BLOCKS * BLOCK_TOKENS

    def scatter(first: int, payloads: Any) -> None:
        if first == 1:
            daemon.kill()
        engine.scatter(first, payloads)

    started = time.monotonic()
    loaded = cache.load(p, scatter)
    assert time.monotonic() - started < BOUND
    engine.check()
    if way == "shared memory":  # what was being read when the daemon died may have been given away
        assert loaded == BLOCK_TOKENS
    else:
        assert 2 * BLOCK_TOKENS <= loaded == len(engine.loaded) * BLOCK_TOKENS < p.hit_tokens
    cache.save(p, len(PROMPT), engine.gather)
    cache.finish(p)
    assert cache.flush(BOUND)
    assert run(cache)[0].hit_tokens == 0
    daemon.start()
    eventually(lambda: cache.stats.attached)
    run(cache)  # whatever was not yet on disk is stored again
    assert run(cache)[0].loaded_tokens == BLOCKS * BLOCK_TOKENS


@EVERY_WAY
def test_stopped_while_loading(daemon: Daemon, make_cache: Make, way: str) -> None:
    cache = make_cache(daemon, BIG, load_batch_bytes=BIG, way=way)
    assert cache.ready(BOUND)
    run(cache)
    engine = Engine(PROMPT, BIG)
    p = cache.match(PROMPT)
    assert daemon.process is not None

    def scatter(first: int, payloads: Any) -> None:
        if first == 1:
            daemon.freeze()
        engine.scatter(first, payloads)

    started = time.monotonic()
    loaded = cache.load(p, scatter)
    assert time.monotonic() - started < OPTIONS.load_deadline_s + 5.0
    engine.check()
    assert 2 * BLOCK_TOKENS <= loaded <= p.hit_tokens
    cache.finish(p)
    if way != "shared memory":
        assert loaded < p.hit_tokens
        assert run(cache)[0].reason == "unreachable", "the breaker is open: no second wait"
    os.kill(daemon.process.pid, signal.SIGCONT)
    eventually(lambda: cache.stats.attached)
    again, _ = run(cache)
    assert 0 < again.loaded_tokens == again.hit_tokens


def test_stopped_while_matching(daemon: Daemon, make_cache: Make) -> None:
    cache = make_cache(daemon, match_budget_s=0.02)
    assert cache.ready(BOUND)
    p = cache.match(PROMPT)
    cache.wait(p, BOUND)
    cache.finish(p)
    daemon.freeze()
    started = time.monotonic()
    p = cache.match(PROMPT)
    assert p.pending and p.hit_tokens == 0
    eventually(lambda: cache.poll(p))
    assert time.monotonic() - started < OPTIONS.match_deadline_s + 5.0
    assert p.reason == "timed out"
    cache.finish(p)
    eventually(lambda: cache.stats.breaker != "closed")
    started = time.monotonic()
    assert all(cache.match(PROMPT).reason == "unreachable" for _ in range(50))
    assert time.monotonic() - started < 5.0
    os.kill(daemon.process.pid, signal.SIGCONT)
    eventually(lambda: cache.stats.attached)
    _, engine = run(cache)
    assert len(engine.gathered) == BLOCKS
    with Client(daemon.address) as client:
        eventually(lambda: client.report().read_leases == 0)


def test_stopped_while_saving(daemon: Daemon, make_cache: Make) -> None:
    cache = make_cache(daemon, save_deadline_s=0.5, write_lease_s=1.0)
    assert cache.ready(BOUND)
    assert daemon.process is not None
    p = cache.match(PROMPT)
    daemon.freeze()
    engine = Engine(PROMPT, SIZE)
    started = time.monotonic()
    assert cache.save(p, len(PROMPT), engine.gather) == BLOCKS
    cache.finish(p)
    assert time.monotonic() - started < 5.0
    assert cache.flush(BOUND)
    assert cache.stats.failed_blocks == BLOCKS and cache.stats.queued_bytes == 0
    os.kill(daemon.process.pid, signal.SIGCONT)
    eventually(lambda: cache.stats.attached)
    with Client(daemon.address) as client:
        eventually(lambda: client.report().write_leases == 0)
    run(cache)
    assert run(cache)[0].loaded_tokens == BLOCKS * BLOCK_TOKENS


@EVERY_WAY
def test_killed_while_saving_then_back(daemon: Daemon, make_cache: Make, way: str) -> None:
    cache = make_cache(daemon, BIG, save_batch_bytes=BIG, way=way)
    assert cache.ready(BOUND)
    p = cache.match(PROMPT)
    engine = Engine(PROMPT, BIG)
    cache.save(p, len(PROMPT), engine.gather)
    eventually(lambda: cache.stats.stored_blocks >= 2)
    daemon.kill()
    cache.finish(p)
    assert cache.flush(BOUND)
    stats = cache.stats
    assert stats.stored_blocks + stats.failed_blocks == BLOCKS and stats.failed_blocks > 0
    daemon.start()
    eventually(lambda: cache.stats.attached)
    run(cache)
    assert run(cache)[0].loaded_tokens == BLOCKS * BLOCK_TOKENS


def test_two_clients_save_the_same_keys(daemon: Daemon, make_cache: Make) -> None:
    caches = [make_cache(daemon) for _ in range(2)]
    assert all(cache.ready(BOUND) for cache in caches)
    barrier = threading.Barrier(2)

    def work(cache: PrefixCache) -> None:
        for seed in range(10):
            prompt = [seed, *PROMPT]
            p = cache.match(prompt)
            engine = Engine(prompt, SIZE)
            barrier.wait(BOUND)
            cache.save(p, len(prompt), engine.gather)
            cache.finish(p)

    threads = [threading.Thread(target=work, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(cache.flush(BOUND) for cache in caches)
    with Client(daemon.address) as client:
        report = client.report()
    assert report.blocks == 10 * BLOCKS and report.staged_bytes == 0
    both = [cache.stats for cache in caches]
    assert sum(stats.stored_blocks for stats in both) == 10 * BLOCKS
    assert sum(stats.failed_blocks + stats.refused_blocks for stats in both) == 0
    for seed in range(10):
        assert run(caches[seed % 2], [seed, *PROMPT])[0].loaded_tokens == BLOCKS * BLOCK_TOKENS


def start_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], stdout=subprocess.PIPE, text=True
    )


ENGINE_PROCESS = """
    import os, sys, time
    from cachesvc.connector.prefix_cache import CacheOptions, PrefixCache
    from cachesvc.connector import client
    from cachesvc.keys import Namespace
    cache = PrefixCache(
        Namespace(model="test-model", revision="1", dtype="float32", layout={"test": True}),
        300000, address=sys.argv[1], options=CacheOptions(match_budget_s=5, match_deadline_s=5, write_lease_s=2))
    assert cache.ready(20)
    p = cache.match(list(range(1029)))
"""


def test_a_client_killed_between_reserve_and_commit_leaves_nothing(daemon: Daemon, make_cache: Make) -> None:
    code = (
        ENGINE_PROCESS
        + """
    def never(*a, **k):
        print("reserved", flush=True)
        time.sleep(600)
    client.Copier.copy = never
    cache.save(p, 1029, lambda first, buffers: None)
    time.sleep(600)
    """
    )
    process = start_python(code, daemon.address)
    assert process.stdout is not None and process.stdout.readline() == "reserved\n"
    with Client(daemon.address) as client:
        report = client.report()
        assert (report.write_leases, report.blocks) == (1, 0) and report.staged_bytes == BLOCKS * SIZE
        process.kill()
        process.wait(BOUND)
        eventually(lambda: client.report().staged_bytes == 0)
        assert client.report().blocks == client.report().write_leases == 0
    cache = make_cache(daemon)
    assert cache.ready(BOUND)
    p, engine = run(cache)
    assert p.hit_tokens == 0 and len(engine.gathered) == BLOCKS
    assert run(cache)[0].loaded_tokens == BLOCKS * BLOCK_TOKENS


@pytest.mark.parametrize("state", ["running", "stopped", "killed"])
def test_an_engine_that_never_closes_its_cache_still_ends(daemon: Daemon, state: str) -> None:
    code = (
        ENGINE_PROCESS
        + """
    print("ready", flush=True)
    sys.stdin.readline()
    cache.save(p, 1029, lambda first, buffers: None)
    q = cache.begin(list(range(5000)))
    """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), daemon.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert daemon.process is not None
    if state == "stopped":
        daemon.freeze()
    elif state == "killed":
        daemon.kill()
    process.communicate("\n", timeout=60)
    assert process.returncode == 0


def child_work(address: str, namespace: Namespace, results: Any) -> None:
    cache = PrefixCache(namespace, SIZE, address=address, options=OPTIONS)
    ready = cache.ready(BOUND if multiprocessing.get_start_method() == "spawn" else 1)
    p, _ = run(cache, flush=ready)
    cache.close()
    results.put((ready, p.loaded_tokens))


@pytest.mark.parametrize(("method", "own"), [("spawn", True), ("fork", False)])
def test_a_spawned_child_makes_its_own_cache_and_a_forked_one_has_none(
    daemon: Daemon, make_cache: Make, namespace: Namespace, method: str, own: bool
) -> None:
    cache = make_cache(daemon)
    assert cache.ready(BOUND)
    run(cache)
    context = multiprocessing.get_context(method)
    results: Any = context.Queue()
    child = context.Process(target=child_work, args=(daemon.address, namespace, results))
    child.start()
    assert run(cache)[0].loaded_tokens == BLOCKS * BLOCK_TOKENS, "the parent goes on"
    assert results.get(timeout=60) == (own, BLOCKS * BLOCK_TOKENS if own else 0)
    child.join(BOUND)
    assert child.exitcode == 0
    assert run(cache)[0].loaded_tokens == BLOCKS * BLOCK_TOKENS


def test_an_engine_may_fork_at_any_time(daemon: Daemon, make_cache: Make) -> None:
    """gRPC's own handlers would wait for its threads, with Python's lock held, and say so."""
    program = (
        "import os, sys, threading\n"
        "from cachesvc.connector import PrefixCache\n"
        "from cachesvc.keys import Namespace\n"
        "cache = PrefixCache(Namespace('m', 'r', 'float32'), 4096, address=sys.argv[1])\n"
        "assert cache.ready(20)\n"
        "def ask():\n"
        "    for number in range(300):\n"
        "        cache.finish(cache.match([number] * 300))\n"
        "threads = [threading.Thread(target=ask) for _ in range(2)]\n"
        "[thread.start() for thread in threads]\n"
        "while any(thread.is_alive() for thread in threads):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "cache.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, daemon.address], capture_output=True, text=True, timeout=BOUND * 3, check=True
    )
    assert "fork" not in done.stderr


def test_in_a_forked_child_the_parents_cache_is_off(daemon: Daemon, make_cache: Make) -> None:
    cache = make_cache(daemon)
    assert cache.ready(BOUND)
    run(cache)
    before = cache.match(PROMPT)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            p, engine = run(cache)
            assert p.hit_tokens == 0 and not engine.gathered and not engine.loaded
            assert cache.load(before, engine.scatter) == 0 and cache.save(before, len(PROMPT), engine.gather) == 0
            cache.finish(before)
            assert (
                cache.flush(0)
                and not cache.ready(0)
                and cache.stats == CacheStats(breaker=cache.stats.breaker, breaker_openings=0)
            )
            cache.close()
            code = 0
        finally:
            os._exit(code)
    eventually(lambda: os.waitpid(child, os.WNOHANG) == (child, 0))
    engine = Engine(PROMPT, SIZE)
    assert cache.load(before, engine.scatter) == BLOCKS * BLOCK_TOKENS
    cache.finish(before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here, so a full disk cannot be tested")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_disk_that_fills_up_while_saving(
    make_daemon: Callable[..., Daemon], make_cache: Make, small_disk: Path
) -> None:
    daemon = make_daemon("--store-bytes", "500MB", store=small_disk / "store").start()
    cache = make_cache(daemon, save_batch_bytes=SIZE, saves_refused_pause_s=0.2)
    assert cache.ready(BOUND)
    first = list(range(40 * BLOCK_TOKENS + 1))  # 12 MB: more than the disk has, but there is the arena
    run(cache, first)
    stored = cache.stats.stored_blocks
    for number in range(1, 100):
        if cache.stats.refused_blocks:
            break
        time.sleep(0.1)
        run(cache, [number, *range(BLOCK_TOKENS)])
    stats = cache.stats
    assert stored > 0 and stats.refused_blocks > 0 and stats.failed_blocks == 0
    assert stats.breaker == "closed"
    assert run(cache, first)[0].loaded_tokens == stored * BLOCK_TOKENS, "what was stored is still served"


def test_an_arena_without_room_refuses_and_nothing_else(make_daemon: Callable[..., Daemon], make_cache: Make) -> None:
    daemon = make_daemon("--arena-bytes", "1MiB").start()
    cache = make_cache(daemon)
    assert cache.ready(BOUND)
    p, engine = run(cache)
    assert len(engine.gathered) == BLOCKS
    stats = cache.stats
    # half of it may hold blocks that are not on disk, in which there is room for one
    assert (stats.refused_blocks, stats.stored_blocks, stats.failed_blocks) == (BLOCKS - 1, 1, 0)
    assert stats.breaker == "closed" and p.hit_tokens == 0


def test_a_damaged_block_is_recomputed_and_stored_again(daemon: Daemon, make_cache: Make) -> None:
    cache = make_cache(daemon)
    assert cache.ready(BOUND)
    run(cache)
    assert daemon.stop() == 0
    (segment,) = daemon.store.glob("*/*/*/*.seg")
    with segment.open("r+b") as file:
        file.seek(3 * (segment.stat().st_size // BLOCKS) + SIZE // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    daemon.start()
    assert cache.ready(BOUND)
    p, engine = run(cache)
    assert p.hit_tokens == BLOCKS * BLOCK_TOKENS and 0 < p.loaded_tokens < p.hit_tokens
    first_bad = p.loaded_tokens // BLOCK_TOKENS
    assert engine.gathered == list(range(first_bad, BLOCKS))
    again, _ = run(cache)
    assert again.loaded_tokens == again.hit_tokens >= p.loaded_tokens
    with Client(daemon.address) as client:
        eventually(lambda: client.report().lookups[0].pending_tokens == 0)
        assert client.report().lookups[0].miss_tokens["corrupt"] > 0


@pytest.mark.long
def test_many_engines_and_a_daemon_that_comes_and_goes(daemon: Daemon, make_cache: Make) -> None:
    """Whatever the moment, every loaded byte is right, nothing raises, and in the end everything is hit."""
    ways = ("wire", "shared memory", "bulk")
    caches = [make_cache(daemon, way=way, save_queue_bytes=32 * SIZE) for way in ways]
    assert all(cache.ready(BOUND) for cache in caches)
    stop = threading.Event()
    faults: list[BaseException] = []

    def work(cache: PrefixCache, seed: int) -> None:
        try:
            turn = 0
            while not stop.is_set():
                run(cache, [turn % 2, *range((3 + turn * 7 + seed) % 11 * BLOCK_TOKENS + 9)], flush=False)
                turn += 1
                time.sleep(0.01)  # an engine computes now and then; the daemon needs the processor too
        except BaseException as error:
            faults.append(error)
            raise

    threads = [threading.Thread(target=work, args=(cache, seed)) for seed, cache in enumerate(caches * 2)]
    for thread in threads:
        thread.start()
    assert daemon.process is not None
    for action in ("kill", "restart", "stop", "kill"):
        time.sleep(0.7)
        if action == "restart":
            daemon.restart()
        elif action == "kill":
            daemon.kill()
            time.sleep(0.5)
            daemon.start()
        else:
            daemon.freeze()
            time.sleep(2.5)
            os.kill(daemon.process.pid, signal.SIGCONT)
    time.sleep(0.5)
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not faults
    eventually(lambda: all(cache.stats.attached for cache in caches))
    for cache in caches:
        assert cache.flush(BOUND)
        run(cache)
        assert run(cache)[0].loaded_tokens == BLOCKS * BLOCK_TOKENS
    with Client(daemon.address) as client:
        eventually(lambda: client.report().staged_bytes == 0, 90)


def test_attaching_again_to_the_same_boot_keeps_the_arena_that_calls_are_using(
    daemon: Daemon, make_cache: Make
) -> None:
    cache = make_cache(daemon)
    assert cache.ready(BOUND)
    arena = cache._client._arena
    assert arena is not None and cache.ready(BOUND) and cache._client._arena is arena
    daemon.restart()
    assert cache.ready(BOUND) and cache._client._arena not in (None, arena)
