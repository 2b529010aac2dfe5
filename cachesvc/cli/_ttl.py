"""TTLs as `replay` and `plan` take them."""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.classes import CLASS_NAME
from cachesvc.config import parse_duration
from cachesvc.errors import ConfigError
from cachesvc.trace.simulate import TTL


def parse_ttls(given: Sequence[str], *, sliding: bool) -> list[TTL]:
    """``60s,600s`` is two TTLs, ``agent=3d,chat=7d`` one. Raises `ConfigError`."""
    ttls = []
    for text in given:
        parts = [part.partition("=") for part in text.split(",")]
        named = {name: _ttl(value) for name, equals, value in parts if equals}
        if not named:
            ttls += [TTL(part, plain=_ttl(part), sliding=sliding) for part in text.split(",")]
        elif len(named) < len(parts):
            raise ConfigError(f"--ttl {text} mixes classes with a TTL for all, or names a class twice")
        else:
            for name in named:
                check_class("--ttl", text, name)
            ttls.append(TTL(text, by_class=named, sliding=sliding))
    return ttls


def duration(option: str, text: str) -> float:
    """Seconds. Raises `ConfigError`."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ConfigError(f"{option} {error}") from error


def check_class(option: str, text: str, name: str) -> None:
    """Raises `ConfigError` for what cannot be a class."""
    if not CLASS_NAME.fullmatch(name):
        raise ConfigError(f"{option} {text}: class name {name!r} must match {CLASS_NAME.pattern}")


def _ttl(text: str) -> float:
    seconds = duration("--ttl", text)
    if seconds <= 0:
        raise ConfigError(f"--ttl {text}: it must be more than 0")
    return seconds
