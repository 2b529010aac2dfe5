"""Runs the rules on two engines and one daemon."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cachesvc.connector.conformance.daemon import Daemon
from cachesvc.connector.conformance.driver import Driver, Engine
from cachesvc.connector.conformance.rules import RULES, Scene, Violation

__all__ = ["Result", "Violation", "check"]


@dataclass(frozen=True)
class Result:
    """`violation` is None where the rule holds."""

    rule: str
    text: str
    seconds: float
    violation: str | None = None


def check(
    driver: Driver,
    directory: Path,
    *,
    rules: Iterable[str] = (),
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """All rules, or those that are named, on engines of `driver`; `directory` is for the daemon and must be empty.

    Also that an engine starts without a daemon. What the engine itself raises is not caught.
    """
    wanted = set(rules)
    unknown = wanted - {rule.__name__ for rule in RULES}
    if unknown:
        raise ValueError(f"no rule {', '.join(sorted(unknown))}; there are {', '.join(r.__name__ for r in RULES)}")
    results = []
    with _scene(driver, directory) as (daemon, first, second):
        for rule in RULES:
            if wanted and rule.__name__ not in wanted:
                continue
            started, violation = time.monotonic(), None
            try:
                rule(Scene(driver, daemon, first, second, rule.__name__))
            except Violation as error:
                violation = str(error)
            if not daemon.running:
                daemon.start()
            text = (rule.__doc__ or "").strip()
            results.append(Result(rule.__name__, text, time.monotonic() - started, violation))
            on_result(results[-1])
    return results


@contextlib.contextmanager
def _scene(driver: Driver, directory: Path) -> Iterator[tuple[Daemon, Engine, Engine]]:
    """The second engine is opened before there is a daemon."""
    daemon = Daemon(directory)
    engines: list[Engine] = []
    try:
        engines.append(driver.open(daemon.address))
        daemon.start()
        engines.insert(0, driver.open(daemon.address))
        _meet(driver, daemon, *engines)
        yield daemon, engines[0], engines[1]
    finally:
        for engine in engines:
            engine.close()
        daemon.kill()


def _meet(driver: Driver, daemon: Daemon, first: Engine, second: Engine) -> None:
    """Both have found the daemon, however long ago they were opened."""
    scene = Scene(driver, daemon, first, second, "meet")
    prompt = scene.prompt(2 * driver.block_tokens + driver.replayed_tokens + 1)
    scene.until_hit(prompt, scene.store(prompt))
