"""The charts of a report, as inline SVG (extra ``plots``)."""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from cachesvc.accounting import by_prefix
from cachesvc.errors import ConfigError
from cachesvc.histograms import AGES, DEPTHS, REUSES
from cachesvc.reporting.history import History, sum_rows, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours (2008) can be told apart with any colour vision; hatches tell them apart in grey print.
_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#999999", "#F0E442", "#000000")
_HATCHES: Final = ("", "//", "..", "\\\\", "xx", "--", "", "++", "")

# Gauges of the store, what they are called, and how they are drawn.
_SIZES: Final = (
    ("budget", "budget", _COLOURS[4], "--"),
    ("bytes", "stored", _COLOURS[0], "-"),
    ("arena_used", "in memory", _COLOURS[2], ":"),
)

Draw = Callable[["Axes"], None]


def svg(draw: Draw, label: str) -> str:
    """One chart, readable at the width of a phone. Raises `ConfigError` where matplotlib is not installed."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("charts need matplotlib: pip install 'cachesvc[plots]'") from error
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": label, "font.size": 11, "hatch.linewidth": 0.5}):
        figure = Figure(figsize=(5.6, 3.4), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    picture = text.getvalue()
    return picture[picture.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def hit_rate(history: History) -> Draw:
    """Hit rate by tokens over time, and that of an infinite cache."""

    def draw(axes: Axes) -> None:
        rows = [summary(sum_rows(counts.rows.values())) for counts in history.buckets.values()]
        times = _times(history)
        marker = _marker(times)
        axes.plot(times, [r["ceiling_rate"] for r in rows], color=_COLOURS[6], ls="--", marker=marker, label="ceiling")  # type: ignore[arg-type]
        axes.plot(times, [r["hit_rate"] for r in rows], color=_COLOURS[0], marker=marker, label="hit rate")  # type: ignore[arg-type]
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(_percent())
        _legend_above(axes)
        _time_axis(axes, history)

    return draw


def shares(history: History, prefix: str) -> Draw:
    """Tokens of the tiers (`HIT`) or reasons (`MISS`) over time, as shares of the input."""

    def draw(axes: Axes) -> None:
        rows = [sum_rows(counts.rows.values()) for counts in history.buckets.values()]
        parts = [by_prefix(row.items(), prefix) for row in rows]
        names = sorted({name for part in parts for name in part}, key=lambda n: -sum(p.get(n, 0) for p in parts))
        below = [0.0] * len(rows)
        for i, name in enumerate(names):
            heights = [
                part.get(name, 0) / row["input"] if row["input"] else 0.0 for part, row in zip(parts, rows, strict=True)
            ]
            axes.bar(
                _times(history),  # type: ignore[arg-type]
                heights,
                width=timedelta(seconds=0.92 * history.width),  # type: ignore[arg-type]
                align="edge",
                bottom=below,
                color=_COLOURS[i % len(_COLOURS)],
                hatch=_HATCHES[i % len(_HATCHES)],
                edgecolor="white",
                linewidth=0.3,
                label=name.replace("_", " "),
            )
            below = [b + h for b, h in zip(below, heights, strict=True)]
        if max(below, default=0.0) > 0.8:
            axes.set_ylim(0, 1.02)  # so that the axis says 100 %
        axes.yaxis.set_major_formatter(_percent())
        if names:
            _legend_above(axes)
        _time_axis(axes, history)

    return draw


def size(history: History) -> Draw:
    """Bytes of the store over time, and its budget."""

    def draw(axes: Axes) -> None:
        stores = [counts.store for counts in history.buckets.values()]
        times = _times(history)
        for name, label, colour, line in _SIZES:
            gigabytes = [store.get(name, 0) / 1e9 for store in stores]
            axes.plot(times, gigabytes, color=colour, ls=line, marker=_marker(times), label=label)  # type: ignore[arg-type]
        axes.set_ylabel("GB")
        axes.set_ylim(bottom=0)
        _legend_above(axes)
        _time_axis(axes, history)

    return draw


def depth(history: History) -> Draw:
    """How deep passes hit."""
    labels = ["none", *(_short(bound) for bound in DEPTHS[1:]), "more"]
    return _histogram(_row_counts(history, "depth."), labels, "hit tokens of a pass, up to", "passes")


def age(history: History) -> Draw:
    """Time since a block's last use when it was hit, and the TTLs of the classes."""
    marks = {f"TTL {name}": bisect_left(AGES, ttl) + 0.5 for name, ttl in history.ttls.items()}
    counts = _row_counts(history, "age.")
    return _histogram(counts, [*map(_duration, AGES), "more"], "time since last use, up to", "hit tokens", marks)


def lifetime(history: History) -> Draw:
    """Age of blocks when they were dropped."""
    counts = by_prefix(history.total.other.items(), "lifetime.")
    return _histogram(counts, [*map(_duration, AGES), "more"], "age when dropped, up to", "blocks")


def reuse(history: History) -> Draw:
    """Reuse distances, and how many blocks the store holds now: what lies to the right of it cannot hit."""
    total = history.total
    marks = {}
    if total.store.get("blocks"):
        marks["blocks stored now"] = bisect_left(REUSES, total.store["blocks"]) + 0.5
    counts = by_prefix(total.other.items(), "reuse.")
    return _histogram(counts, [*map(_short, REUSES), "more"], "blocks asked for in between, up to", "references", marks)


def _histogram(
    counts: Mapping[str, int], labels: Sequence[str], x: str, y: str, marks: Mapping[str, float] | None = None
) -> Draw:
    def draw(axes: Axes) -> None:
        from matplotlib.ticker import EngFormatter

        axes.bar(range(len(labels)), [counts.get(str(i), 0) for i in range(len(labels))], color=_COLOURS[0])
        if not any(counts.values()):
            axes.set_yticks([])
            axes.text(0.5, 0.5, "none so far", transform=axes.transAxes, ha="center", color="#555555")
        places: dict[float, list[str]] = {}
        for text, place in (marks or {}).items():
            places.setdefault(place, []).append(text)
        for i, (place, texts) in enumerate(sorted(places.items())):
            axes.axvline(place, color=_COLOURS[4], ls=("--", ":", "-.")[i % 3], label=", ".join(texts))
        if places:
            _legend_above(axes)
        axes.set_xticks(range(len(labels)), labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=9)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if any(counts.values()):
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))

    return draw


def _legend_above(axes: Axes) -> None:
    """Where it covers nothing."""
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9, ncols=3, frameon=False)


def _marker(times: Sequence[datetime]) -> str:
    """A line of one point is none."""
    return "o" if len(times) < 30 else ""


def _row_counts(history: History, prefix: str) -> dict[str, int]:
    return by_prefix(sum_rows(history.total.rows.values()).items(), prefix)


def _times(history: History) -> list[datetime]:
    return [datetime.fromtimestamp(start, UTC) for start in history.buckets]


def _time_axis(axes: Axes, history: History) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    times, width = _times(history), timedelta(seconds=history.width)
    axes.set_xlim(times[0] - width, times[-1] + 2 * width)  # type: ignore[arg-type]
    locator = AutoDateLocator()  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    axes.tick_params(axis="x", labelsize=9)
    axes.set_xlabel("time (UTC)")


def _percent() -> Callable[[float, float], str]:
    return lambda value, _: f"{value:.0%}"


def _short(number: float) -> str:
    for unit, size_ in (("G", 1 << 30), ("M", 1 << 20), ("k", 1 << 10)):
        if number >= size_:
            return f"{number / size_:g}{unit}"
    return f"{number:g}"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"
