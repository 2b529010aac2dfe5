"""``cachesvc bench``: how fast this daemon is here, beside what this machine can do at all."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from cachesvc.cli import options
from cachesvc.cli._console import wide_console
from cachesvc.cli._daemon import fetch_report
from cachesvc.config import parse_size
from cachesvc.errors import CacheError, ConfigError

Quick = Annotated[bool, typer.Option("--quick", help="small sizes and few repeats: less than a minute")]
Repeats = Annotated[int | None, typer.Option(min=1, help="times that each number is taken; default: 9, quick 5")]
Moved = Annotated[str | None, typer.Option("--bytes", help="moved by each repeat; default: 256MiB, quick 64MiB")]
ArenaBytes = Annotated[str | None, typer.Option(help="arena of the daemon to start; default: 4GiB, quick 1GiB")]
Directory = Annotated[Path | None, typer.Option(help="where the daemon to start keeps its temporary store")]
Address = Annotated[str | None, typer.Option(help="a running daemon, unix:PATH or HOST:PORT; default: start one")]


def bench(
    quick: Quick = False,
    as_json: options.Json = False,
    address: Address = None,
    repeats: Repeats = None,
    moved_bytes: Moved = None,
    arena_bytes: ArenaBytes = None,
    store: Directory = None,
) -> None:
    """Measures get, put, match and remote clients beside what the machine itself can do. Starts its own daemon."""
    # Here and not above: the benchmark is a client, and `cachesvc serve` has no use for one.
    from cachesvc.benchmark.harness import Run
    from cachesvc.benchmark.process import DaemonProcess, default_arena_bytes
    from cachesvc.benchmark.suite import Plan, measure
    from cachesvc.benchmark.table import rich_table
    from cachesvc.connector.errors import CacheError as ConnectorError

    try:
        size = parse_size(moved_bytes or ("64MiB" if quick else "256MiB"))
        arena = parse_size(arena_bytes) if arena_bytes else default_arena_bytes(quick=quick)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    # An orderly end on SIGTERM too: the daemon and its temporary store must not outlive us.
    signal.signal(signal.SIGTERM, _terminated)
    console = Console(stderr=True)
    with ExitStack() as stack:
        remote: str | None = None
        if address is None:
            daemon = stack.enter_context(DaemonProcess(arena, store))
            address, remote = daemon.address, daemon.tcp_address
        elif not address.startswith("unix:"):
            remote = address
        plan = Plan(
            address=address,
            remote_address=remote,
            arena_bytes=fetch_report(address).arena_bytes,
            repeats=repeats or (5 if quick else 9),
            moved_bytes=size,
            remote_bytes=size // 4,
            lookups=50 if quick else 400,
        )
        run = Run("cachesvc bench", {"quick": quick, "repeats": plan.repeats, "arena_bytes": plan.arena_bytes})
        status = stack.enter_context(console.status("starting"))
        try:
            measure(plan, run, lambda text: status.update(f"{text} …"))
        except ConnectorError as error:
            raise CacheError(f"the daemon at {address} failed a call: {error}") from error
    result = run.to_json()
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        console = wide_console()
        console.print(rich_table(result))
        for name, why in run.skipped.items():
            console.print(f"not measured: {name}: {why}")


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
