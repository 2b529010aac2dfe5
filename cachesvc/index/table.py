"""Names of blocks, and what is known of one."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachesvc.classes import TrafficClass
from cachesvc.keys import KEY_BYTES
from cachesvc.segments.format import Shape
from cachesvc.segments.segment import Segment

_SHARD: Final = struct.Struct(">H")
# Taking keys apart by one call for 32 of them costs a third of what slices cost.
_MANY: Final = struct.Struct(f"{KEY_BYTES}s" * 32)


def block_id(key: bytes, shard: int) -> bytes:
    """chain key, and the shard behind it (big-endian uint16) unless it is 0: names one payload."""
    return key + _SHARD.pack(shard) if shard else key


def block_ids(packed: bytes, shard: int) -> list[bytes]:
    """`block_id` of many keys, given back to back."""
    whole = len(packed) - len(packed) % _MANY.size
    keys = list(chain.from_iterable(_MANY.iter_unpack(packed[:whole])))
    keys += [packed[i : i + KEY_BYTES] for i in range(whole, len(packed), KEY_BYTES)]
    if shard:
        suffix = _SHARD.pack(shard)
        return [key + suffix for key in keys]
    return keys


def words_of(identities: Sequence[bytes]) -> tuple[NDArray[np.uint64], int | NDArray[np.uint16]]:
    """Block ids as keys, two words each [n, 2], and their shards (one number when all are of shard 0)."""
    packed = b"".join(identities)
    if len(packed) == KEY_BYTES * len(identities):
        return np.frombuffer(packed, np.uint64).reshape(-1, 2), 0
    width = KEY_BYTES + _SHARD.size
    if len(packed) != width * len(identities):
        packed = b"".join(identity.ljust(width, b"\0") for identity in identities)
    table = np.frombuffer(packed, np.uint8).reshape(-1, width)
    shards = np.ascontiguousarray(table[:, KEY_BYTES:]).view(">u2").astype(np.uint16)
    return np.ascontiguousarray(table[:, :KEY_BYTES]).view(np.uint64), shards.reshape(-1)


def split_id(identity: bytes) -> tuple[bytes, int]:
    """The reverse of `block_id`."""
    key, suffix = identity[:KEY_BYTES], identity[KEY_BYTES:]
    return key, _SHARD.unpack(suffix)[0] if suffix else 0


@dataclass(slots=True, eq=False)
class Entry:
    """Where a block lies on disk, which never changes once it is there, and how it is used.

    A block that moves gets a new entry. One that is only in the arena so far has no `segment`, and no `row` in the
    table of blocks on disk. `traffic_class` is the longest-lived class that used the block: its TTL counts from `used`.
    `placed` is the use time with which it was written where it lies now.
    """

    shape: Shape
    segment: Segment | None
    record: int
    checksum: int
    created: float
    used: float
    traffic_class: TrafficClass
    placed: float
    row: int = -1

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
