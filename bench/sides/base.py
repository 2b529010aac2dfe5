"""What every store must do to be measured. Standard library only: it is loaded in the rivals' environments too."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

START_SECONDS = 90.0
STOP_SECONDS = 20.0
CALL_SECONDS = 60.0

Buffers = Sequence[memoryview]


class Side(ABC):
    """One store: its server and one client of it. Whatever fails raises; the caller then leaves this store out."""

    def __init__(self, directory: Path, memory: int) -> None:
        """`directory` is for sockets, logs and files; the server may hold `memory` bytes of payload."""
        self.directory = directory
        self.memory = memory
        self._servers: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def start(self) -> None:
        """Starts the server, on loopback only, and waits until it answers."""

    def allocate(self, size: int, count: int) -> tuple[Buffers, Buffers]:
        """Warm page-aligned buffers to put from and to get into."""
        return buffers(size, count), buffers(size, count)

    @abstractmethod
    def put(self, keys: Sequence[bytes], source: Buffers) -> None:
        """Stores all blocks; returns when they can be got."""

    @abstractmethod
    def get(self, keys: Sequence[bytes], target: Buffers) -> None:
        """Copies all blocks into `target`; raises when one is missing."""

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> int:
        """How many of the keys are stored."""

    def release(self) -> None:  # noqa: B027  most have nothing to do
        """Not timed, after a look-up: gives back what it took."""

    def settle(self) -> None:  # noqa: B027
        """Not timed, after a put: waits for what the server still does with it."""

    def forget(self, keys: Sequence[bytes]) -> None:  # noqa: B027
        """Not timed, before the next put: makes room, where the server does not do so by itself."""

    def stop(self) -> None:
        """Ends the servers that were started, and no others."""
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        self._servers = []

    def serve(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Starts a server process, with its output in a log file."""
        with (self.directory / "server.log").open("ab") as log:
            self._servers.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.directory,
                    env={**os.environ, **(environment or {})},
                )
            )

    def connected(self, family: socket.AddressFamily, address: tuple[str, int] | str) -> socket.socket:
        """A connection to a server that may still be starting. Raises `RuntimeError` when it does not come up."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.settimeout(CALL_SECONDS)
            try:
                connection.connect(address)
            except OSError as error:
                connection.close()
                if time.monotonic() > deadline or any(server.poll() is not None for server in self._servers):
                    raise RuntimeError(f"its server does not come up: {self.last_words()}") from error
                time.sleep(0.1)
            else:
                return connection

    def last_words(self) -> str:
        """The last line that a server wrote."""
        lines = (self.directory / "server.log").read_text(errors="replace").strip().splitlines()
        return lines[-1][-300:] if lines else "it said nothing"


def buffers(size: int, count: int) -> Buffers:
    """Page-aligned, each on its own pages."""
    stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = memoryview(mmap.mmap(-1, stride * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    return [memory[i * stride : i * stride + size] for i in range(count)]


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fills `view`. Raises `EOFError`, `OSError`."""
    done = 0
    while done < len(view):
        got = connection.recv_into(view[done:])
        if not got:
            raise EOFError("the server closed the connection")
        done += got


def send_parts(connection: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """Sends all of `parts` without joining them."""
    left = [memoryview(part) for part in parts]
    while left:
        sent = connection.sendmsg(left[:512])
        while left and sent >= len(left[0]):
            sent -= len(left[0])
            del left[0]
        if sent:
            left[0] = left[0][sent:]
