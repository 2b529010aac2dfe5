"""Entry point: errors become one line and an exit code."""

from __future__ import annotations

import sys

import typer

from cachesvc import __version__
from cachesvc.cli.bench import bench
from cachesvc.cli.config import config
from cachesvc.cli.plan import plan
from cachesvc.cli.replay import replay
from cachesvc.cli.report import report
from cachesvc.cli.serve import serve
from cachesvc.cli.status import status
from cachesvc.cli.workload import workload
from cachesvc.errors import CacheError

app = typer.Typer(
    name="cachesvc",
    help="A persistent KV/prefix-cache service for LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (serve, config, report, replay, plan, workload, status, bench):
    app.command()(command)


@app.command()
def version() -> None:
    """Prints the version."""
    print(__version__)


def main() -> None:
    try:
        app()
    except CacheError as error:
        print(f"cachesvc: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
