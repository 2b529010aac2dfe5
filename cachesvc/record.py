"""One block on disk.

::

    payload ‖ zeros ‖ trailer        a whole number of 4 KiB pages; the trailer ends the last page

The descriptor stands behind the payload, not before it, so that the payload starts on a page: it can be read and
written straight from page-aligned memory (an arena slot, O_DIRECT) in one vector, and small blocks cost no extra page.
All records of a segment have the same size, so a scan finds every trailer without help. Trailer (little-endian)::

    magic 8 ‖ version u16 ‖ flags u16 ‖ shard u32 ‖ key 16 ‖ payload length u64 ‖ record number u32 ‖ zero u32
    ‖ created µs u64 ‖ used µs u64 ‖ segment tag u64 ‖ payload xxh3_64 u64 ‖ zero u64 ‖ xxh3_64 of the above u64

Position (number, segment tag), identity (key, shard) and content (checksum) are all checked on read: a record that is
torn, stale, misplaced or somebody else's is never served.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from cachesvc.errors import BlockUnreadable
from cachesvc.keys import KEY_BYTES

PAGE: Final = 4096
VERSION: Final = 1
_MAGIC: Final = b"CSVREC\x00\x01"
_BODY: Final = struct.Struct("<8sHHI16sQIIQQQQQ")
_SUM: Final = struct.Struct("<Q")
TRAILER_BYTES: Final = _BODY.size + _SUM.size

Buffer = bytes | bytearray | memoryview


def checksum(payload: Buffer) -> int:
    """xxh3_64, seed 0: the checksum of a payload everywhere, on the wire and on disk."""
    return xxhash.xxh3_64_intdigest(payload)


def record_bytes(payload_bytes: int) -> int:
    """Size on disk of a record with a payload of that size."""
    return -(-(payload_bytes + TRAILER_BYTES) // PAGE) * PAGE


def microseconds(seconds: float) -> int:
    """A time as it is stored. A clock that is set before 1970 counts as 1970."""
    return max(0, round(seconds * 1e6))


@dataclass(frozen=True)
class RecordHead:
    """What a trailer says. Times are seconds since the epoch."""

    key: bytes
    shard: int
    payload_bytes: int
    number: int
    created: float
    used: float
    segment_tag: int
    checksum: int


def encode_trailer(head: RecordHead) -> bytes:
    """Padding and trailer that follow the payload, so that payload and result fill whole pages."""
    body = _BODY.pack(
        _MAGIC,
        VERSION,
        0,
        head.shard,
        head.key,
        head.payload_bytes,
        head.number,
        0,
        microseconds(head.created),
        microseconds(head.used),
        head.segment_tag,
        head.checksum,
        0,
    )
    padding = record_bytes(head.payload_bytes) - head.payload_bytes - TRAILER_BYTES
    return b"".join((bytes(padding), body, _SUM.pack(checksum(body))))


def decode_trailer(data: Buffer) -> RecordHead | None:
    """The head in a trailer of `TRAILER_BYTES`, or None when it is not a whole, undamaged trailer of this version."""
    if len(data) != TRAILER_BYTES:
        return None
    body = data[: _BODY.size]
    if _SUM.unpack(data[_BODY.size :])[0] != checksum(body):
        return None
    magic, version, _flags, shard, key, length, number, _, created, used, tag, payload_sum, _ = _BODY.unpack(body)
    if magic != _MAGIC or version != VERSION:
        return None
    return RecordHead(key, shard, length, number, created / 1e6, used / 1e6, tag, payload_sum)


def check_record(
    payload: memoryview, trailer: memoryview, *, key: bytes, shard: int, number: int, segment_tag: int
) -> int:
    """The checksum of a record that passes every check. Raises `BlockUnreadable(corrupt=True)` for any other."""
    head = decode_trailer(trailer)
    if head is None:
        raise BlockUnreadable(f"record {number}: its trailer is damaged", corrupt=True)
    if (head.key, head.shard, head.number, head.segment_tag) != (key, shard, number, segment_tag):
        raise BlockUnreadable(
            f"record {number}: holds {head.key.hex()}/{head.shard}, not {key.hex()}/{shard}", corrupt=True
        )
    if head.payload_bytes != len(payload):
        raise BlockUnreadable(
            f"record {number}: has {head.payload_bytes} payload bytes, not {len(payload)}", corrupt=True
        )
    if checksum(payload) != head.checksum:
        raise BlockUnreadable(f"record {number}: payload fails its checksum", corrupt=True)
    return head.checksum


assert len(_MAGIC) == 8 and KEY_BYTES == 16, "the trailer's layout is fixed"
