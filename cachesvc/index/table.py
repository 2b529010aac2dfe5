"""What a look-up reads: block id → entry, in memory."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from cachesvc.classes import TrafficClass
from cachesvc.keys import KEY_BYTES
from cachesvc.segments.format import Shape
from cachesvc.segments.segment import Segment

_SHARD: Final = struct.Struct(">H")


def block_id(key: bytes, shard: int) -> bytes:
    """chain key ‖ shard (big-endian uint16): 18 bytes that name one payload."""
    return key + _SHARD.pack(shard)


def block_ids(packed: bytes, shard: int) -> list[bytes]:
    """`block_id` of many keys, given back to back."""
    suffix = _SHARD.pack(shard)
    return [packed[i : i + KEY_BYTES] + suffix for i in range(0, len(packed), KEY_BYTES)]


def split_id(identity: bytes) -> tuple[bytes, int]:
    """The reverse of `block_id`."""
    return identity[:-2], _SHARD.unpack(identity[-2:])[0]


@dataclass(slots=True, eq=False)
class Entry:
    """Where a block lies on disk, which never changes (a block that moves gets a new entry), and how it is used.

    A block that is only in the arena so far has no `segment`. `traffic_class` is the longest-lived class that used the
    block: its TTL counts from `used`. `placed` is the use time with which it was written where it lies now.
    """

    shape: Shape
    segment: Segment | None
    record: int
    checksum: int
    created: float
    used: float
    traffic_class: TrafficClass
    placed: float

    @property
    def expires(self) -> float:
        return self.used + self.traffic_class.ttl

    @property
    def touched(self) -> bool:
        """Whether it was used after it was written where it lies now."""
        return self.used != self.placed

    def touch(self, traffic_class: TrafficClass, now: float) -> None:
        """A use by a request of that class."""
        self.used = max(self.used, now)
        if traffic_class.ttl > self.traffic_class.ttl:
            self.traffic_class = traffic_class


Table = dict[bytes, Entry]
