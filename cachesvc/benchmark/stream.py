"""A raw TCP stream on loopback to another process: the ceiling of what travels. Runs as that process too."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from types import TracebackType
from typing import Final

from cachesvc.benchmark.buffers import Blocks

_TIMEOUT_SECONDS: Final = 60.0
_ORDER: Final = struct.Struct("<B")
_SEND, _RECEIVE = 1, 2


class LoopbackStream:
    """Blocks of one size and number, in either direction. The other end is a process of ours that ends with it."""

    def __init__(self, size: int, count: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_TIMEOUT_SECONDS)
            port = listener.getsockname()[1]
            self._peer = subprocess.Popen(
                [sys.executable, "-m", "cachesvc.benchmark.stream", str(port), str(size), str(count)],
                stdin=subprocess.DEVNULL,
            )
            try:
                self._connection, _ = listener.accept()
            except OSError:
                self._peer.kill()
                self._peer.wait()
                raise
        self._connection.settimeout(_TIMEOUT_SECONDS)

    def __enter__(self) -> LoopbackStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()  # which ends the other process
        try:
            self._peer.wait(_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._peer.kill()
            self._peer.wait()

    def receive(self, target: Blocks) -> None:
        self._connection.sendall(_ORDER.pack(_SEND))
        _receive_all(self._connection, target)

    def send(self, source: Blocks) -> None:
        """Returns when the other end has all of it."""
        self._connection.sendall(_ORDER.pack(_RECEIVE))
        _send_all(self._connection, source)
        if self._connection.recv(1) != b"\0":
            raise EOFError("the other end of the stream is gone")


def _send_all(connection: socket.socket, source: Blocks) -> None:
    for view in source.views:
        connection.sendall(view)


def _receive_all(connection: socket.socket, target: Blocks) -> None:
    for view in target.views:
        done = 0
        while done < len(view):
            got = connection.recv_into(view[done:])
            if not got:
                raise EOFError("the other end of the stream is gone")
            done += got


def main(port: int, size: int, count: int) -> None:
    """The other end: does what it is told until the connection closes."""
    blocks = Blocks(size, count)
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT_SECONDS) as connection:
        connection.settimeout(None)  # it waits as long as its parent has other things to do
        while order := connection.recv(1):
            if order == _ORDER.pack(_SEND):
                _send_all(connection, blocks)
            else:
                _receive_all(connection, blocks)
                connection.sendall(b"\0")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
