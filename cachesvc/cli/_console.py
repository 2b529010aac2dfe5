"""Where tables go: folded on a terminal, never cut off when they are piped."""

from __future__ import annotations

import sys

from rich.console import Console

_PIPED_WIDTH = 200


def wide_console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)
