"""The bulk channel's bytes (a leaf module): payloads over TCP, for clients that cannot map the arena.

gRPC carries payloads five to eight times slower than a plain stream. A connection carries requests one after another;
the 16 random bytes of a lease are the ticket that opens it. Requests and replies are framed as in `frames`. Payloads go
in batches: a frame `BATCH` with heads (little-endian: block u32 ‖ miss reason u32 ‖ payload bytes u64 ‖ xxh3_64 u64), up
to `MAX_HEADS`, then the payloads back to back, so that both ends move megabytes with one system call.

* `GET` with a GetRequest: the daemon sends batches in prefix order, up to the last block asked or to a head that gives a
  reason and no payload. Instead of a batch it may send a frame with a gRPC status code and a text.
* `PUT` with a PutRequest that holds the lease id only: the client sends batches, the last of them empty; the daemon
  answers with a frame: 0 and a PutReply, or a status code and a text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

GET: Final = 1
PUT: Final = 2
BATCH: Final = 255
"""Code of a frame that is no gRPC status."""

MAX_HEADS: Final = 256
BATCH_BYTES: Final = 4 << 20
"""What a batch should hold: more gains nothing, and the first block would wait for the last."""

CLIENT_IDLE_SECONDS: Final = 30.0
SERVER_IDLE_SECONDS: Final = 120.0
"""How long an end keeps a connection that carries nothing: the client gives it up first, so that none breaks in use."""

_HEAD: Final = struct.Struct("<IIQQ")


class Head(NamedTuple):
    block: int
    miss: int
    payload_bytes: int
    checksum: int


def pack_heads(heads: Iterable[Head]) -> bytes:
    return b"".join([_HEAD.pack(*head) for head in heads])


def unpack_heads(data: bytes) -> list[Head]:
    """Raises `ValueError` for another number of bytes, or for more than `MAX_HEADS`."""
    if len(data) % _HEAD.size or len(data) > MAX_HEADS * _HEAD.size:
        raise ValueError(f"{len(data)} bytes are no heads of {_HEAD.size}, {MAX_HEADS} at most")
    return [Head(*fields) for fields in _HEAD.iter_unpack(data)]


def blocks_at_once(payload_bytes: int) -> int:
    """Blocks of that size that make a batch."""
    return max(1, min(MAX_HEADS, BATCH_BYTES // payload_bytes))
