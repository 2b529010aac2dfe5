"""``cachesvc report``: hit rate by tokens over a time, by class, model, tenant, tier, reason or hour."""

from __future__ import annotations

import csv
import json
import math
import sys
import time
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.live import Live
from rich.table import Table

from cachesvc.cli import options
from cachesvc.cli._console import wide_console
from cachesvc.cli._text import printable
from cachesvc.config import parse_duration
from cachesvc.errors import ConfigError
from cachesvc.limits import ROLLUP_DAYS
from cachesvc.reporting.history import History, fetch_history, fitting_width, grouped, sum_rows, summary

_WATCH_SECONDS: Final = 2.0
_CHART_BUCKETS: Final = 150


class By(StrEnum):
    CLASS = "class"
    MODEL = "model"
    TENANT = "tenant"
    HOUR = "hour"
    TIER = "tier"
    REASON = "reason"


def report(
    address: Annotated[list[str] | None, typer.Option(help="unix:PATH or HOST:PORT; several are merged")] = None,
    since: Annotated[str | None, typer.Option(help="start: 2026-12-31, 2026-12-31T10:00 or seconds (UTC)")] = None,
    until: Annotated[str | None, typer.Option(help="end, likewise; now unless given")] = None,
    last: Annotated[str | None, typer.Option(help="instead of --since: the last 24h, 7d, ...")] = None,
    by: Annotated[list[By] | None, typer.Option(help="rows by this; repeat it for combinations")] = None,
    as_json: options.Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="print CSV")] = False,
    html: Annotated[Path | None, typer.Option(help="write a self-contained page with charts there")] = None,
    watch: Annotated[bool, typer.Option(help="show the table anew every 2 s, until Ctrl-C")] = False,
) -> None:
    """Prints the hit rate by tokens (hit tokens / all input tokens), and what an infinite cache would have had."""
    by = by or [By.CLASS, By.MODEL]
    if len(by) > 1 and (By.TIER in by or By.REASON in by):
        raise ConfigError("--by tier and --by reason go with no other --by")
    if as_json + as_csv + watch + (html is not None) > 1:
        raise ConfigError("give only one of --json, --csv, --html and --watch")

    def fetch(buckets: int = 0) -> History:
        start, end = span(since, until, last, time.time())
        length = min(end, time.time()) - (start or time.time() - ROLLUP_DAYS * 86_400)
        width = fitting_width(length, buckets) if buckets else 3_600 if By.HOUR in by else 0
        return fetch_history(address or [None], start, end, width)

    if html is not None:
        history = fetch(_CHART_BUCKETS)
        starts = list(history.buckets)
        if starts:  # finer, when all happened in a part of that time
            width = fitting_width(starts[-1] - starts[0] + history.width, _CHART_BUCKETS)
            if width < history.width:
                history = fetch_history(address or [None], starts[0], starts[-1] + history.width, width)
        _write_page(html, history)
    elif as_json:
        print(json.dumps(_as_json(fetch(), by), indent=2))
    elif as_csv:
        _print_csv(_rows(fetch(), by), by)
    elif watch:
        _watch(lambda: _table(fetch(), by))
    else:
        wide_console().print(_table(fetch(), by))


def span(since: str | None, until: str | None, last: str | None, now: float) -> tuple[float, float]:
    """Start and end, seconds since the epoch; 0 and infinity where nothing is given. Raises `ConfigError`."""
    if last is not None:
        if since is not None:
            raise ConfigError("give --since or --last, not both")
        try:
            start = now - parse_duration(last)
        except ValueError as error:
            raise ConfigError(f"--last {error}") from error
        if start == now:
            raise ConfigError(f"--last {last} is no time")
    else:
        start = _moment("--since", since) if since is not None else 0.0
    end = _moment("--until", until) if until is not None else math.inf
    if start < 0:
        raise ConfigError(f"the time begins {-start:.0f} s before 1970; nothing was counted then")
    if end <= start:
        raise ConfigError(f"the time ends at {until} before it begins")
    return start, end


def _moment(flag: str, text: str) -> float:
    try:
        if text.replace(".", "", 1).isdigit() and len(text) < 20:
            return float(text)
        return _utc(datetime.fromisoformat(text)).timestamp()
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{flag} {text!r} is no time such as 2026-12-31, 2026-12-31T10:00 or 1790000000") from error


def _utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _rows(history: History, by: list[By]) -> list[dict[str, Any]]:
    total = summary(sum_rows(history.total.rows.values()))
    if by == [By.TIER]:
        return [_part("tier", name, n, total) for name, n in total["hit_tokens_by_tier"].items()]
    if by == [By.REASON]:
        return [_part("reason", name, n, total) for name, n in total["miss_tokens_by_reason"].items()]
    names = ["traffic_class" if name is By.CLASS else name.value for name in by]
    groups = grouped(history.buckets, names)
    return [dict(zip(by, map(_readable, by, label), strict=True)) | summary(row) for label, row in groups.items()]


def _part(kind: str, name: str, tokens: int, total: dict[str, Any]) -> dict[str, Any]:
    share = tokens / total["input_tokens"] if total["input_tokens"] else 0.0
    return {kind: name, "tokens": tokens, "share_of_input": share, "input_tokens": total["input_tokens"]}


def _readable(name: By, label: str) -> str:
    return datetime.fromtimestamp(int(label), UTC).isoformat()[:16] if name is By.HOUR else label


def _as_json(history: History, by: list[By]) -> dict[str, Any]:
    total = summary(sum_rows(history.total.rows.values()))
    return {"daemons": history.daemons, "by": list(by), "rows": _rows(history, by), "total": total}


def _print_csv(rows: list[dict[str, Any]], by: list[By]) -> None:
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row)) or [*by, *_flat(summary({}))]
    writer = csv.DictWriter(sys.stdout, names, restval=0)
    writer.writeheader()
    writer.writerows(flat)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    parts = {"hit_tokens_by_tier": "hit_tokens.", "miss_tokens_by_reason": "miss_tokens."}
    flat = {name: _cell(value) for name, value in row.items() if name not in parts}
    for name, prefix in parts.items():
        flat |= {prefix + key: value for key, value in row.get(name, {}).items()}
    return flat


def _cell(value: Any) -> Any:
    """A spreadsheet must not take a client's name for a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _table(history: History, by: list[By]) -> Table | str:
    rows = _rows(history, by)
    total = summary(sum_rows(history.total.rows.values()))
    if not rows:
        return "No lookups in this time."
    if by in ([By.TIER], [By.REASON]):
        table = Table(by[0], title=f"{'Hits' if by == [By.TIER] else 'Misses'} by tokens")
        for name in ("tokens", "share of input"):
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(row[by[0]], f"{row['tokens']:,}", f"{row['share_of_input']:.2%}")
        return table
    table = Table(*by, title="Hit rate by tokens: hit tokens / input tokens", caption=_caption(history))
    for name in ("passes", "input tokens", "hit tokens", "hit rate", "ceiling"):
        table.add_column(name, justify="right")
    for name in ("other", "hits by tier", "misses by reason"):
        table.add_column(name, overflow="fold", no_wrap=True)
    for row in rows:
        _add(table, [printable(str(row[name])) for name in by], row)
    if len(rows) > 1:
        table.add_section()
        _add(table, ["all"] + [""] * (len(by) - 1), total)
    return table


def _caption(history: History) -> str:
    daemons = f" {history.daemons} daemons: the ceiling of each for itself." if history.daemons > 1 else ""
    return f"Ceiling: what an infinite cache would have hit, estimated.{daemons}"


def _add(table: Table, labels: list[str], row: dict[str, Any]) -> None:
    other = {"local": row["local_tokens"], "pending": row["pending_tokens"]}
    table.add_row(
        *labels,
        f"{row['passes']:,}",
        f"{row['input_tokens']:,}",
        f"{row['hit_tokens']:,}",
        f"{row['hit_rate']:.2%}",
        f"{row['ceiling_rate']:.2%} ± {row['ceiling_rate_error']:.2%}",
        _lines(other),
        _lines(row["hit_tokens_by_tier"]),
        _lines(row["miss_tokens_by_reason"]),
    )


def _lines(counts: dict[str, int]) -> str:
    return "\n".join(f"{name} {tokens:,}" for name, tokens in counts.items() if tokens) or "-"


def _watch(table: Any) -> None:
    try:
        while not sys.stdout.isatty():  # a file or a pipe gets one table after the other
            wide_console().print(table())
            sys.stdout.flush()
            time.sleep(_WATCH_SECONDS)
        with Live(table(), console=wide_console(), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(_WATCH_SECONDS)
                live.update(table(), refresh=True)
    except KeyboardInterrupt:
        return


def _write_page(path: Path, history: History) -> None:
    from cachesvc.reporting.page import page  # needs the extra `plots`

    try:
        path.write_text(page(history, time.time()), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    print(f"wrote {path}")
