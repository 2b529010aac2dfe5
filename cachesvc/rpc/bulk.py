"""The bulk channel's bytes (a leaf module): payloads over TCP, for clients that cannot map the arena.

gRPC carries payloads five to eight times slower than a plain stream. A connection carries requests one after another;
the 16 random bytes of a lease are the ticket that opens it. Requests and replies are framed as in `frames`, payloads
follow each on a head of `HEAD_BYTES` (little-endian: block u32 ‖ miss reason u32 ‖ payload bytes u64 ‖ xxh3_64 u64).

* `GET` with a GetRequest: the daemon answers with a frame (a gRPC status code, and a text unless it is 0), then sends
  head and payload of each block in prefix order, up to the last one asked or to a head that gives a reason and no
  payload.
* `PUT` with a PutRequest that holds the lease id only: the client sends head (checksum 0) and payload of each block, and
  a head with block `END`; the daemon answers with a frame: 0 and a PutReply, or a status code and a text.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

GET: Final = 1
PUT: Final = 2
END: Final = 2**32 - 1

_HEAD: Final = struct.Struct("<IIQQ")
HEAD_BYTES: Final = _HEAD.size


class Head(NamedTuple):
    block: int
    miss: int
    payload_bytes: int
    checksum: int

    def packed(self) -> bytes:
        return _HEAD.pack(*self)


def unpack_head(data: bytes | bytearray | memoryview) -> Head:
    return Head(*_HEAD.unpack(data))
