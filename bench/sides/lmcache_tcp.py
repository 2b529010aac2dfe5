"""LMCache's TCP server, through a bare client of its protocol: requests pipelined, payloads never copied in Python."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Sequence

from sides.base import Buffers, Side, free_port, receive_into, send_parts

_PUT, _GET, _EXIST = 1, 2, 3
_REQUEST = struct.Struct("<9i150s")
"""Command, length, format, dtype, location, four dimensions, key."""

_REPLY = struct.Struct("<9i")
"""Code, length, format, dtype, four dimensions, location."""

_SUCCESS = 200
_FORMAT, _UINT8, _NOWHERE = 1, 6, 0
_WINDOW_BYTES = 8 << 20


class LMCacheTCP(Side):
    def start(self) -> None:
        port = free_port()
        self.serve(
            [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)], {"LMCACHE_TRACK_USAGE": "false"}
        )
        self._connection = self.connected(socket.AF_INET, ("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, keys: Sequence[bytes], source: Buffers) -> None:
        parts: list[bytes | memoryview] = []
        for index, view in enumerate(source):
            parts += [_request(_PUT, index, len(view)), view]
        send_parts(self._connection, parts)
        if self.exists(keys[-1:]) != 1:  # a put has no answer: the server takes one request after the other
            raise RuntimeError("what was put is not there")

    def get(self, keys: Sequence[bytes], target: Buffers) -> None:
        asked = 0
        ahead = max(1, _WINDOW_BYTES // len(target[0]))
        for index, view in enumerate(target):
            if asked <= index:
                wanted = range(asked, min(len(keys), index + ahead))
                self._connection.sendall(b"".join(_request(_GET, i, 0) for i in wanted))
                asked += len(wanted)
            code, length = self._reply()
            if code != _SUCCESS or length != len(view):
                raise RuntimeError(f"a get is answered with {code} and {length} bytes")
            receive_into(self._connection, view)

    def exists(self, keys: Sequence[bytes]) -> int:
        self._connection.sendall(b"".join(_request(_EXIST, index, 0) for index in range(len(keys))))
        return sum(self._reply()[0] == _SUCCESS for _ in keys)

    def _reply(self) -> tuple[int, int]:
        head = bytearray(_REPLY.size)
        receive_into(self._connection, memoryview(head))
        code, length, *_ = _REPLY.unpack(head)
        return code, length


def _request(command: int, index: int, length: int) -> bytes:
    """Blocks are named by their position and not by their key: the server never deletes, so names must be reused."""
    key = b"model@1@0@%x@uint8" % (1 + index)
    return _REQUEST.pack(command, length, _FORMAT, _UINT8, _NOWHERE, length, 0, 0, 0, key.ljust(150))
