"""A report as one self-contained page: no script, no network; for phones, screens and print."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from cachesvc import __version__
from cachesvc.accounting import HIT, MISS
from cachesvc.reporting import charts
from cachesvc.reporting.history import History, grouped, sum_rows, summary

_STYLE = """
:root{color-scheme:light}
body{margin:0 auto;padding:1rem;max-width:76rem;font:16px/1.45 system-ui,sans-serif;color:#111;background:#fff}
h1{font-size:1.5rem;margin:0}h2{font-size:1.2rem;margin:2rem 0 .5rem;border-top:2px solid #ddd;padding-top:1rem}
p{max-width:48rem}.numbers{display:flex;flex-wrap:wrap;gap:.75rem;margin:1rem 0}
.numbers div{flex:1 1 9rem;border:1px solid #bbb;border-radius:.4rem;padding:.6rem .8rem}
.numbers b{display:block;font-size:1.6rem;font-variant-numeric:tabular-nums}.numbers span{color:#444;font-size:.9rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
figure{margin:0;break-inside:avoid}figcaption{font-weight:600}figure svg{width:100%;height:auto}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;border-bottom:1px solid #ccc;text-align:right;vertical-align:top;
white-space:nowrap}td.long{white-space:normal;min-width:12rem;text-align:left}
th:first-child,td:first-child,.text,th.long{text-align:left}caption{text-align:left;font-weight:600;padding:.3rem 0}
footer{margin-top:2rem;color:#444;font-size:.85rem}
@media print{body{max-width:none;font-size:11px}.charts{grid-template-columns:1fr 1fr}.wide{overflow:visible}}
"""


def page(history: History, now: float) -> str:
    """Raises `ConfigError` where matplotlib is not installed."""
    total = summary(sum_rows(history.total.rows.values()))
    if not total["input_tokens"]:
        body = "<p>No lookups in this time.</p>"
    else:
        body = _numbers(total) + _rate(history) + _why(history, total) + _what_if(history)
    daemons = f"{history.daemons} daemons" if history.daemons > 1 else "one daemon"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Hit rate of the KV cache</title><style>{_STYLE}</style></head><body>"
        f"<h1>Hit rate of the KV cache</h1><p>{_time_of(history)}, {daemons}.</p>{body}"
        f"<footer>cachesvc {__version__}, made {_utc(now)}. All rates are by tokens, of all input tokens.</footer>"
        "</body></html>\n"
    )


def _numbers(total: dict[str, Any]) -> str:
    numbers = (
        (f"{total['hit_rate']:.2%}", f"hit rate: {total['hit_tokens']:,} of {total['input_tokens']:,} input tokens"),
        (
            f"{total['ceiling_rate']:.2%}",
            f"ceiling, ± {total['ceiling_rate_error']:.2%}: what an infinite cache would have hit",
        ),
        (f"{total['passes']:,}", "prompts looked up, each counted once"),
        (f"{total['local_tokens']:,}", "tokens that engines held themselves: neither hit nor miss"),
    )
    boxes = "".join(f"<div><b>{number}</b><span>{html.escape(text)}</span></div>" for number, text in numbers)
    return f'<div class="numbers">{boxes}</div>'


def _rate(history: History) -> str:
    rows = grouped(history.buckets, ("traffic_class", "model", "tenant"))
    cells = [
        [
            *(name or "-" for name in label),
            f"{s['passes']:,}",
            f"{s['input_tokens']:,}",
            f"{s['hit_tokens']:,}",
            f"{s['hit_rate']:.2%}",
            f"{s['ceiling_rate']:.2%}",
        ]
        for label, s in ((label, summary(row)) for label, row in rows.items())
    ]
    head = ["class", "model", "tenant", "prompts", "input tokens", "hit tokens", "hit rate", "ceiling"]
    return (
        "<h2>What is the hit rate?</h2>"
        + _charts(
            ("Hit rate over time", charts.hit_rate(history)),
            ("Hits by tier, share of input", charts.shares(history, HIT)),
        )
        + _table("By class, model and tenant", head, cells, text=3)
    )


def _why(history: History, total: dict[str, Any]) -> str:
    asked = total["input_tokens"]
    cells = [
        [name.replace("_", " "), f"{tokens:,}", f"{tokens / asked:.2%}", _MEANING.get(name, "")]
        for name, tokens in sorted(total["miss_tokens_by_reason"].items(), key=lambda item: -item[1])
    ]
    if total["pending_tokens"]:
        cells.append(
            ["pending", f"{total['pending_tokens']:,}", f"{total['pending_tokens'] / asked:.2%}", "being loaded"]
        )
    return (
        "<h2>Why is it not higher?</h2>"
        + _charts(
            ("Misses by reason, share of input", charts.shares(history, MISS)),
            ("Hit depth", charts.depth(history)),
        )
        + _table("Misses by reason", ["reason", "tokens", "of input", "meaning"], cells, text=1)
    )


def _what_if(history: History) -> str:
    return (
        "<h2>What would more room or another TTL give?</h2>"
        "<p>Hits just left of a TTL say that a longer one would give more. References to the right of the blocks "
        "stored now could hit in a larger store; <code>cachesvc replay</code> computes how many from a recording.</p>"
        + _charts(
            ("Age at hit, and TTLs", charts.age(history)),
            ("Reuse distance (sampled)", charts.reuse(history)),
            ("Age of blocks when dropped", charts.lifetime(history)),
            ("Size of the store", charts.size(history)),
        )
    )


_MEANING = {
    "never_seen": "the prefix was new, as far as the daemon remembers",
    "expired": "dropped at the end of its TTL: a longer one would have hit",
    "evicted": "dropped for want of room: a larger store would have hit",
    "unreachable": "the engine could not ask the daemon",
    "corrupt": "failed its checksum",
    "load_error": "found, but reading or transporting it failed",
    "timed_out": "found, but not loaded in time",
    "bypassed": "found, but the engine chose to compute",
    "partial_tail": "behind the last full block: never stored",
}


def _charts(*drawn: tuple[str, charts.Draw]) -> str:
    figures = (
        f"<figure><figcaption>{html.escape(title)}</figcaption>{charts.svg(draw, html.escape(title))}</figure>"
        for title, draw in drawn
    )
    return f'<div class="charts">{"".join(figures)}</div>'


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], text: int) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        kinds = ["long" if name == "meaning" else "text" if i < text else "number" for i, name in enumerate(head)]
        return "".join(
            f"<{tag} class={kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="wide"><table><caption>{html.escape(caption)}</caption>'
        f"<thead><tr>{line(head, 'th')}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _time_of(history: History) -> str:
    if not history.buckets:
        return "No time"
    starts = list(history.buckets)
    return f"{_utc(starts[0])} to {_utc(starts[-1] + history.width)}"


def _utc(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M} UTC"
