"""Results as tables: for the terminal, and as Markdown (``python -m cachesvc.benchmark.table results.json …``)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rich.filesize import decimal
from rich.table import Table

HEAD: Final = ("what", "with", "result", "spread", "baseline", "ratio", "target", "")
_UNITS: Final = {"blocks/s": ",.0f"}


def rich_table(run: Mapping[str, Any]) -> Table:
    """The table of one benchmark's JSON."""
    table = Table(title=_title(run))
    for name in HEAD:
        table.add_column(name, justify="left" if name in ("what", "with", "baseline") else "right")
    for row in rows(run):
        table.add_row(*row)
    return table


def markdown(run: Mapping[str, Any]) -> str:
    """The same in Markdown, with what was skipped below it."""
    lines = [f"{_title(run)}.", "", f"| {' | '.join(HEAD)} |", "|---|---|--:|--:|---|--:|--:|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows(run)]
    skipped = [f"* not measured: {name}: {why}" for name, why in run["skipped"].items()]
    return "\n".join([*lines, *([""] if skipped else []), *skipped])


def rows(run: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """One tuple of texts per result, in the order of `HEAD`."""
    for result in run["results"]:
        unit = result["unit"]
        baseline = result["baseline"]
        bound = "" if result["target"] is None else f"{'≤' if result['at_most'] else '≥'} {result['target']:,g}"
        yield (
            result["name"],
            ", ".join(f"{name.replace('_', ' ')} {_param(value)}" for name, value in result["params"].items()),
            f"{_number(result['value'], unit)} {unit}",
            " – ".join(_number(end, unit) for end in result["spread"]),
            "" if baseline is None else f"{baseline['name']} {_number(baseline['value'], unit)}",
            "" if result["ratio"] is None else f"{result['ratio']:.2f}",
            bound,
            {True: "yes", False: "no", None: ""}[result["pass"]],
        )


def _title(run: Mapping[str, Any]) -> str:
    host = run["host"]
    memory = decimal(host["memory"])
    return f"{run['benchmark']}, {run['when']}: {host['cpu']}, {host['cores']} cores, {memory}, Linux {host['kernel']}"


def _number(value: float, unit: str) -> str:
    return format(value, _UNITS.get(unit, ".3g"))


def _param(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def main(paths: list[str]) -> None:
    for path in paths:
        print(markdown(json.loads(Path(path).read_text())), end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
