"""Traffic classes: a name and how long its blocks are kept since last use."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cachesvc.errors import InvalidCall
from cachesvc.limits import MAX_CLASS_NAME_BYTES, SLICES_PER_TTL

DEFAULT_TTLS: Final[Mapping[str, float]] = {"agent": 3 * 86_400.0, "chat": 7 * 86_400.0}

# A class names a directory and a metric label.
CLASS_NAME: Final = re.compile(rf"[a-z][a-z0-9_-]{{0,{MAX_CLASS_NAME_BYTES - 1}}}")


def slice_width(ttl: float) -> int:
    """Seconds of expiry time that share a slice."""
    return max(1, math.ceil(ttl / SLICES_PER_TTL))


@dataclass(frozen=True)
class TrafficClass:
    name: str
    ttl: float
    """Seconds since last use."""

    def slice_end(self, used: float) -> int:
        """End (seconds since the epoch) of the slice of expiry time in which a block last used at `used` expires."""
        width = slice_width(self.ttl)
        return (math.floor((used + self.ttl) / width) + 1) * width


class TrafficClasses:
    """The classes in force. A class that only old files name keeps the TTL it was written with."""

    def __init__(self, ttls: Mapping[str, float]) -> None:
        self._by_name = {name: TrafficClass(name, ttl) for name, ttl in ttls.items()}
        self._configured = frozenset(self._by_name)

    def __iter__(self) -> Iterator[TrafficClass]:
        return iter([self._by_name[name] for name in sorted(self._configured)])

    @property
    def names(self) -> list[str]:
        return sorted(self._configured)

    def named(self, name: str) -> TrafficClass:
        """Raises `InvalidCall` for a class that the configuration does not define."""
        if name not in self._configured:
            raise InvalidCall(f"traffic class {name!r} is not defined; use one of {', '.join(self.names)}")
        return self._by_name[name]

    def of_file(self, name: str, ttl: float) -> TrafficClass:
        """The class a segment was written for; the configuration's TTL wins over the file's."""
        return self._by_name.setdefault(name, TrafficClass(name, ttl))
