"""Results as tables: for the terminal, and as Markdown.

``python -m cachesvc.benchmark.table results.json …`` prints them; with ``--into FILE`` each replaces the one between
the lines ``<!-- NAME -->`` and ``<!-- /NAME -->`` of that file, NAME being the benchmark's.
"""

from __future__ import annotations

import argparse
import json
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
    memory = decimal(host["memory"]) + (f", {host['gpu']}" if host.get("gpu") else "")
    return f"{run['benchmark']}, {run['when']}: {host['cpu']}, {host['cores']} cores, {memory}, Linux {host['kernel']}"


def _number(value: float, unit: str) -> str:
    return format(value, _UNITS.get(unit, ".3g"))


def _param(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def filled_in(text: str, run: Mapping[str, Any]) -> str:
    """`text` with the table in its place. Raises `ValueError` when it has none."""
    begin, end = f"<!-- {run['benchmark']} -->\n", f"<!-- /{run['benchmark']} -->\n"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"there is no {begin.strip()} … {end.strip()} to be filled")
    return f"{before}{begin}\n{markdown(run)}\n\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Turns the JSON of benchmarks into Markdown tables.")
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, metavar="FILE", help="fill them into this file instead of printing")
    options = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in options.results]
    if options.into is None:
        print("\n\n".join(map(markdown, runs)))
        return
    text = options.into.read_text()
    for run in runs:
        text = filled_in(text, run)
    options.into.write_text(text)


if __name__ == "__main__":
    main()
