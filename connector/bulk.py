"""The client's end of the bulk channel (see `cachesvc.rpc.bulk`): payloads over TCP, straight between buffers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import xxhash
from google.protobuf.message import DecodeError

from cachesvc.connector.errors import (
    BadAnswer,
    BadChecksum,
    BlockMissing,
    CacheError,
    TimedOut,
    Unreachable,
    from_status,
)
from cachesvc.rpc import bulk
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.frames import Frames

MAX_IDLE: Final = 4
"""Connections kept for the next request; further ones are closed when their request ends."""
_MAX_REPLY_BYTES: Final = 64 << 10


class Connection:
    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        """Raises `OSError`."""
        self.socket = socket.create_connection((host, port), timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.frames = Frames(self.socket, _MAX_REPLY_BYTES, ahead=False)

    def break_off(self) -> None:
        """From any thread: whoever waits on it wakes with an error."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class BulkChannel:
    """Connections to one boot of one daemon, for any thread. Calls raise `CacheError`."""

    def __init__(self, host: str, port: int, boot_id: bytes) -> None:
        self.boot_id = boot_id
        self._host = host
        self._port = port
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False

    def close(self) -> None:
        """Ends everything that is under way with `Unreachable`."""
        with self._lock:
            self._closed = True
            busy, idle, self._idle = list(self._busy), self._idle, []
        for connection in busy:
            connection.break_off()
        for connection in idle:
            connection.socket.close()

    def get(self, request: pb.GetRequest, deadline_s: float) -> BulkReplies:
        """Begins a Get; its blocks are read from what is returned, which must be closed."""
        deadline = time.monotonic() + deadline_s
        connection = self._take(deadline)
        try:
            with _errors("Get"):
                connection.frames.send(bulk.GET, request.SerializeToString(), deadline)
                _reply(connection.frames, "Get", deadline)
        except BaseException:
            self.give(connection, good=False)
            raise
        return BulkReplies(self, connection, deadline)

    def put(self, lease_id: bytes, payloads: Sequence[tuple[int, memoryview]], deadline_s: float) -> Any:
        """The daemon's PutReply."""
        deadline = time.monotonic() + deadline_s
        connection = self._take(deadline)
        good = False
        try:
            with _errors("Put"):
                frames = connection.frames
                frames.send(bulk.PUT, pb.PutRequest(lease_id=lease_id).SerializeToString(), deadline)
                for index, payload in payloads:
                    frames.send_all([bulk.Head(index, 0, payload.nbytes, 0).packed(), payload], deadline)
                frames.send_all([bulk.Head(bulk.END, 0, 0, 0).packed()], deadline)
                reply = pb.PutReply.FromString(_reply(frames, "Put", deadline))
            good = True
        finally:
            self.give(connection, good=good)
        return reply

    def give(self, connection: Connection, *, good: bool) -> None:
        """Ends the use of a connection; `good` says that nothing is left to be read from it."""
        with self._lock:
            self._busy.discard(connection)
            good = good and not self._closed and len(self._idle) < MAX_IDLE
            if good:
                self._idle.append(connection)
        if not good:
            connection.socket.close()

    def _take(self, deadline: float) -> Connection:
        with self._lock:
            connection = self._idle.pop() if self._idle and not self._closed else None
        if connection is None:
            with _errors("the bulk channel"):
                connection = Connection(self._host, self._port, max(0.001, deadline - time.monotonic()))
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection
        connection.socket.close()
        raise Unreachable("this client is closed")


class BulkReplies:
    """The blocks of one Get, one after another."""

    def __init__(self, channel: BulkChannel, connection: Connection, deadline: float) -> None:
        self._channel = channel
        self._connection = connection
        self._deadline = deadline
        self._head = memoryview(bytearray(bulk.HEAD_BYTES))
        self._done = False
        self._lock = threading.Lock()
        self._closed = False

    def read_into(self, target: memoryview, index: int, *, last: bool) -> None:
        """The payload of block `index`, checked. `last`: it is the last that was asked for. Raises `CacheError`."""
        with _errors("Get"):
            self._connection.frames.receive_into(self._head, self._deadline)
            head = bulk.unpack_head(self._head)
            if head.block != index:
                raise BadAnswer(f"Get: block {head.block} came instead of {index}")
            if head.miss:
                self._done = head.payload_bytes == 0
                raise BlockMissing(f"Get: block {index} is gone", pb.MissReason.ValueType(head.miss))
            if head.payload_bytes != len(target):
                raise BadAnswer(f"Get: block {index} has {head.payload_bytes} bytes, not {len(target)}")
            self._connection.frames.receive_into(target, self._deadline)
        self._done = last
        if xxhash.xxh3_64_intdigest(target) != head.checksum:
            raise BadChecksum(f"Get: block {index} fails its checksum")

    def cancel(self) -> None:
        """From any thread. After `close` it does nothing: the connection may be somebody else's."""
        with self._lock:
            if not self._closed:
                self._done = False
                self._connection.break_off()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._channel.give(self._connection, good=self._done)


@contextlib.contextmanager
def _errors(name: str) -> Iterator[None]:
    try:
        yield
    except CacheError:
        raise
    except TimeoutError as error:
        raise TimedOut(f"{name}: no answer in time") from error
    except (OSError, EOFError, DecodeError) as error:
        raise Unreachable(f"{name}: {error}") from error


def _reply(frames: Frames, name: str, deadline: float) -> bytes:
    status, body = frames.receive(deadline)
    if status:
        raise from_status(status, name, body.decode(errors="replace"))
    return body
