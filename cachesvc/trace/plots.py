"""Results of a replay as PNG, SVG or one HTML page (extra ``plots``)."""

from __future__ import annotations

import html
import io
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cachesvc.errors import ConfigError
from cachesvc.trace.replay import Point, Row
from cachesvc.trace.simulate import REASONS, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES: Final = (".png", ".svg", ".html")

# Okabe and Ito's colours: told apart with any colour vision.
_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
_HEIGHT: Final = 4.5
"""Inches."""
_PAGE: Final = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>{title}</title>
<style>body{{margin:1rem auto;max-width:60rem;font-family:sans-serif}}svg{{width:100%;height:auto}}</style>
<h1>{title}</h1>
{picture}
</html>
"""


class Picture:
    """Raises `ConfigError` for a file of another kind, and where matplotlib is not installed."""

    def __init__(self, path: Path) -> None:
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError("--plot needs matplotlib: pip install 'cachesvc[plots]'") from error
        self._path = path
        self._figure = Figure(figsize=(8, _HEIGHT), layout="constrained")

    def curve(self, title: str, points: Sequence[Point]) -> None:
        """Hit rate of LRU over capacity."""
        axes = self._axes(f"LRU, {title}", "capacity, blocks", "hit rate by tokens")
        capacities = [point.capacity for point in points]
        axes.semilogx(capacities, [point.hit_rate for point in points], color=_COLOURS[0])
        if any(point.hit_rate_error for point in points):
            axes.fill_between(
                capacities,
                [point.hit_rate - point.hit_rate_error for point in points],
                [point.hit_rate + point.hit_rate_error for point in points],
                color=_COLOURS[0],
                alpha=0.25,
            )
        axes.set_ylim(0, 1)
        self._save(title)

    def grid(self, title: str, results: Sequence[tuple[Simulation, Row]]) -> None:
        """Hit rate over capacity, a line for each policy and TTL; without several capacities, where the input went."""
        lines: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        for cache, row in results:
            if cache.capacity is not None:
                lines[named(cache, capacity=False)].append((cache.capacity, row.hit_rate))
        if any(len(line) > 1 for line in lines.values()):
            axes = self._axes(title, "capacity, blocks", "hit rate by tokens")
            for index, (name, line) in enumerate(lines.items()):
                colour, marker = _COLOURS[index % len(_COLOURS)], "osD^v<>"[index % 7]
                axes.semilogx(*zip(*sorted(line), strict=True), marker=marker, color=colour, label=name)
            axes.set_ylim(0, 1)
            axes.legend()
        else:
            axes = self._axes(title, "share of input tokens", "")
            names = [named(cache) for cache, _ in results]
            left = [0.0] * len(results)
            for index, kind in enumerate(("hit", *REASONS)):
                tokens = [row.hit_tokens if kind == "hit" else row.miss_tokens[kind] for _, row in results]
                shares = [part / (row.input_tokens or 1) for part, (_, row) in zip(tokens, results, strict=True)]
                axes.barh(names, shares, left=left, color=_COLOURS[index], label=kind.replace("_", " "))
                left = [one + other for one, other in zip(left, shares, strict=True)]
            axes.set_xlim(0, 1)
            axes.invert_yaxis()
            self._figure.set_figheight(max(_HEIGHT, 0.35 * len(results)))
            self._figure.legend(loc="outside lower center", ncols=5)
        self._save(title)

    def _axes(self, title: str, x: str, y: str) -> Axes:
        axes = self._figure.add_subplot()
        axes.set_title(title).set_parse_math(False)  # it names files
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.3)
        return axes

    def _save(self, title: str) -> None:
        try:
            if self._path.suffix == ".html":
                picture = io.StringIO()
                self._figure.savefig(picture, format="svg")
                svg = picture.getvalue()
                svg = svg[svg.index("<svg") :]
                self._path.write_text(_PAGE.format(title=html.escape(title), picture=svg), encoding="utf-8")
            else:
                self._figure.savefig(self._path, dpi=150)
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror or error}") from error


def named(cache: Simulation, *, capacity: bool = True) -> str:
    """What makes a simulation another one, in words."""
    parts = [cache.policy]
    if capacity and cache.capacity is not None:
        parts.append(f"{cache.capacity:,} blocks")
    if cache.ttl is not None:
        parts.append(f"{'sliding' if cache.ttl.sliding else 'fixed'} TTL {cache.ttl.text}")
    return ", ".join(parts)
