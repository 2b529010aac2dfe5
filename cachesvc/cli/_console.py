"""Where tables go: folded on a terminal, never cut off when they are piped. What they show is text, never markup."""

from __future__ import annotations

import sys

from rich.console import Console

_PIPED_WIDTH = 200


def wide_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, markup=False, emoji=False)
