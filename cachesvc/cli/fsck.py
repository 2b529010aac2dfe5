"""``cachesvc fsck``: checks a store that no daemon has open."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from cachesvc.cli import options
from cachesvc.cli._console import wide_console
from cachesvc.disk.fsck import HARMLESS, Check, Summary
from cachesvc.errors import StoreDamaged

_SHOWN = 20


def fsck(
    path: Annotated[Path, typer.Argument(help="directory of the store")],
    repair: Annotated[bool, typer.Option("--repair", help="mend what can be mended")] = False,
    as_json: options.Json = False,
) -> None:
    """Reads every record of a store and compares its index. Exit code 0: no damage is left; 8: there is some.

    The daemon must be stopped. What a crash leaves (segments that are not sealed) is no damage.
    """
    with Progress(
        "checking",
        BarColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("")
        check = Check(path, repair=repair, progress=lambda done, total: bar.update(task, completed=done, total=total))
        summary = check.run()
    if as_json:
        print(json.dumps(summary.to_json(), indent=2))
    else:
        _print(summary)
    sys.stdout.flush()
    if summary.damaged:
        left = ", ".join(f"{n:,} {kind}" for kind, n in sorted(summary.left.items()) if n and kind not in HARMLESS)
        hint = "none of it can be mended" if repair else "--repair mends what can be mended"
        raise StoreDamaged(f"store {path} is damaged: {left}; {hint}")


def _print(summary: Summary) -> None:
    console = wide_console()
    console.print(
        f"{summary.path}: {summary.segments:,} segments, {summary.records:,} whole records, {decimal(summary.bytes)}, "
        f"{summary.blocks_in_index:,} blocks in the index; {summary.seconds:.1f} s"
    )
    if not summary.counts:
        console.print("nothing was found")
        return
    table = Table("finding", "number", "left")
    for kind, count in sorted(summary.counts.items()):
        table.add_row(kind, f"{count:,}", f"{summary.left[kind]:,}")
    console.print(table)
    for finding in summary.findings[:_SHOWN]:
        console.print(f"{finding.kind}: {finding.path}: {finding.text}{' (repaired)' if finding.repaired else ''}")
    if len(summary.findings) > _SHOWN:
        console.print(f"and {sum(summary.counts.values()) - _SHOWN:,} more; --json lists them")
