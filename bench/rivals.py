"""cachesvc beside other stores on this host: ``python bench/rivals.py [--quick] [--only NAME] [--json]``.

All of them in turns in one run, each with its own server and client process. A rival that does not install or start is
left out, and the result says why.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import platformdirs
from environments import OWN, InstallError, Requirements, provide
from remote_side import RemoteSide, SideFailed
from rich.console import Console

from cachesvc.benchmark.harness import MIN_REPEATS, Baseline, Result, Run, Side, Times, interleaved, percentile
from cachesvc.benchmark.table import rich_table

MIB = 1 << 20
OURS = "cachesvc"


@dataclass(frozen=True)
class Entry:
    """Where a store's class lies, and what it needs; None: what this benchmark runs in."""

    where: tuple[str, str]
    requirements: Requirements | None = None


MOONCAKE = Requirements(
    pip=[["mooncake-transfer-engine-non-cuda"]],
    debian=["libibverbs1", "librdmacm1", "libnuma1", "libnl-3-200", "libnl-route-3-200"],
)
STORES = {
    OURS: Entry(("sides.ours", "Ours")),
    "mooncake": Entry(("sides.mooncake", "Mooncake"), MOONCAKE),
    "mooncake-memcpy": Entry(("sides.mooncake", "MooncakeMemcpy"), MOONCAKE),
    "lmcache-mp": Entry(("sides.lmcache_mp", "LMCacheMP"), Requirements(pip=[["torch==2.13.0"], ["lmcache==0.5.6"]])),
    "lmcache-tcp": Entry(
        ("sides.lmcache_tcp", "LMCacheTCP"), Requirements(pip=[["torch==2.13.0"], ["lmcache==0.5.6"]])
    ),
    "redis": Entry(
        ("sides.redis", "Redis"),
        Requirements(debian=["redis-server", "redis-tools", "libjemalloc2", "liblzf1"]),
    ),
}
NO_SERVER = {"mooncake-memcpy"}
"""Their payloads lie in the client's own process and end with it: shown, but no target is set against them."""

ENVIRONMENTS = {"mooncake-memcpy": "mooncake", "lmcache-mp": "lmcache", "lmcache-tcp": "lmcache"}
"""Stores that share one."""

TARGETS: dict[int, float | None] = {113_920: 1.5, MIB: 1.0, 4 * MIB: 1.0, 16 * MIB: None}
"""Of our speed to each rival's, by block size."""

LOOKUP_BYTES, LOOKUP_KEYS, LOOKUP_TARGET = 4096, 1000, 1.2


class Rivals:
    """The stores that take part, and what is measured of them."""

    def __init__(self, run: Run, repeats: int, moved_bytes: int, lookups: int, say: Callable[[str], None]) -> None:
        self._run = run
        self._repeats = repeats
        self._moved_bytes = moved_bytes
        self._lookups = lookups
        self._say = say
        self._sides: dict[str, RemoteSide] = {}

    def start(self, names: Sequence[str], cache: Path, scratch: Path, memory: int) -> None:
        for name in names:
            entry = STORES[name]
            self._say(f"{name}: installing and starting (minutes, the first time)")
            directory = scratch / name
            directory.mkdir()
            try:
                environment = (
                    OWN
                    if entry.requirements is None
                    else provide(ENVIRONMENTS.get(name, name), entry.requirements, cache)
                )
                self._sides[name] = RemoteSide(name, entry.where, environment, directory, memory)
                self._sides[name].order("start")
            except InstallError as error:
                self._leave_out(SideFailed(name, f"does not install: {error}"))
            except SideFailed as error:
                self._leave_out(error)

    def close(self) -> None:
        for side in self._sides.values():
            side.close()
        self._sides = {}

    def measure(self) -> None:
        for size, target in TARGETS.items():
            count = max(1, min(512, self._moved_bytes // size))
            self._say(f"{count} blocks of {size:,} bytes")
            self._each(lambda side: side.order("allocate", size=size, count=count))  # noqa: B023
            puts = self._in_turns("put", before="fresh", after="settle")
            gets = self._in_turns("get")
            self._each(lambda side: side.order("check"))
            params = {"block_bytes": size, "blocks": count}
            for what, times in (("put", puts), ("get", gets)):
                rates = {name: taken.rate(size * count / 1e9) for name, taken in times.items()}
                for name, (rate, _) in rates.items():
                    if name != OURS:
                        value, spread = rates[OURS]
                        self._run.results.append(
                            Result(
                                what,
                                params,
                                value,
                                spread,
                                "GB/s",
                                Baseline(name, rate),
                                None if name in NO_SERVER else target,
                            )
                        )
                if len(rates) == 1:
                    self._run.results.append(Result(what, params, *rates[OURS], "GB/s"))
        self._look_up()

    def _look_up(self) -> None:
        self._say(f"look-up of {LOOKUP_KEYS:,} keys")
        self._each(lambda side: side.order("allocate", size=LOOKUP_BYTES, count=LOOKUP_KEYS))
        for order in ("fresh", "put", "settle"):
            self._each(lambda side: side.order(order))  # noqa: B023
        taken: dict[str, list[list[float]]] = {name: [] for name in self._sides}
        for number in range(1 + self._repeats):
            for name, seconds in self._each(lambda side: side.order("exists", calls=self._lookups)).items():
                if number:
                    taken[name].append(seconds)
        medians = {
            name: [1e3 * percentile(seconds, 0.5) for seconds in repeats]
            for name, repeats in taken.items()
            if name in self._sides
        }
        values = {name: statistics.median(each) for name, each in medians.items()}
        spread = (min(medians[OURS]), max(medians[OURS]))
        params = {"keys": LOOKUP_KEYS}
        rivals = sorted((value, name) for name, value in values.items() if name != OURS)
        for place, (value, name) in enumerate(rivals):
            target = None if place else LOOKUP_TARGET  # it speaks of the best of them
            baseline = Baseline(name, value)
            self._run.results.append(
                Result("match p50", params, values[OURS], spread, "ms", baseline, target, at_most=True)
            )
        if not rivals:
            self._run.results.append(Result("match p50", params, values[OURS], spread, "ms"))

    def _in_turns(self, do: str, before: str = "", after: str = "") -> dict[str, Times]:
        """All stores in turns; again without the one that fails."""

        def nothing() -> None: ...

        while True:
            sides = [
                Side(
                    name,
                    lambda side=side: side.order(do),  # type: ignore[misc]
                    (lambda side=side: side.order(before)) if before else nothing,  # type: ignore[misc]
                    (lambda side=side: side.order(after)) if after else nothing,  # type: ignore[misc]
                )
                for name, side in self._sides.items()
            ]
            try:
                return interleaved(sides, self._repeats)
            except SideFailed as error:
                self._leave_out(error)

    def _each(self, call: Callable[[RemoteSide], Any]) -> dict[str, Any]:
        answers = {}
        for name, side in list(self._sides.items()):
            try:
                answers[name] = call(side)
            except SideFailed as error:
                self._leave_out(error)
        return answers

    def _leave_out(self, error: SideFailed) -> None:
        """Raises it again when it is our own store that fails: then there is nothing to compare."""
        side = self._sides.pop(error.name, None)
        if side is not None:
            side.close()
        if error.name == OURS:
            raise error
        self._say(f"{error.name} is left out: {error}")
        self._run.skipped[error.name] = str(error)


def main() -> int:
    """Exit code: 0 measured, 2 it could not be."""
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    quick = options.quick
    repeats = options.repeats or (MIN_REPEATS if quick else 9)
    moved = (32 if quick else 128) * MIB
    memory = 8 * moved if not quick else 16 * moved
    console = Console(stderr=True)
    run = Run("bench/rivals.py", {"quick": quick, "repeats": repeats, "memory_each": memory})
    rivals = Rivals(run, repeats, moved, 20 if quick else 100, lambda text: console.print(text, highlight=False))
    names = [OURS, *(options.only or [name for name in STORES if name != OURS])]
    with tempfile.TemporaryDirectory(prefix="cachesvc-rivals-") as scratch:
        try:
            rivals.start(names, options.cache, Path(scratch), memory)
            rivals.measure()
        except SideFailed as error:
            console.print(f"rivals: {error.name} fails: {error}", highlight=False)
            return 2
        finally:
            rivals.close()
    result = run.to_json()
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        out = Console(width=None if sys.stdout.isatty() else 200)
        out.print(rich_table(result))
        for name, why in run.skipped.items():
            out.print(f"left out: {name}: {why}", highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="cachesvc beside other stores on this host, in one run.")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats")
    parser.add_argument("--only", action="append", choices=[name for name in STORES if name != OURS], help="one rival")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repeats", type=int, metavar="N", help="times that each number is taken (9, quick 5)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=platformdirs.user_cache_path("cachesvc") / "rivals",
        metavar="DIR",
        help="where rivals are installed, once (default %(default)s)",
    )
    return parser


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
