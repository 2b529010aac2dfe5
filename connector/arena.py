"""The daemon's arena, mapped into this process, and the calls of the daemon's local socket (see ``cache.proto``).

Payloads are read from, and written to, the daemon's own memory: no byte of them passes a socket. The memory is mapped
twice: once read-only, for loading, and once writable, of which only slots that Reserve granted may be touched.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.message import DecodeError

from cachesvc.connector.errors import BadAnswer, CacheError, NotAttached, TimedOut, Unreachable, from_status
from cachesvc.rpc import cache_pb2 as pb

NO_SLOT: Final = 2**64 - 1
MAX_REPLY_BYTES: Final = 4 << 20
"""Far more than the replies to the largest calls; a longer one is a lie and ends the connection."""

_HEAD: Final = struct.Struct("<IB")
_METHODS: Final[dict[str, tuple[int, Any]]] = {
    "Attach": (1, pb.AttachReply),
    "Match": (2, pb.MatchReply),
    "Load": (3, pb.LoadReply),
    "Reserve": (4, pb.ReserveReply),
    "Commit": (5, pb.CommitReply),
    "Abort": (6, pb.AbortReply),
    "Release": (7, pb.ReleaseReply),
}


class ArenaUnavailable(Exception):
    """The arena cannot be mapped from here; says why, for people. Payloads go over gRPC then."""


class Arena:
    """One boot of one daemon. Calls may come from any thread: each has a connection, and so a session, of its own.

    `call` raises `CacheError`. A view of the arena stays mapped as long as it is used, also after `close`.
    """

    def __init__(self, path: str, attach: pb.AttachRequest, boot_id: bytes, timeout_s: float) -> None:
        """Connects and maps. Raises `ArenaUnavailable`."""
        self._path = path
        self._attach = attach
        self.boot_id = boot_id
        self._lock = threading.Lock()
        self._own = threading.local()
        self._connections: set[socket.socket] = set()
        self._closed = False
        try:
            self._own.connection, reply, descriptors = self._connect(time.monotonic() + timeout_s)
        except OSError as error:
            raise ArenaUnavailable(f"{path}: {error.strerror or error}") from error
        except CacheError as error:
            raise ArenaUnavailable(f"{path}: {error}") from error
        try:
            read, write = descriptors
            self._readable = memoryview(mmap.mmap(read, reply.arena_bytes, prot=mmap.PROT_READ))
            self._writable = memoryview(mmap.mmap(write, reply.arena_bytes))
        except (OSError, ValueError) as error:
            self.close()
            raise ArenaUnavailable(f"{path}: the shared memory cannot be mapped: {error}") from error
        finally:
            _close_all(descriptors)

    def close(self) -> None:
        """Ends all sessions, and calls that are under way with `Unreachable`."""
        with self._lock:
            self._closed = True
            connections, self._connections = self._connections, set()
        for connection in connections:
            _shut(connection)

    def call(self, name: str, request: Any, deadline_s: float) -> Any:
        """The reply. Raises `CacheError`; after a call that was not answered in time the session is ended."""
        deadline = time.monotonic() + deadline_s
        connection = getattr(self._own, "connection", None)
        try:
            if connection is None:
                connection, _, descriptors = self._connect(deadline)
                _close_all(descriptors)
                self._own.connection = connection
            return self._exchange(connection, name, request, deadline)
        except TimeoutError as error:
            self._drop()
            raise TimedOut(f"{name}: no answer from {self._path} within {deadline_s:.3f} s") from error
        except (OSError, EOFError, DecodeError) as error:
            self._drop()
            raise self._lost(name, error, deadline) from error

    def readable(self, offset: int, size: int) -> memoryview:
        """A slot's payload, read-only. Raises `BadAnswer` for one outside of the arena."""
        return self._readable[self._checked(offset, size) : offset + size]

    def writable(self, offset: int, size: int) -> memoryview:
        """A slot's payload, to be filled while the write lease lives. Raises `BadAnswer`."""
        return self._writable[self._checked(offset, size) : offset + size]

    def _checked(self, offset: int, size: int) -> int:
        if offset % mmap.PAGESIZE or offset + size > len(self._readable):
            raise BadAnswer(f"slot at {offset} of {size} bytes does not lie in the arena of {len(self._readable)}")
        return offset

    def _connect(self, deadline: float) -> tuple[socket.socket, Any, list[int]]:
        """A new session: connection, the daemon's reply, and the arena's descriptors for the caller to close."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(_remaining(deadline))
            connection.connect(self._path)
            connection.sendall(_framed("Attach", self._attach))
            # Descriptors come with the first byte of the reply, and only with a call that asks for them.
            first, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
            if not first:
                raise EOFError("the daemon closed the connection")
            try:
                reply = _read_reply(connection, "Attach", deadline, first)
                if reply.boot_id != self.boot_id or len(descriptors) != 2:
                    raise NotAttached(f"{self._path} belongs to boot {reply.boot_id.hex()}, not {self.boot_id.hex()}")
            except BaseException:
                _close_all(descriptors)
                raise
            with self._lock:
                if self._closed:
                    _close_all(descriptors)
                    raise EOFError("this client is closed")
                self._connections.add(connection)
        except BaseException:
            connection.close()
            raise
        return connection, reply, descriptors

    def _exchange(self, connection: socket.socket, name: str, request: Any, deadline: float) -> Any:
        connection.settimeout(_remaining(deadline))
        connection.sendall(_framed(name, request))
        return _read_reply(connection, name, deadline)

    def _drop(self) -> None:
        """Ends this thread's session: its next call makes another."""
        connection, self._own.connection = getattr(self._own, "connection", None), None
        if connection is not None:
            with self._lock:
                self._connections.discard(connection)
            _shut(connection)
            connection.close()

    def _lost(self, name: str, error: Exception, deadline: float) -> CacheError:
        """A broken connection: did the daemon restart (attach again), or is it gone?"""
        if self._closed:
            return Unreachable(f"{name}: this client is closed")
        try:
            connection, _, descriptors = self._connect(deadline)
        except NotAttached as restarted:
            return restarted
        except (CacheError, OSError, EOFError):
            return Unreachable(f"{name}: {self._path}: {error}")
        _close_all(descriptors)
        self._own.connection = connection
        return Unreachable(f"{name}: the daemon closed the connection")


def slot_positions(packed: bytes, count: int, name: str) -> Sequence[int]:
    """Unpacks `count` fixed64 values. Raises `BadAnswer` for another number of bytes."""
    if len(packed) != 8 * count:
        raise BadAnswer(f"{name}: {len(packed)} bytes came for {count} slots")
    return struct.unpack(f"<{count}Q", packed)


def _framed(name: str, request: Any) -> bytes:
    message: bytes = request.SerializeToString()
    return _HEAD.pack(1 + len(message), _METHODS[name][0]) + message


def _read_reply(connection: socket.socket, name: str, deadline: float, begun: bytes = b"") -> Any:
    length, status = _HEAD.unpack(begun + _receive(connection, _HEAD.size - len(begun), deadline))
    if not 1 <= length <= MAX_REPLY_BYTES:
        raise EOFError(f"a reply of {length} bytes")
    body = _receive(connection, length - 1, deadline)
    if status:
        raise from_status(status, name, body.decode(errors="replace"))
    return _METHODS[name][1].FromString(body)


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Exactly `size` bytes. Raises `TimeoutError`, `EOFError`, `OSError`."""
    data = bytearray(size)
    view = memoryview(data)
    done = 0
    while done < size:
        connection.settimeout(_remaining(deadline))
        got = connection.recv_into(view[done:])
        if not got:
            raise EOFError("the daemon closed the connection")
        done += got
    return bytes(data)


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it was not connected any more


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
