"""What housekeeping costs: bytes written again under eviction, and readers while blocks in use are written again.

Write amplification: an agent trace is played against the store itself, on the trace's own time, with room for half of
its distinct blocks. Blocks are small, since only their number matters. Readers: a daemon holds agent blocks that are
all in use when the slices they lie in are over, so that all are written again; a client loads prompts from disk all the
time, before, during and after.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from cachesvc.benchmark.buffers import Blocks
from cachesvc.benchmark.client import BenchClient
from cachesvc.benchmark.harness import Baseline, Result, Run, percentile
from cachesvc.benchmark.process import DaemonProcess
from cachesvc.classes import DEFAULT_TTLS, TrafficClasses
from cachesvc.cli._daemon import fetch_report
from cachesvc.clock import ManualClock
from cachesvc.record import PAGE, checksum
from cachesvc.segments.format import shape_of
from cachesvc.store import Store
from cachesvc.trace.formats import Request, merged, open_trace
from cachesvc.trace.workload import agent_trace

DAY: Final = 86_400.0
MAX_AMPLIFICATION: Final = 1.2
MAX_SLOWDOWN: Final = 2.0
SMALL: Final = 1_024
"""Payload bytes in the replay."""
SESSION_GAP_SECONDS: Final = 600.0
"""Between the starts of sessions."""
SEGMENTS: Final = 128
"""Of the store in the replay: its budget by the size of a segment."""
PAYLOAD_BYTES: Final = 113_920
PROMPT_BLOCKS: Final = 16


# ---- write amplification ---------------------------------------------------------------------------------------------


class Replay:
    """A store that a trace is played against, on the trace's time."""

    def __init__(self, path: Path, budget: int) -> None:
        self._classes = TrafficClasses(DEFAULT_TTLS)
        self._shape = shape_of("ab" * 32, SMALL)
        self.clock = ManualClock()
        self.asked = self.hit = 0
        self.store = Store(
            path,
            budget=budget,
            segment_bytes=budget // SEGMENTS,
            arena_bytes=64 << 20,
            slab_bytes=1 << 20,
            arena_policy="lru",
            classes=self._classes,
            clock=self.clock,
            scrub_rate=0,
            background=False,
        )

    def ask(self, request: Request) -> None:
        """A pass: match, use what is there, store the rest, and a round of housekeeping."""
        traffic_class = self._classes.named(request.traffic_class)
        identities = [key.to_bytes(16, "little") for key in request.keys]
        found = self.store.catalog.match([identities], [self._shape], traffic_class)
        matched = len(found.entries[0])
        self.asked += len(identities)
        self.hit += matched
        self.store.touch([identities[:matched]], traffic_class, None)
        for start in range(matched, len(identities), 4_096):
            missing = identities[start : start + 4_096]
            held = self.store.catalog.holds(missing, self._shape, traffic_class)
            slots = self.store.reserve([i for i, there in zip(missing, held, strict=True) if not there], SMALL)
            sums = [checksum(self.store.arena.view(slot)) for slot in slots]
            self.store.commit(slots, sums, self._shape, traffic_class, verified=True, durable=False)
            self.store.drain()
        while self.store.maintain() < 1.0:
            self.clock.advance(0.02)


def requests_of(trace: Path) -> Iterator[Request]:
    return merged([open_trace(trace, "agent")], 128, SESSION_GAP_SECONDS)


def amplification(run: Run, trace: Path, limit: int, share: float, directory: Path) -> None:
    distinct: set[int] = set()
    requests: list[Request] = []
    for request in requests_of(trace):
        if len(distinct) > limit:
            break
        distinct.update(request.keys)
        requests.append(request)
    replay = Replay(directory / "replay", int(share * len(distinct) * PAGE))
    try:
        started = replay.clock.now() - requests[0].at
        for request in requests:
            replay.clock.advance(max(0.0, started + request.at - replay.clock.now()))
            replay.ask(request)
        value = replay.store.disk.write_amplification
        params = {
            "requests": len(requests),
            "distinct_blocks": len(distinct),
            "capacity": share,
            "days": round((requests[-1].at - requests[0].at) / DAY, 2),
            "hit_share_of_blocks": round(replay.hit / replay.asked, 4),
            "evicted_blocks": replay.store.events["evicted_blocks"],
            "expired_blocks": replay.store.events["expired_blocks"],
            "rewritten_blocks": replay.store.events["rewritten_blocks"],
            "written_blocks": replay.store.events["written_blocks"],
        }
        run.results.append(
            Result("write amplification", params, value, (value, value), "x", target=MAX_AMPLIFICATION, at_most=True)
        )
    finally:
        replay.store.close()


# ---- readers ---------------------------------------------------------------------------------------------------------


class Reading:
    """A client that loads prompts, one after the other; seconds of each load."""

    def __init__(self, client: BenchClient, prompts: Sequence[Sequence[bytes]], seed: int) -> None:
        self._client = client
        self._prompts = prompts
        self._random = random.Random(seed)
        self._targets = Blocks(PAYLOAD_BYTES, PROMPT_BLOCKS).views

    def all(self) -> None:
        for prompt in self._prompts:
            self._client.get(prompt, self._targets)

    def some(self, seconds: float) -> list[float]:
        taken = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            started = time.perf_counter()
            self._client.get(self._random.choice(self._prompts), self._targets)
            taken.append(time.perf_counter() - started)
        return taken


def readers(run: Run, prompts: int, seconds: float, directory: Path) -> None:
    offset = directory / "offset"
    offset.write_text("0")
    size = prompts * PROMPT_BLOCKS * PAYLOAD_BYTES
    options = ["--clock-offset-file", str(offset), "--store-bytes", str(8 * size), "--segment-bytes", "64MiB"]
    with DaemonProcess(192 << 20, directory, options) as daemon:
        client = BenchClient(daemon.address, PAYLOAD_BYTES)
        try:
            client.warm()
            names = [
                [number.to_bytes(8, "little") + block.to_bytes(8, "little") for block in range(PROMPT_BLOCKS)]
                for number in range(prompts)
            ]
            source = Blocks(PAYLOAD_BYTES, PROMPT_BLOCKS).views
            for name in names:
                client.put(name, source)
                client.wait_flushed()
            reading = Reading(client, names, seed=3)
            _move(offset, 2.9 * DAY)
            reading.all()
            quiet = reading.some(seconds)
            _move(offset, 3.3 * DAY)
            busy: list[float] = []
            before = fetch_report(daemon.address).events.get("rewritten_blocks", 0)
            deadline = time.monotonic() + 60
            while (done := fetch_report(daemon.address).events.get("rewritten_blocks", 0)) < prompts * PROMPT_BLOCKS:
                taken = reading.some(0.25)
                busy += taken if done > before else []
                if time.monotonic() > deadline:
                    run.skipped["readers"] = f"only {done} blocks were written again within a minute"
                    break
            quiet += reading.some(seconds)
        finally:
            client.close()
    base = percentile(quiet, 0.99)
    params = {
        "loads_quiet": len(quiet),
        "loads_busy": len(busy),
        "bytes_of_a_load": PROMPT_BLOCKS * PAYLOAD_BYTES,
        "rewritten_bytes": size,
        "p50_quiet_ms": round(1e3 * percentile(quiet, 0.5), 3),
        "p50_busy_ms": round(1e3 * percentile(busy, 0.5), 3) if busy else None,
    }
    value = percentile(busy, 0.99) if busy else float("nan")
    run.results.append(
        Result(
            "p99 of a load while blocks are written again",
            params,
            value,
            (min(busy, default=0.0), max(busy, default=0.0)),
            "s",
            baseline=Baseline("p99 of a load before and after", base),
            target=MAX_SLOWDOWN,
            at_most=True,
        )
    )


def _move(offset: Path, seconds: float) -> None:
    scratch = offset.with_suffix(".new")
    scratch.write_text(str(seconds))
    scratch.replace(offset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="an agent trace; default: one is made, as by `cachesvc workload`")
    parser.add_argument("--sessions", type=int, default=300, help="of the trace that is made")
    parser.add_argument("--blocks", type=int, default=300_000, help="distinct blocks of the trace that are played")
    parser.add_argument("--capacity", type=float, default=0.5, help="room, by the distinct blocks")
    parser.add_argument("--prompts", type=int, default=400, help=f"of {PROMPT_BLOCKS} blocks, for the readers")
    parser.add_argument("--seconds", type=float, default=8.0, help="of quiet, before and after")
    parser.add_argument("--store", type=Path, help="directory for the stores; default: where temporary files go")
    parser.add_argument("--only", choices=("amplification", "readers"))
    parser.add_argument("--json", action="store_true", help="JSON is what it prints; accepted for uniformity")
    parser.add_argument("--quick", action="store_true", help="a shorter trace and fewer prompts")
    given = parser.parse_args()
    if given.quick:
        given.blocks, given.prompts, given.seconds = 60_000, 120, 3.0
    run = Run("bench/housekeeping.py", {"blocks": given.blocks, "capacity": given.capacity, "prompts": given.prompts})
    directory = Path(tempfile.mkdtemp(prefix="cachesvc-housekeeping-", dir=given.store))
    try:
        if given.only != "readers":
            trace = given.trace
            if trace is None:
                trace = directory / "agent.jsonl"
                trace.write_text("".join(agent_trace("agent", given.sessions, seed=1)))
            amplification(run, trace, given.blocks, given.capacity, directory)
        if given.only != "amplification":
            readers(run, given.prompts, given.seconds, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(run.to_json(), indent=2))
    sys.exit(0 if all(result.passes is not False for result in run.results) else 1)


if __name__ == "__main__":
    main()
