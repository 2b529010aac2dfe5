"""Entry point: errors become one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import typer

from cachesvc import __version__
from cachesvc.cli._text import printable
from cachesvc.errors import CacheError

COMMANDS: Final = ("serve", "config", "report", "record", "replay", "plan", "workload", "status", "fsck", "bench")
"""Each is a function of that name in a module of that name."""

# typer comes with a click of its own, or uses the one that is installed: this names the class of either.
_UsageError: Any = typer.BadParameter.__base__


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """With the command that `arguments` name, or all: each takes long to import, and only one is needed."""
    app = typer.Typer(
        name="cachesvc",
        help="A persistent KV/prefix-cache service for LLM inference.",
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
    arguments = sys.argv[1:] or ["--help"]
    if arguments[0] in ("--version", "-V"):
        arguments = ["version"]
    try:
        try:
            code = make_app(arguments)(arguments, standalone_mode=False)
        finally:
            sys.stdout.flush()
        sys.exit(code)
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "cachesvc"
        message = error.format_message().replace("Value error, ", "").rstrip(".")
        print(printable(f"{command}: {message}. See {command} --help"), file=sys.stderr)
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except CacheError as error:
        print(printable(f"cachesvc: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:  # whatever is left of those: the output cannot take more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor at the interpreter's end
        print(f"cachesvc: cannot write the output: {error.strerror}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
