"""How fast `cachesvc replay` is, and how much memory it takes: one core, made traffic, from the file to the result.

The same file is replayed by LRU, by the one-pass curve and, as a baseline, only read, in turns. Then one process each
replays a trace of 100 million block references.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from cachesvc.benchmark.harness import Baseline, Result, Run, Side, interleaved
from cachesvc.trace.curve import Curve
from cachesvc.trace.formats import Request, merged, open_trace
from cachesvc.trace.replay import replay, simulations
from cachesvc.trace.simulate import Simulation
from cachesvc.trace.workload import Workload, agent_trace, own_trace

TARGET_RATE: Final = 500_000
TARGET_BYTES: Final = 2 << 30
BLOCK: Final = 128
CAPACITY: Final = 200_000

REPLAYS: Final[dict[str, Sequence[str]]] = {
    "lru": ("--blocks", str(CAPACITY)),
    "curve": ("--curve",),
}


def read(path: Path) -> list[Request]:
    return list(merged([open_trace(path)], BLOCK, 60.0))


def replayed(path: Path, make: Callable[[], list[Simulation | Curve]]) -> None:
    replay(merged([open_trace(path)], BLOCK, 60.0), make())


def rates(run: Run, kind: str, path: Path, repeats: int) -> None:
    references = sum(len(request.keys) for request in read(path))
    makes: dict[str, Callable[[], list[Simulation | Curve]]] = {
        "only read": list,
        "lru": lambda: [*simulations(["lru"], [CAPACITY], [None], BLOCK)],
        "fifo": lambda: [*simulations(["fifo"], [CAPACITY], [None], BLOCK)],
        "s3fifo": lambda: [*simulations(["s3fifo"], [CAPACITY], [None], BLOCK)],
        "curve": lambda: [Curve()],
    }
    times = interleaved([Side(name, partial(replayed, path, make)) for name, make in makes.items()], repeats)
    baseline = Baseline("only read", times["only read"].rate(references)[0])
    for name in makes:
        rate, spread = times[name].rate(references)
        params = {"trace": kind, "references": references, "only_read_per_s": round(baseline.value)}
        target = TARGET_RATE if name in ("lru", "curve") else None
        run.results.append(Result(f"replay, {name}", params, rate, spread, "references/s", target=target))


def peaks(run: Run, path: Path, references: int) -> None:
    """Peak memory and rate of a process of its own for each kind of replay."""
    for name, arguments in REPLAYS.items():
        command = [sys.executable, "-m", "cachesvc", "replay", str(path), *arguments, "--json"]
        with tempfile.TemporaryFile() as out:
            process = os.posix_spawn(
                sys.executable, command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, out.fileno(), 1)]
            )
            _, status, usage = os.wait4(process, 0)
        if status:
            run.skipped[f"peak memory, {name}"] = f"it ended with {os.waitstatus_to_exitcode(status)}"
            continue
        # Of the process itself: what else the machine does costs it time, but no work.
        seconds, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
        params = {"references": references}
        run.results.append(
            Result(f"peak memory, {name}", params, peak, (peak, peak), "B", target=TARGET_BYTES, at_most=True)
        )
        rate = references / seconds
        target = TARGET_RATE if name in ("lru", "curve") else None
        run.results.append(
            Result(f"large replay, {name}", params, rate, (rate, rate), "references/CPU s", target=target)
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller trace: less than a minute")
    parser.add_argument("--references", type=int, help="of the large trace; default: 100 million, quick 8 million")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    large = arguments.references or (8_000_000 if arguments.quick else 100_000_000)
    run = Run("bench/replay_speed.py", {"quick": arguments.quick, "references": large, "block": BLOCK})
    with tempfile.TemporaryDirectory() as directory:
        agents, chats, big = (Path(directory) / name for name in ("agents.jsonl", "chats.jsonl", "large.jsonl"))
        # First: a child's peak memory is never less than this process's own was.
        references = 0
        with big.open("w") as file:
            for line in agent_trace("agent", 1 << 30, 1):
                file.write(line)
                references += sum(request[1] // BLOCK for request in json.loads(line)["reqs"])
                if references >= large:
                    break
        peaks(run, big, references)
        agents.write_text("".join(agent_trace("agent", 30, 0)))
        chats.write_text("".join(own_trace(Workload(0, 6_000, 0, 0.5).requests(), 0)))
        rates(run, "agents, agent format", agents, arguments.repeats)
        rates(run, "chats, our own format", chats, arguments.repeats)
    result = run.to_json()
    print(json.dumps(result, indent=1))
    return 1 if any(row["pass"] is False for row in result["results"]) else 0


if __name__ == "__main__":
    sys.exit(main())
