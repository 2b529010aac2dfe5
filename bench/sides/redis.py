"""Redis over its Unix socket, with the barest client there can be: pipelined RESP, payloads never copied in Python."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence

from sides.base import Buffers, Side, receive_into, send_parts

_WINDOW_BYTES = 8 << 20
"""Asked for ahead of what has arrived: enough to keep both ends busy, little enough to stay in the server's caches."""


class Redis(Side):
    def start(self) -> None:
        path = str(self.directory / "redis.sock")
        server = shutil.which("redis-server")
        if server is None:
            raise RuntimeError("there is no redis-server")
        options = {
            "port": "0",
            "unixsocket": path,
            "save": "",
            "appendonly": "no",
            "maxmemory": str(self.memory),
            "dir": str(self.directory),
        }
        self.serve([server, *(text for name, value in options.items() for text in (f"--{name}", value))])
        self._connection = self.connected(socket.AF_UNIX, path)

    def put(self, keys: Sequence[bytes], source: Buffers) -> None:
        parts: list[bytes | memoryview] = []
        for key, view in zip(keys, source, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(view))
            parts += [head, view, b"\r\n"]
        send_parts(self._connection, parts)
        self._expect(b"+OK\r\n", len(keys))

    def get(self, keys: Sequence[bytes], target: Buffers) -> None:
        asked = 0
        ahead = max(1, _WINDOW_BYTES // len(target[0]))
        head = memoryview(bytearray(len(b"$%d\r\n" % len(target[0]))))
        tail = memoryview(bytearray(2))
        for index, view in enumerate(target):
            if asked <= index:
                wanted = keys[asked : index + ahead]
                self._connection.sendall(b"".join(_command(b"GET", key) for key in wanted))
                asked += len(wanted)
            receive_into(self._connection, head)
            if head != b"$%d\r\n" % len(view):
                raise RuntimeError(f"GET answers {bytes(head)!r}")
            receive_into(self._connection, view)
            receive_into(self._connection, tail)

    def exists(self, keys: Sequence[bytes]) -> int:
        """One EXISTS per key: like a match, it says which of them are there, not only how many."""
        self._connection.sendall(b"".join(_command(b"EXISTS", key) for key in keys))
        replies = memoryview(bytearray(4 * len(keys)))
        receive_into(self._connection, replies)
        return bytes(replies).count(b":1\r\n")

    def forget(self, keys: Sequence[bytes]) -> None:
        self._connection.sendall(b"".join(_command(b"DEL", key) for key in keys))
        receive_into(self._connection, memoryview(bytearray(4 * len(keys))))

    def _expect(self, reply: bytes, count: int) -> None:
        replies = memoryview(bytearray(len(reply) * count))
        receive_into(self._connection, replies)
        if bytes(replies) != reply * count:
            raise RuntimeError(f"a call was answered with {bytes(replies[:80])!r}")


def _command(name: bytes, key: bytes) -> bytes:
    return b"*2\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(name), name, len(key), key)
