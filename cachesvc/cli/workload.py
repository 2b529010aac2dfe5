"""``cachesvc workload``: seeded agent and chat traffic, to a file or against a live daemon."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from cachesvc.cli import options
from cachesvc.cli._console import wide_console
from cachesvc.cli._daemon import fetch_report
from cachesvc.config import parse_duration, parse_size
from cachesvc.errors import ConfigError
from cachesvc.keys import BLOCK_TOKENS
from cachesvc.limits import MAX_PAYLOAD_BYTES
from cachesvc.trace.formats import Request, common_block, merged, open_trace
from cachesvc.trace.workload import Workload, agent_trace, own_trace

Agents = Annotated[int, typer.Option(help="agent sessions", min=0)]
Chats = Annotated[int, typer.Option(help="chat sessions", min=0)]
Seed = Annotated[int, typer.Option(help="the same seed makes the same traffic", min=0)]
Gap = Annotated[str, typer.Option(help="the k-th session of a class starts at k times this")]
Requests = Annotated[int | None, typer.Option(help="stop after so many requests", min=1)]
Format = Annotated[str, typer.Option("--format", help="cachesvc (our own), or agent: one class, whole sessions")]
Out = Annotated[Path | None, typer.Option("--out", help="file to write, .gz packs it; - is the standard output")]
Play = Annotated[bool, typer.Option("--play", help="play it against a live daemon instead")]
Traces = Annotated[list[Path] | None, typer.Option("--trace", help="with --play: a trace instead; repeat it")]
Clock = Annotated[str, typer.Option(help="with --play: real waits as the traffic says, virtual does not")]
Rate = Annotated[float, typer.Option(help="with the virtual clock: requests a second; 0: as fast as it goes", min=0)]
OffsetFile = Annotated[
    Path | None,
    typer.Option(help="with the virtual clock: the daemon's clock_offset_file, so that it lives in the traffic's time"),
]
PayloadBytes = Annotated[str, typer.Option(help="with --play: size of a block's payload")]

_FORMATS: Final = ("cachesvc", "agent")
_CLOCKS: Final = ("virtual", "real")


def workload(
    agents: Agents = 0,
    chats: Chats = 0,
    seed: Seed = 0,
    session_gap: Gap = "60s",
    requests: Requests = None,
    trace_format: Format = "cachesvc",
    out: Out = None,
    play: Play = False,
    traces: Traces = None,
    address: options.Address = None,
    clock: Clock = "virtual",
    rate: Rate = 0.0,
    clock_offset_file: OffsetFile = None,
    payload_bytes: PayloadBytes = "1KiB",
    as_json: options.Json = False,
) -> None:
    """Makes agent and chat traffic from fitted parameters: a trace file, or load for a running daemon."""
    if not agents and not chats and not traces:
        raise ConfigError("there is nothing to make: give --agents or --chats")
    if traces and (not play or agents or chats):
        raise ConfigError("--trace goes with --play, and with neither --agents nor --chats")
    if (out is None) != play:
        raise ConfigError("give one of --out FILE and --play")
    for option, value, known in (("--format", trace_format, _FORMATS), ("--clock", clock, _CLOCKS)):
        if value not in known:
            raise ConfigError(f"{option} {value!r} is unknown; use {' or '.join(known)}")
    if clock == "real" and (rate or clock_offset_file):
        raise ConfigError("--clock real waits as the traffic says: it goes with neither --rate nor --clock-offset-file")
    try:
        gap, size = parse_duration(session_gap), parse_size(payload_bytes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not 0 < size <= MAX_PAYLOAD_BYTES:
        raise ConfigError(f"--payload-bytes {payload_bytes}: payloads have 1 to {MAX_PAYLOAD_BYTES} bytes")
    traffic = Workload(agents, chats, seed, gap)
    if play:
        opened = [open_trace(path) for path in traces or ()]
        block = common_block(opened, None) if opened else BLOCK_TOKENS
        stream = merged(opened, block, gap) if opened else traffic.requests()
        _play(islice(stream, requests), (seed, block, size), address, clock == "real", rate, clock_offset_file, as_json)
        return
    assert out is not None
    if trace_format == "agent":
        if (agents and chats) or requests is not None:
            raise ConfigError(
                "--format agent holds whole sessions of one class: give --agents or --chats, no --requests"
            )
        _write(out, agent_trace("agent" if agents else "chat", agents or chats, seed))
    else:
        _write(out, own_trace(traffic.requests(requests), seed))


def _write(out: Path, lines: Iterable[str]) -> None:
    if str(out) == "-":
        sys.stdout.writelines(lines)
        return
    try:
        with ExitStack() as stack:
            file: Any = stack.enter_context(out.open("wb"))
            if out.suffix == ".gz":  # without a time or a name inside: the same seed makes the same bytes
                file = stack.enter_context(gzip.GzipFile("", "wb", 6, file, 0))
            text = stack.enter_context(io.TextIOWrapper(file, encoding="ascii"))
            text.writelines(lines)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from error


def _play(
    requests: Iterable[Request],
    namespace: tuple[int, int, int],
    address: str | None,
    real: bool,
    rate: float,
    offset_file: Path | None,
    as_json: bool,
) -> None:
    # Here and not above: playing is a client's part, and `cachesvc serve` has no use for one.
    from cachesvc.benchmark.play import Pace, Played, play
    from cachesvc.rpc.address import client_address

    fetch_report(address)  # one line if there is no daemon
    with Console(stderr=True).status("playing …") as status:

        def tell(played: Played) -> None:
            status.update(f"playing … {played.requests:,} requests, {played.hits:,} of {played.input:,} tokens hit")

        pace = Pace(real=real, rate=rate, offset_file=offset_file)
        try:
            played = play(requests, str(client_address(address)), pace, *namespace, tell)
        except OSError as error:
            raise ConfigError(f"--clock-offset-file {offset_file} cannot be written: {error.strerror}") from error
    if as_json:
        print(json.dumps(asdict(played), indent=1))
    else:
        wide_console().print(
            f"{played.requests:,} requests in {played.seconds:.1f} s: {played.hits:,} of {played.input:,} input tokens "
            f"hit ({played.hits / (played.input or 1):.4f}); {played.stored_blocks:,} blocks stored, "
            f"{played.refused_blocks:,} not"
        )
