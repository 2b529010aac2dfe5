"""Text for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Names come from clients and files: what a terminal would obey is shown as what it is."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
