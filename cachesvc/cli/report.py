"""``cachesvc report``: hit rate by tokens since the daemon started, by class, model, tier and reason."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table

from cachesvc.cli import options
from cachesvc.cli._console import wide_console
from cachesvc.cli._daemon import fetch_report
from cachesvc.rpc import cache_pb2 as pb


def report(address: options.Address = None, as_json: options.Json = False) -> None:
    """Prints the hit rate by tokens (hit tokens / all input tokens) since the daemon started."""
    reply = fetch_report(address)
    rows = [_row(row) for row in reply.lookups]
    total = _sum(rows)
    if as_json:
        print(json.dumps({"uptime_s": reply.uptime_seconds, "rows": rows, "total": total}, indent=2))
        return
    if not rows:
        wide_console().print("No lookups since the daemon started.")
        return
    table = Table("class", "model", title="Hit rate by tokens since the daemon started")
    for name in ("passes", "input tokens", "hit tokens", "hit rate", "pending", "hits by tier", "misses by reason"):
        table.add_column(name, justify="left" if " by " in name else "right", overflow="fold", no_wrap=" by " in name)
    for row in rows:
        _add(table, row)
    if len(rows) > 1:
        table.add_section()
        _add(table, total)
    wide_console().print(table)


def _row(row: pb.LookupRow) -> dict[str, Any]:
    return _rated(
        {
            "class": row.traffic_class,
            "model": row.model,
            "passes": row.passes,
            "input_tokens": row.input_tokens,
            "local_tokens": row.local_tokens,
            "pending_tokens": row.pending_tokens,
            "hit_tokens_by_tier": dict(sorted(row.hit_tokens.items())),
            "miss_tokens_by_reason": dict(sorted(row.miss_tokens.items())),
            "loaded_bytes": row.loaded_bytes,
            "stored_blocks": row.stored_blocks,
            "stored_bytes": row.stored_bytes,
        }
    )


def _rated(row: dict[str, Any]) -> dict[str, Any]:
    hits = sum(row["hit_tokens_by_tier"].values())
    return row | {"hit_tokens": hits, "hit_rate": hits / row["input_tokens"] if row["input_tokens"] else 0.0}


def _sum(rows: list[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {"class": "all", "model": "all"}
    for name in ("passes", "input_tokens", "local_tokens", "pending_tokens"):
        total[name] = sum(row[name] for row in rows)
    for name in ("hit_tokens_by_tier", "miss_tokens_by_reason"):
        keys = sorted({key for row in rows for key in row[name]})
        total[name] = {key: sum(row[name].get(key, 0) for row in rows) for key in keys}
    for name in ("loaded_bytes", "stored_blocks", "stored_bytes"):
        total[name] = sum(row[name] for row in rows)
    return _rated(total)


def _add(table: Table, row: dict[str, Any]) -> None:
    table.add_row(
        row["class"],
        row["model"],
        f"{row['passes']:,}",
        f"{row['input_tokens']:,}",
        f"{row['hit_tokens']:,}",
        f"{row['hit_rate']:.4f}",
        f"{row['pending_tokens']:,}",
        "\n".join(f"{name} {tokens:,}" for name, tokens in row["hit_tokens_by_tier"].items()) or "-",
        "\n".join(f"{name} {tokens:,}" for name, tokens in row["miss_tokens_by_reason"].items()) or "-",
    )
