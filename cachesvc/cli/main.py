"""Entry point: errors become one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

import typer

from cachesvc import __version__
from cachesvc.errors import CacheError

COMMANDS: Final = ("serve", "config", "report", "record", "replay", "plan", "workload", "status", "bench")
"""Each is a function of that name in a module of that name."""


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """With the command that `arguments` name, or all: each takes long to import, and only one is needed."""
    app = typer.Typer(
        name="cachesvc",
        help="A persistent KV/prefix-cache service for LLM inference.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    wanted = arguments[0] if arguments else ""
    for name in [wanted] if wanted in COMMANDS else COMMANDS:
        app.command()(getattr(importlib.import_module(f"cachesvc.cli.{name}"), name))
    app.command()(version)
    return app


def version() -> None:
    """Prints the version."""
    print(__version__)


def main() -> None:
    try:
        try:
            make_app(sys.argv[1:])()
        finally:
            sys.stdout.flush()
    except CacheError as error:
        print(f"cachesvc: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:  # whatever is left of those: the output cannot take more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor at the interpreter's end
        print(f"cachesvc: cannot write the output: {error.strerror}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
