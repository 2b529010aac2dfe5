"""``python -m cachesvc.connector.conformance package.module:Driver``: the suite from a shell."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

from cachesvc.connector.conformance.driver import Driver
from cachesvc.connector.conformance.suite import Result, check


def main() -> int:
    """0: all rules hold, 1: one does not, 2: there is nothing to run."""
    parser = argparse.ArgumentParser(prog="cachesvc.connector.conformance", description=__doc__)
    parser.add_argument("driver", help="package.module:Class, a Driver without arguments")
    parser.add_argument("rules", nargs="*", help="names of rules; all without any")
    options = parser.parse_args()
    module, _, name = options.driver.partition(":")
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        print(f"no driver {options.driver!r}: {error}", file=sys.stderr)
        return 2
    if not isinstance(made, Driver):
        print(f"{options.driver!r} is no Driver", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="conformance") as directory:
        try:
            results = check(made, Path(directory), rules=options.rules, on_result=_show)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    failed = sum(result.violation is not None for result in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _show(result: Result) -> None:
    print(f"{'ok  ' if result.violation is None else 'FAIL'} {result.seconds:6.1f} s  {result.rule}: {result.text}")
    if result.violation is not None:
        print(f"       {result.violation}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
