"""A daemon killed over and over under load: nothing that was acknowledged as durable is lost, no byte is ever wrong.

Each loop starts the daemon, compares everything in it with a model of what was acknowledged, lets clients work, and
kills the daemon with SIGKILL: at random; while a file grows, is sealed, is made, expires; while blocks in use are
written again; while it starts, and while it rebuilds its index. Two of three loops run on a store in which nothing may
be lost, the third on one that is too small, so that files are evicted all the time.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

from faulty.loops import KillLoops

from cachesvc.benchmark.harness import Result, Run

ZERO: Final = (
    "wrong_blocks", "durable_blocks_lost", "failed_restarts", "failed_stops", "faults_in_log", "budget_overruns",
)  # fmt: skip
"""What must not happen at all."""


def kill_loops(loops: int, seed: int, directory: Path, *, say: bool = False) -> tuple[Run, list[str]]:
    """`loops` kills; the second result says in words what went wrong."""
    run = Run("bench/faults.py", {"loops": loops, "seed": seed})
    lanes = [KillLoops(directory, seed=seed, strict=True), KillLoops(directory, seed=seed + 100, strict=False)]
    started = time.monotonic()
    try:
        for number in range(loops):
            lanes[number % 3 == 2].run()
            if say and (number + 1) % 10 == 0:
                faults = sum(len(lane.faults) for lane in lanes)
                print(f"{number + 1} loops, {time.monotonic() - started:.0f} s, {faults} faults", file=sys.stderr)
    except KeyboardInterrupt:
        print("ended early: this is what was done so far", file=sys.stderr)
    finally:
        for lane in lanes:
            lane.close()
    counts = lanes[0].counts + lanes[1].counts
    _report(run, counts, lanes[0].restart_seconds + lanes[1].restart_seconds)
    return run, [fault for lane in lanes for fault in lane.faults]


def _report(run: Run, counts: Counter[str], restarts: list[float]) -> None:
    for name in ZERO:
        value = counts.pop(name, 0)
        run.results.append(Result(name, {}, value, (value, value), "", target=0, at_most=True))
    for name, value in sorted(counts.items()):
        run.results.append(Result(name, {}, value, (value, value), ""))
    if restarts:
        spread = (min(restarts), max(restarts))
        run.results.append(Result("restart until it answers", {}, statistics.median(restarts), spread, "s"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loops", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", type=Path, help="directory for the stores; default: where temporary files go")
    parser.add_argument("--json", action="store_true", help="print nothing but the result (it always is JSON)")
    parser.add_argument("--quick", action="store_true", help="15 loops")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    directory = given.store or Path(tempfile.gettempdir())
    run, faults = kill_loops(15 if given.quick else given.loops, given.seed, directory, say=not given.json)
    print(json.dumps(run.to_json(), indent=2))
    sys.exit(1 if faults or any(result.passes is False for result in run.results) else 0)


if __name__ == "__main__":
    main()
