"""What `cachesvc bench` measures: one function per subject, each beside this machine's own ceiling in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from cachesvc.benchmark.buffers import Blocks, copy_all
from cachesvc.benchmark.client import BenchClient, check_same, fresh_keys
from cachesvc.benchmark.harness import Baseline, Result, Run, Side, Times, interleaved, percentile, timed
from cachesvc.benchmark.process import BenchError
from cachesvc.benchmark.stream import LoopbackStream
from cachesvc.connector.buffers import Slots
from cachesvc.connector.client import Match
from cachesvc.limits import KiB, MiB

SIZES: Final = (113_920, MiB, 4 * MiB, 16 * MiB)
"""From a block of DeepSeek-V4.1-Flash to one of Llama-3-8B in bf16."""

PREFIX_BLOCKS: Final = 512
"""Most blocks of one prefix, and so of one call: a prompt of 65,536 tokens."""

_LOOKUP_BYTES: Final = 4 * KiB
"""Payload of blocks that are only looked up, so that many of them fit."""

_LEAST_ARENA: Final = 8 * max(SIZES)
"""A slab is an eighth of a small arena, and the largest block must fit into one."""

_LOOKUP_KEYS: Final = (1, 1_000, 8_000)
_POSITIONS_KEYS: Final = 32
_GB: Final = 1e9


@dataclass(frozen=True)
class Plan:
    """`moved_bytes` is moved by each repeat of get and put, `remote_bytes` by those without shared memory."""

    address: str
    remote_address: str | None
    arena_bytes: int
    repeats: int
    moved_bytes: int
    remote_bytes: int
    lookups: int


@dataclass(frozen=True)
class Shape:
    """What one repeat moves: `prefixes` calls of `blocks` blocks each."""

    size: int
    blocks: int
    prefixes: int

    @property
    def total(self) -> int:
        return self.size * self.blocks * self.prefixes

    @property
    def params(self) -> dict[str, Any]:
        return {"block_bytes": self.size, "blocks": self.blocks, "prefixes": self.prefixes}


def shape_of(size: int, total: int) -> Shape:
    """About `total` bytes, at least one block."""
    blocks = max(1, min(PREFIX_BLOCKS, total // size))
    return Shape(size, blocks, max(1, total // (size * blocks)))


def measure(plan: Plan, run: Run, say: Callable[[str], None]) -> None:
    """Fills in `run`; `say` is told what is being measured. Raises `BenchError`, `CacheError` of the connector."""
    if plan.arena_bytes < _LEAST_ARENA:
        raise BenchError(f"the daemon's arena has {plan.arena_bytes} bytes; {_LEAST_ARENA} are needed at least")
    for size in SIZES:
        say(f"put and get, {size:,} bytes a block")
        _put_and_get(plan, run, shape_of(size, min(plan.moved_bytes, plan.arena_bytes // 4)))
    say("positions and look-ups")
    _lookups(plan, run)
    if plan.remote_address is None:
        run.skipped["remote"] = "the daemon was given by its Unix socket; give a HOST:PORT to measure remote clients"
        return
    for size in SIZES:
        say(f"remote put and get, {size:,} bytes a block")
        _remote(plan, run, plan.remote_address, shape_of(size, min(plan.remote_bytes, plan.arena_bytes // 4)))


@contextmanager
def _client(address: str, size: int, *, shared_memory: bool = True) -> Iterator[BenchClient]:
    client = BenchClient(address, size, shared_memory=shared_memory)
    try:
        yield client
    finally:
        client.close()


def _put_and_get(plan: Plan, run: Run, shape: Shape) -> None:
    count = shape.blocks * shape.prefixes
    source, target = Blocks(shape.size, count), Blocks(shape.size, count)
    source.fill(1)
    keys: list[bytes] = []

    def each_prefix(call: Callable[[list[bytes], Sequence[memoryview]], None], blocks: Blocks) -> None:
        for start in range(0, count, shape.blocks):
            part = slice(start, start + shape.blocks)
            call(keys[part], blocks.views[part])

    def new_keys() -> None:
        keys[:] = fresh_keys(count)

    with _client(plan.address, shape.size) as client:
        client.warm()
        copying = Side("memcpy", lambda: copy_all(target, source))
        checked = Side("put", lambda: each_prefix(client.put, source), new_keys, client.wait_flushed)
        unchecked = Side(
            "put, checksums by the daemon",
            lambda: each_prefix(lambda k, p: client.put(k, p, checksums=False), source),
            new_keys,
            client.wait_flushed,
        )
        times = interleaved([copying, checked, unchecked], plan.repeats)
        for side, target_ratio in ((checked, 0.7), (unchecked, 0.9)):
            run.results.append(_rate(side, copying, times, shape.total, shape.params, target_ratio))

        reading = Side("get", lambda: each_prefix(client.get, target))
        times = interleaved([copying, reading], plan.repeats)
        run.results.append(_rate(reading, copying, times, shape.total, shape.params, 0.9))
        target.fill(2)
        each_prefix(client.get, target)
        check_same(source, target.views)


def _lookups(plan: Plan, run: Run) -> None:
    keys = fresh_keys(max(_LOOKUP_KEYS))
    with _client(plan.address, _LOOKUP_BYTES) as client:
        for start in range(0, len(keys), PREFIX_BLOCKS):
            part = keys[start : start + PREFIX_BLOCKS]
            client.put(part, Blocks(_LOOKUP_BYTES, len(part)).views)
            client.wait_flushed()

        prefixes = [keys[i : i + _POSITIONS_KEYS] for i in range(0, len(keys), _POSITIONS_KEYS)]

        def positions() -> None:
            for prefix in prefixes:
                client.release(client.match(prefix))

        side = Side("get, positions only", positions)
        rate, spread = interleaved([side], plan.repeats)[side.name].rate(len(keys))
        params: dict[str, Any] = {"blocks": _POSITIONS_KEYS, "prefixes": len(prefixes)}
        run.results.append(Result(side.name, params, rate, spread, "blocks/s", target=180_000))

        for count in _LOOKUP_KEYS:
            _latency(plan, run, client, keys[:count])


def _latency(plan: Plan, run: Run, client: BenchClient, keys: list[bytes]) -> None:
    calls = max(1, min(plan.lookups, 8 * plan.lookups // (1 + len(keys) // 100)))
    repeats: list[list[float]] = [[] for _ in range(plan.repeats)]

    def some(seconds: list[float]) -> None:
        for _ in range(calls):
            started = time.perf_counter()
            match = client.match(keys)
            seconds.append(time.perf_counter() - started)
            client.release(match)

    some([])  # warm
    for seconds in repeats:
        timed(lambda seconds=seconds: some(seconds))  # type: ignore[misc]
    every = [1e3 * second for seconds in repeats for second in seconds]
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        each = [1e3 * percentile(seconds, share) for seconds in repeats]
        target = 10.0 if name == "p50" and len(keys) == max(_LOOKUP_KEYS) else None
        params = {"keys": len(keys), "calls": len(every)}
        value = percentile(every, share)
        spread = (min(each), max(each))
        run.results.append(Result(f"match {name}", params, value, spread, "ms", target=target, at_most=True))


def _remote(plan: Plan, run: Run, address: str, shape: Shape) -> None:
    """Clients that share no memory with the daemon, as on another host, beside a bare TCP stream of the same bytes."""
    blocks = shape.blocks
    source, target = Blocks(shape.size, blocks), Blocks(shape.size, blocks)
    source.fill(3)
    received = Slots(shape.size, blocks)
    keys: list[bytes] = []

    def new_keys() -> None:
        keys[:] = fresh_keys(blocks)

    with (
        _client(address, shape.size, shared_memory=False) as client,
        LoopbackStream(shape.size, blocks) as stream,
    ):
        sending = Side("TCP stream", lambda: stream.send(source))
        putting = Side("remote put", lambda: client.put(keys, source.views), new_keys, client.wait_flushed)
        receiving = Side("TCP stream", lambda: stream.receive(target))
        matches: list[Match] = []
        getting = Side(
            "remote get",
            lambda: matches.append(client.get_remotely(keys, received)),
            after=lambda: client.release(matches.pop()),
        )
        params = {"block_bytes": shape.size, "blocks": blocks}
        size = shape.size * blocks
        for ours, bare in ((putting, sending), (getting, receiving)):
            times = interleaved([bare, ours], plan.repeats)
            run.results.append(_rate(ours, bare, times, size, params, 0.8))
        check_same(source, [received.view(i) for i in range(blocks)])


def _rate(
    side: Side, baseline: Side, times: Mapping[str, Times], size: int, params: Mapping[str, Any], target: float
) -> Result:
    value, spread = times[side.name].rate(size / _GB)
    ceiling, _ = times[baseline.name].rate(size / _GB)
    return Result(side.name, params, value, spread, "GB/s", Baseline(baseline.name, ceiling), target)


__all__ = ["SIZES", "BenchError", "Plan", "measure"]
