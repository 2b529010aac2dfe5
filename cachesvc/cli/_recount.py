"""``cachesvc replay --policy recorded``: what a daemon counted, counted again from its recording."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from cachesvc.cli._console import wide_console
from cachesvc.cli._text import printable
from cachesvc.errors import TraceError
from cachesvc.reporting.history import sum_rows, summary
from cachesvc.trace.formats import events
from cachesvc.trace.recount import NotRecorded, Recount

RECORDED: Final = "recorded"

_KEPT: Final = (
    *("passes", "input_tokens", "hit_tokens", "hit_rate", "local_tokens", "pending_tokens"),
    *("hit_tokens_by_tier", "miss_tokens_by_reason"),
)


def print_recount(paths: Sequence[Path], *, as_json: bool) -> None:
    """Raises `TraceError`."""
    counted = Recount()
    for path, line, event in events(sorted({path.resolve() for path in paths})):
        try:
            counted.add(event)
        except NotRecorded as error:
            raise TraceError(f"{path} line {line} is not of a daemon's recording: {error}") from error
        except (KeyError, ValueError, TypeError) as error:
            raise TraceError(f"{path} line {line}: a malformed event: {type(error).__name__} {error}") from error
    if not counted.asked:
        raise TraceError(f"{', '.join(map(str, paths))}: empty, nothing was asked while this was recorded")
    rows = [
        {"class": key.traffic_class, "model": key.model, "tenant": key.tenant} | _counts(row)
        for key, row in counted.accounting.rows()
    ]
    total = _counts(sum_rows(row for _, row in counted.accounting.rows()))
    if as_json:
        print(json.dumps({"lost_events": counted.lost, "whole": counted.whole, "rows": rows, "total": total}, indent=1))
        return
    table = Table("class", "model", "tenant", title="Hit rate by tokens, as recorded")
    for name in ("passes", "input tokens", "hit tokens", "hit rate"):
        table.add_column(name, justify="right")
    table.add_column("misses by reason", no_wrap=True)
    for row in [*rows, {"class": "all", "model": "", "tenant": "-"} | total]:
        misses = "\n".join(f"{name} {tokens:,}" for name, tokens in row["miss_tokens_by_reason"].items())
        numbers = (f"{row[name]:,}" for name in ("passes", "input_tokens", "hit_tokens"))
        labels = (printable(row[name]) or "-" for name in ("class", "model", "tenant"))
        table.add_row(*labels, *numbers, f"{row['hit_rate']:.6f}", misses)
    wide_console().print(table)
    if counted.lost or not counted.whole:
        why = f"{counted.lost:,} events were lost" if counted.lost else "its beginning is not there any more"
        wide_console().print(f"These counts are not exact: {why}.")


def _counts(row: Counter[str]) -> dict[str, Any]:
    shown = summary(row)
    return {name: shown[name] for name in _KEPT}
