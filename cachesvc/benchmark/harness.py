"""The one language of all benchmarks: results, the machine they were taken on, and sides that are timed in turns."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

MIN_REPEATS: Final = 5
"""Fewer repeats have no median worth printing; tests of the plumbing may take fewer."""


@dataclass(frozen=True)
class Baseline:
    """The other side of a ratio, measured in the same run."""

    name: str
    value: float


@dataclass(frozen=True)
class Result:
    """One measured number: the median, and `spread`, the lowest and the highest. `target` is what `ratio` must reach.

    Without a baseline `target` speaks of `value`. With `at_most` it is a ceiling instead of a floor.
    """

    name: str
    params: Mapping[str, Any]
    value: float
    spread: tuple[float, float]
    unit: str
    baseline: Baseline | None = None
    target: float | None = None
    at_most: bool = False

    @property
    def ratio(self) -> float | None:
        return self.value / self.baseline.value if self.baseline is not None and self.baseline.value else None

    @property
    def passes(self) -> bool | None:
        reached = self.value if self.baseline is None else self.ratio
        if self.target is None or reached is None:
            return None
        return reached <= self.target if self.at_most else reached >= self.target

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "params": dict(self.params),
            "value": _rounded(self.value),
            "spread": [_rounded(end) for end in self.spread],
            "unit": self.unit,
            "baseline": None
            if self.baseline is None
            else {"name": self.baseline.name, "value": _rounded(self.baseline.value)},
            "ratio": None if self.ratio is None else _rounded(self.ratio),
            "target": self.target,
            "at_most": self.at_most,
            "pass": self.passes,
        }


@dataclass
class Run:
    """All results of one benchmark. `skipped` says what could not be measured, and why."""

    benchmark: str
    params: Mapping[str, Any]
    results: list[Result] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    when: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    gpu: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "when": self.when,
            "host": asdict(host()) | {"gpu": self.gpu},
            "params": dict(self.params),
            "results": [result.to_json() for result in self.results],
            "skipped": dict(self.skipped),
        }


@dataclass(frozen=True)
class Host:
    cpu: str
    cores: int
    memory: int
    kernel: str
    gpu: str | None = None


def host() -> Host:
    """This machine. `memory` is in bytes; `gpu` is for the benchmarks to say that use one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Host(cpu, len(os.sched_getaffinity(0)), memory, platform.release())


@dataclass(frozen=True)
class Side:
    """One contestant: `run` is timed, `before` and `after` are not. What `run` returns, if not None, is taken as the
    seconds it took: for a side that measures itself, in another process."""

    name: str
    run: Callable[[], float | None]
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Times:
    """Seconds of each repeat of one side."""

    seconds: Sequence[float]

    def rate(self, amount: float) -> tuple[float, tuple[float, float]]:
        """Median and spread of `amount` per second."""
        return amount / statistics.median(self.seconds), (amount / max(self.seconds), amount / min(self.seconds))


def interleaved(sides: Sequence[Side], repeats: int, warmups: int = 1) -> dict[str, Times]:
    """Times all sides in turns, so that whatever else the machine does meets them alike.

    The garbage collector is off while a side is timed. The first `warmups` rounds do not count: they make buffers,
    page tables and connections warm.
    """
    taken: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(warmups + repeats):
        for side in sides:
            side.before()
            seconds = timed(side.run)
            side.after()
            if number >= warmups:
                taken[side.name].append(seconds)
    return {name: Times(seconds) for name, seconds in taken.items()}


def timed(call: Callable[[], float | None]) -> float:
    """Seconds that `call` takes, or that it says it took."""
    gc.collect()
    gc.disable()
    try:
        started = time.perf_counter()
        own = call()
        elapsed = time.perf_counter() - started
    finally:
        gc.enable()
    return elapsed if own is None else own


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
