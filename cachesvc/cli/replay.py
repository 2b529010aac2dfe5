"""``cachesvc replay``: what the hit rate would be with another capacity, TTL or policy."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cachesvc.cli import options
from cachesvc.cli._console import wide_console
from cachesvc.cli._recount import RECORDED, print_recount
from cachesvc.cli._text import printable
from cachesvc.cli._ttl import check_class, duration, parse_ttls
from cachesvc.config import parse_size
from cachesvc.errors import ConfigError
from cachesvc.trace.curve import Curve
from cachesvc.trace.formats import Request, Trace, common_block, merged, open_trace
from cachesvc.trace.plots import Picture
from cachesvc.trace.replay import ALL, Point, Row, points, rows, simulations, spread_capacities
from cachesvc.trace.replay import replay as run_replay
from cachesvc.trace.simulate import INFINITE, POLICIES, REASONS, TTL, Simulation

Traces = Annotated[
    list[Path], typer.Argument(metavar="TRACE...", help="our own, Mooncake or agent files, .gz or plain")
]
Block = Annotated[int | None, typer.Option(help="tokens a block; default: 128, or the trace's own if that is coarser")]
Blocks = Annotated[str | None, typer.Option(help="capacities in blocks: N[,N]")]
Capacity = Annotated[str | None, typer.Option(help="capacities in bytes: 1TB[,10TB]; with --bytes-per-token")]
BytesPerToken = Annotated[float | None, typer.Option(help="what the KV of a token takes")]
Ttl = Annotated[
    list[str] | None,
    typer.Option(
        help="600s for all classes, 60s,600s for one after the other, or agent=3d,chat=7d; repeat it for more"
    ),
]
TtlMode = Annotated[str | None, typer.Option(help="sliding (since last use, the default) or fixed (since written)")]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help="lru (default), fifo, s3fifo, infinite, several such as lru,s3fifo; or recorded: as the daemon counted",
    ),
]
SessionGap = Annotated[str, typer.Option(help="agent files: the k-th session starts at k times this")]
Classes = Annotated[list[str] | None, typer.Option("--class", help="FILE=NAME: the class of a file; repeat it")]
Sample = Annotated[float | None, typer.Option(help="only this share of the blocks, e.g. 0.01; states its error")]
CurveOption = Annotated[bool, typer.Option("--curve", help="LRU at every capacity, in one pass")]
Plot = Annotated[Path | None, typer.Option(help="draw it: .png, .svg or .html")]

_SESSION_GAP: Final = "60s"
_WHOLE: Final = re.compile(r"-?\d{1,18}")
_LEAST_SAMPLE: Final = 1e-6
_TABLE_POINTS: Final = 16
_PROGRESS_REQUESTS: Final = 256
_MIN_SAMPLED: Final = 10
"""A cache of fewer sampled blocks says nothing."""


def replay(
    traces: Traces,
    block: Block = None,
    blocks: Blocks = None,
    capacity: Capacity = None,
    bytes_per_token: BytesPerToken = None,
    ttl: Ttl = None,
    ttl_mode: TtlMode = None,
    policy: PolicyOption = None,
    session_gap: SessionGap = _SESSION_GAP,
    classes: Classes = None,
    sample: Sample = None,
    curve: CurveOption = False,
    plot: Plot = None,
    as_json: options.Json = False,
) -> None:
    """Replays traces against caches that one might have: hit rate by tokens, and why the rest missed."""
    if policy == RECORDED:
        given = (block, blocks, capacity, bytes_per_token, ttl, ttl_mode, classes, sample, plot)
        if curve or session_gap != _SESSION_GAP or any(option is not None for option in given):
            raise ConfigError("--policy recorded counts what happened: it takes no other option but --json")
        print_recount(traces, as_json=as_json)
        return
    if block is not None and block <= 0:
        raise ConfigError(f"--block {block}: a block has at least 1 token")
    if bytes_per_token is not None and not 1e-3 <= bytes_per_token < 1e12:
        raise ConfigError(f"--bytes-per-token {bytes_per_token:g} must be more than 0.001, and less than 1e12")
    policies = _policies(policy, limited=blocks is not None or capacity is not None, curve=curve)
    ttls = _ttls(ttl, ttl_mode)
    scale = _scale(sample)
    if curve and ttls != [None]:
        raise ConfigError("--curve is of capacities alone: it cannot be had with --ttl")
    gap = duration("--session-gap", session_gap)
    picture = Picture(plot) if plot is not None else None
    opened = _open(traces, classes or [])
    size = common_block(opened, block)
    block_bytes = None if bytes_per_token is None else bytes_per_token * size
    capacities = _capacities(blocks, capacity, block_bytes)
    for ttl_ in ttls:
        for name in {name for trace in opened for name in trace.classes or ()}:
            if ttl_ is not None:
                ttl_.of(name)
    if scale > 1 and any(limit < _MIN_SAMPLED * scale for limit in capacities):
        raise ConfigError(
            f"--sample {sample:g} leaves fewer than {_MIN_SAMPLED} of {min(capacities)} blocks; sample more"
        )
    caches = [Curve()] if curve else simulations(policies, capacities, ttls, size)
    run_replay(_watched(opened, merged(opened, size, gap)), caches, scale)
    title = printable(f"{', '.join(trace.path.name for trace in opened)} at {size} tokens a block")
    found = [(cache, rows(cache, sampled=scale > 1)) for cache in caches if isinstance(cache, Simulation)]
    lru = next((cache for cache in caches if isinstance(cache, Curve)), None)
    shown = points(lru, size, sorted({*capacities, *spread_capacities(lru)})) if lru else []
    if picture and lru:
        picture.curve(title, shown)
    elif picture:
        picture.grid(title, [(cache, part[-1]) for cache, part in found])
    if as_json:
        result: dict[str, Any] = {
            "traces": [{"path": str(trace.path), "format": trace.name, "block": trace.block} for trace in opened],
            "block": size,
            "weight": "tokens",
            "sample": None if scale == 1 else {"rate": 1 / scale, "error": "twice the standard error"},
        }
        if lru:
            result |= {
                "requests": lru.requests,
                "input_tokens": lru.input_tokens,
                "distinct_blocks": lru.distinct_blocks,
                "curve": [point.to_json(block_bytes) for point in shown],
            }
        else:
            result["results"] = [_cell(cache, block_bytes) | row.to_json() for cache, part in found for row in part]
        print(json.dumps(result, indent=1))
        return
    console = wide_console()
    if lru:
        few = [point for point in shown if point.capacity in capacities] or shown[:: -(-len(shown) // _TABLE_POINTS)]
        console.print(_curve_table(title, lru, few))
    else:
        console.print(_grid_table(title, found))
    if scale > 1:
        console.print(
            f"Sampled: 1 block of {scale}; hot blocks and partial tails are exact. ± is twice the standard error."
        )
    if own := sum(part[-1].local_tokens for _, part in found[:1]):
        console.print(f"{own:,} input tokens were in the engines' own caches: neither hits nor misses.")
    if any(cache.forgotten for cache, _ in found):
        console.print("Blocks that left long ago were forgotten: some of never_seen is expired or evicted.")


# ---- what was given --------------------------------------------------------------------------------------------------


def _policies(text: str | None, *, limited: bool, curve: bool) -> list[str]:
    policies = ["lru" if limited or curve else INFINITE] if text is None else text.split(",")
    known = [*POLICIES, INFINITE]
    for policy in policies:
        if policy not in known:
            raise ConfigError(f"--policy {policy!r} is unknown; use {', '.join(known)}, or {RECORDED} alone")
    if curve and policies != ["lru"]:
        raise ConfigError(f"--curve is of lru alone: it cannot be had with --policy {text}")
    if limited and policies == [INFINITE]:
        raise ConfigError(
            "--policy infinite has no capacity: leave out --blocks and --capacity, or choose another policy"
        )
    if not limited and not curve and policies != [INFINITE]:
        raise ConfigError(f"--policy {text} needs a capacity: give --blocks, or --capacity with --bytes-per-token")
    return policies


def _ttls(given: Sequence[str] | None, mode: str | None) -> list[TTL | None]:
    if mode not in (None, "sliding", "fixed"):
        raise ConfigError(f"--ttl-mode {mode!r} is unknown; use sliding or fixed")
    if given:
        return [*parse_ttls(given, sliding=mode != "fixed")]
    if mode:
        raise ConfigError(f"--ttl-mode {mode} says nothing without --ttl")
    return [None]


def _capacities(blocks: str | None, capacity: str | None, block_bytes: float | None) -> list[int]:
    if blocks is not None and capacity is not None:
        raise ConfigError("--blocks and --capacity say the same in two ways: give one of them")
    if capacity is not None and block_bytes is None:
        raise ConfigError(f"--capacity {capacity} needs --bytes-per-token to become blocks")
    given = capacity if blocks is None else blocks
    found = []
    for text in [] if given is None else given.split(","):
        if blocks is not None and not _WHOLE.fullmatch(text):
            raise ConfigError(f"--blocks {text[:40]!r} is not a whole number such as 1000000")
        try:
            size = int(text) if blocks is not None else int(parse_size(text) // (block_bytes or 1))
        except ValueError as error:
            raise ConfigError(f"--capacity: {error}") from error
        if size <= 0:
            raise ConfigError(f"a capacity of {text} holds no block; it must hold at least 1")
        found.append(size)
    return found


def _scale(sample: float | None) -> int:
    if sample is None:
        return 1
    if not (_LEAST_SAMPLE <= sample <= 0.5 or sample == 1):
        raise ConfigError(
            f"--sample {sample:g}: it is the share of the blocks that is looked at, from {_LEAST_SAMPLE:g} to 0.5"
        )
    return round(1 / sample)


def _open(paths: Sequence[Path], classes: Sequence[str]) -> list[Trace]:
    chosen: dict[Path, str] = {}
    for text in classes:
        file, _, name = text.rpartition("=")
        matching = [path for path in paths if file in (str(path), path.name)]
        if not matching:
            raise ConfigError(f"--class {text} is not FILE=NAME with one of the traces")
        check_class("--class", text, name)
        chosen |= dict.fromkeys(matching, name)
    return [open_trace(path, chosen.get(path)) for path in paths]


def _watched(traces: Sequence[Trace], requests: Iterator[Request]) -> Iterator[Request]:
    """The same requests, with a progress bar on a terminal."""
    if not sys.stderr.isatty():
        yield from requests
        return
    total = sum(trace.size for trace in traces)
    with Progress(
        TextColumn("replaying"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("", total=total)
        for number, request in enumerate(requests):
            if number % _PROGRESS_REQUESTS == 0:
                progress.update(task, completed=sum(trace.position for trace in traces))
            yield request


# ---- what came out ---------------------------------------------------------------------------------------------------


def _cell(cache: Simulation, block_bytes: float | None) -> dict[str, Any]:
    size = None if block_bytes is None or cache.capacity is None else round(cache.capacity * block_bytes)
    return {
        "policy": cache.policy,
        "capacity_blocks": cache.capacity,
        "capacity_bytes": size,
        "ttl": None if cache.ttl is None else cache.ttl.text,
        "ttl_mode": None if cache.ttl is None else "sliding" if cache.ttl.sliding else "fixed",
        "forgotten_blocks": cache.forgotten,
    }


def _rate(rate: float, error: float) -> str:
    return f"{rate:.6f}" + (f" ± {error:.4f}" if error else "")


def _grid_table(title: str, found: Sequence[tuple[Simulation, Sequence[Row]]]) -> Table:
    table = Table("policy", "blocks", "TTL", "class", title=f"Hit rate by tokens: {title}")
    for name in ("requests", "input tokens", "hit tokens", "hit rate", *REASONS):
        table.add_column(name, justify="right")
    for cache, part in found:
        for row in part[1:] if len(part) == 2 else part:  # one class is all
            only = len(part) == 2
            table.add_row(
                cache.policy,
                "-" if cache.capacity is None else f"{cache.capacity:,}",
                "-" if cache.ttl is None else f"{cache.ttl.text}{'' if cache.ttl.sliding else ' fixed'}",
                part[0].traffic_class if only else row.traffic_class,
                f"{row.requests:,}",
                f"{row.input_tokens:,}",
                f"{row.hit_tokens:,}",
                _rate(row.hit_rate, row.hit_rate_error),
                *(f"{row.miss_tokens[reason]:,}" for reason in REASONS),
                end_section=row.traffic_class == ALL and not only,
            )
    return table


def _curve_table(title: str, curve: Curve, shown: Sequence[Point]) -> Table:
    table = Table(
        title=f"LRU, hit rate by tokens: {title}",
        caption=f"{curve.requests:,} requests, {curve.input_tokens:,} input tokens, {curve.distinct_blocks:,} blocks",
    )
    for name in ("blocks", "hit tokens", "hit rate"):
        table.add_column(name, justify="right")
    for point in shown:
        table.add_row(f"{point.capacity:,}", f"{point.hit_tokens:,}", _rate(point.hit_rate, point.hit_rate_error))
    return table
