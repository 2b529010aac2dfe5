"""Eight clients at once, one of them killed every second: no wrong byte, no leaked slot, no stall.

Each client is an engine's connector in a process of its own. It draws prefixes from a common set larger than the
arena, loads what is there, checks every byte, and saves the rest, so that blocks are written, evicted and promoted all
the time. A second's worth of clients die by SIGKILL in the middle of whatever they do.
"""

from __future__ import annotations

import argparse
import json
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

from cachesvc.benchmark.harness import Result, Run
from cachesvc.benchmark.process import DaemonProcess
from cachesvc.connector.client import Client
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.prefix_cache import PrefixCache
from cachesvc.keys import Namespace, chain_keys
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.address import client_address

PAYLOAD_BYTES: Final = 113_920
BLOCK_TOKENS: Final = 128
MAX_BLOCKS: Final = 48
NAMESPACE: Final = Namespace("stress", "1", "uint8", layout={"stress": 1})
PAGE: Final = 4096
MAX_STALL_S: Final = 1.0


@dataclass
class Counts:
    """Of one client, or of all."""

    passes: int = 0
    loaded: int = 0
    saved: int = 0
    wrong: int = 0
    slowest_s: float = 0.0

    def add(self, other: Counts) -> None:
        self.passes += other.passes
        self.loaded += other.loaded
        self.saved += other.saved
        self.wrong += other.wrong
        self.slowest_s = max(self.slowest_s, other.slowest_s)


def content(key: bytes) -> bytes:
    """The payload of a block: every page of it says whose it is, and which."""
    pages = [(key + number.to_bytes(16, "little")) * (PAGE // 32) for number in range(-(-PAYLOAD_BYTES // PAGE))]
    return b"".join(pages)[:PAYLOAD_BYTES]


def prompt(number: int) -> list[int]:
    """Prompts share a first part with others, and differ in length."""
    length = 1 + random.Random(number).randrange(MAX_BLOCKS)
    shared = list(range(BLOCK_TOKENS * min(length, 4 * (number % 3))))
    return shared + [number * 1000 + i for i in range(BLOCK_TOKENS * length + 1 - len(shared))]


class Engine:
    """One client."""

    def __init__(self, address: str, seed: int, prompts: int) -> None:
        self.counts = Counts()
        self._random = random.Random(seed)
        self._prompts = prompts
        options = CacheOptions(match_budget_s=5.0, match_deadline_s=5.0, load_deadline_s=20.0)
        self._cache = PrefixCache(NAMESPACE, PAYLOAD_BYTES, address=address, options=options)
        self._cache.ready(20.0)

    def run(self, seconds: float) -> None:
        """Tells its counts, as a line of JSON, after each pass."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._one_pass(prompt(self._random.randrange(self._prompts)))
            print(json.dumps(asdict(self.counts)), flush=True)
            self.counts = Counts()
        self._cache.flush(20.0)
        self._cache.close()

    def _one_pass(self, tokens: list[int]) -> None:
        keys = chain_keys(NAMESPACE, tokens)
        found: dict[int, bytes] = {}

        def scatter(first: int, payloads: Sequence[memoryview]) -> None:
            found.update((first + i, bytes(payload)) for i, payload in enumerate(payloads))

        def gather(first: int, buffers: Sequence[memoryview]) -> None:
            for key, buffer in zip(keys[first:], buffers, strict=False):
                buffer[:] = content(key)

        with self._timed():
            p = self._cache.match(tokens)
        with self._timed():
            loaded = self._cache.load(p, scatter) // BLOCK_TOKENS
        self.counts.wrong += sum(found[index] != content(keys[index]) for index in range(loaded))
        with self._timed():
            saved = self._cache.save(p, len(tokens), gather)
            self._cache.finish(p)
        self.counts.add(Counts(passes=1, loaded=loaded, saved=saved))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.counts.slowest_s = max(self.counts.slowest_s, time.monotonic() - started)


class Clients:
    """The processes; a killed one is replaced at once."""

    def __init__(self, address: str, count: int, seconds: float, prompts: int) -> None:
        self.total = Counts()
        self.killed = 0
        self._address = address
        self._prompts = prompts
        self._end = time.monotonic() + seconds
        self._seed = 0
        self._processes = [self._start() for _ in range(count)]

    def _start(self) -> subprocess.Popen[bytes]:
        self._seed += 1
        left = max(0.0, self._end - time.monotonic())
        command = [sys.executable, __file__, "--client", self._address, "--seconds", str(left)]
        command += ["--seed", str(self._seed), "--prompts", str(self._prompts)]
        return subprocess.Popen(command, stdout=subprocess.PIPE)

    def run(self, kill_every: float) -> None:
        """Until the time is over and all have ended."""
        next_kill = time.monotonic() + kill_every
        while self._processes:
            self._read(timeout=0.05)
            now = time.monotonic()
            if next_kill <= now < self._end - 1.0:
                next_kill = now + kill_every
                victim = random.choice(self._processes)
                victim.kill()
                self.killed += 1
                self._finish(victim)
                self._processes.append(self._start())

    def _read(self, timeout: float) -> None:
        by_output = {process.stdout: process for process in self._processes if process.stdout is not None}
        for output in select.select(list(by_output), [], [], timeout)[0]:
            line = output.readline()
            if line:
                self._count(line)
            else:
                self._finish(by_output[output])

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        self._processes.remove(process)
        assert process.stdout is not None
        for line in process.stdout:
            self._count(line)
        process.wait(30)
        process.stdout.close()

    def _count(self, line: bytes) -> None:
        if line.endswith(b"}\n"):  # a client that was killed may leave half a line
            self.total.add(Counts(**json.loads(line)))


def leaked_slots(daemon: DaemonProcess) -> int:
    """Fills the whole arena with new blocks. A slot that is not among theirs is held by a client that is gone."""
    client = Client(client_address(daemon.address), CacheOptions())
    attachment = client.attach(NAMESPACE.canonical_json(), [PAYLOAD_BYTES])
    slab = max(1 << 20, min(64 << 20, daemon.arena_bytes // 8))
    slot = -(-PAYLOAD_BYTES // PAGE) * PAGE
    slots = daemon.arena_bytes // slab * (slab // slot)
    keys = chain_keys(NAMESPACE, [7, *range(BLOCK_TOKENS * slots - 1)])
    buffer = memoryview(bytearray(PAYLOAD_BYTES))
    done = 0
    deadline = time.monotonic() + 120
    while done < slots and time.monotonic() < deadline:
        part = keys[done : done + 256]
        stored = client.store(attachment, part, [buffer] * len(part), "agent", checksums=False)
        states = zip(stored.reserved, stored.committed, strict=True)
        done += sum(1 for _ in takewhile(lambda s: s[0] == pb.PRESENT or s[1] == pb.STORED, states))
        if pb.REFUSED in stored.reserved:
            time.sleep(0.05)  # the flusher has to catch up
    match = client.match(
        attachment,
        keys,
        traffic_class="agent",
        input_tokens=BLOCK_TOKENS * slots,
        local_tokens=0,
        min_blocks=1,
        pass_id=b"",
        unreachable_tokens=0,
        deadline_s=10.0,
    )
    resident = sum(position != 2**64 - 1 for position in match.slots)
    client.release(attachment, match, match.blocks, pb.MISS_REASON_UNSPECIFIED)
    client.close()
    return slots - resident


def stress(seconds: float, clients: int, arena_bytes: int, store: Path | None) -> Run:
    slots = arena_bytes // PAYLOAD_BYTES
    prompts = max(8, 3 * slots // MAX_BLOCKS)
    params = {"clients": clients, "seconds": seconds, "arena_bytes": arena_bytes, "prompts": prompts}
    run = Run("bench/stress.py", params)
    with DaemonProcess(arena_bytes, store) as daemon:
        all_clients = Clients(daemon.address, clients, seconds, prompts)
        all_clients.run(kill_every=1.0)
        total = all_clients.total
        leaked = leaked_slots(daemon)

    def result(name: str, value: float, unit: str, target: float | None = None) -> None:
        run.results.append(Result(name, {}, value, (value, value), unit, target=target, at_most=True))

    result("wrong blocks", total.wrong, "blocks", 0)
    result("leaked slots", leaked, "slots", 0)
    result("slowest call", total.slowest_s, "s", MAX_STALL_S)
    result("blocks loaded and checked", total.loaded, "blocks")
    result("blocks saved", total.saved, "blocks")
    result("passes", total.passes, "passes")
    result("clients killed", all_clients.killed, "clients")
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--arena-bytes", type=int, default=512 << 20)
    parser.add_argument("--store", type=Path, help="directory for the store; default: where temporary files go")
    parser.add_argument("--quick", action="store_true", help="10 seconds and a smaller arena")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        Engine(given.client, given.seed, given.prompts).run(given.seconds)
        return
    if given.quick:
        given.seconds, given.arena_bytes = 10.0, 128 << 20
    run = stress(given.seconds, given.clients, given.arena_bytes, given.store)
    print(json.dumps(run.to_json(), indent=2))
    sys.exit(0 if all(result.passes is not False for result in run.results) else 1)


if __name__ == "__main__":
    main()
