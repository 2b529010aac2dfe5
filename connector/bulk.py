"""The client's end of the bulk channel (see `cachesvc.rpc.bulk`): payloads over TCP, straight between buffers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
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
        _CONNECTIONS.add(self)

    def break_off(self) -> None:
        """From any thread: whoever waits on it wakes with an error."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


_CONNECTIONS: Final[weakref.WeakSet[Connection]] = weakref.WeakSet()


def _close_inherited() -> None:
    """In a forked child: its copies would keep the parent's connections alive after the parent has died."""
    for connection in list(_CONNECTIONS):
        connection.socket.close()


os.register_at_fork(after_in_child=_close_inherited)


class BulkChannel:
    """Connections to one boot of one daemon, for any thread. Calls raise `CacheError`."""

    def __init__(self, host: str, port: int, boot_id: bytes) -> None:
        self.boot_id = boot_id
        self._host = host
        self._port = port
        self._lock = threading.Lock()
        self._idle: list[tuple[Connection, float]] = []
        """Connections, and since when (monotonic seconds) they are not used."""
        self._busy: set[Connection] = set()
        self._closed = False

    def close(self) -> None:
        """Ends everything that is under way with `Unreachable`."""
        with self._lock:
            self._closed = True
            busy, idle, self._idle = list(self._busy), [connection for connection, _ in self._idle], []
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
        except BaseException:
            self.give(connection, good=False)
            raise
        return BulkReplies(self, connection, deadline)

    def put(
        self, lease_id: bytes, indices: Sequence[int], payloads: Sequence[memoryview], deadline_s: float
    ) -> tuple[Any, list[int]]:
        """The daemon's PutReply, and the payloads' checksums."""
        deadline = time.monotonic() + deadline_s
        connection = self._take(deadline)
        good = False
        sums: list[int] = []
        try:
            with _errors("Put"):
                frames = connection.frames
                frames.send(bulk.PUT, pb.PutRequest(lease_id=lease_id).SerializeToString(), deadline)
                step = bulk.blocks_at_once(payloads[0].nbytes) if payloads else 1
                for start in range(0, len(payloads), step):
                    part = list(payloads[start : start + step])
                    sums += [xxhash.xxh3_64_intdigest(payload) for payload in part]
                    heads = [
                        bulk.Head(index, 0, payload.nbytes, total)
                        for index, payload, total in zip(indices[start:], part, sums[start:], strict=False)
                    ]
                    frames.send_with(bulk.BATCH, bulk.pack_heads(heads), part, deadline)
                frames.send(bulk.BATCH, b"", deadline)
                status, body = frames.receive(deadline)
                if status:
                    raise from_status(status, "Put", body.decode(errors="replace"))
                reply = pb.PutReply.FromString(body)
            good = True
        finally:
            self.give(connection, good=good)
        return reply, sums

    def give(self, connection: Connection, *, good: bool) -> None:
        """Ends the use of a connection; `good` says that nothing is left to be read from it."""
        with self._lock:
            self._busy.discard(connection)
            good = good and not self._closed and len(self._idle) < MAX_IDLE
            if good:
                self._idle.append((connection, time.monotonic()))
        if not good:
            connection.break_off()  # a forked child may hold the socket open
            connection.socket.close()

    def _take(self, deadline: float) -> Connection:
        connection: Connection | None = None
        with self._lock:
            old = time.monotonic() - bulk.CLIENT_IDLE_SECONDS
            stale = [idle for idle, since in self._idle if since < old]
            self._idle = [(idle, since) for idle, since in self._idle if since >= old]
            if self._idle and not self._closed:
                connection, _ = self._idle.pop()
        for idle in stale:
            idle.socket.close()
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
    """The blocks of one Get, batch after batch."""

    def __init__(self, channel: BulkChannel, connection: Connection, deadline: float) -> None:
        self._channel = channel
        self._connection = connection
        self._deadline = deadline
        self._heads: list[bulk.Head] = []
        """Of the batch at hand, whose payloads are still to be received."""
        self._error: CacheError | None = None
        self._done = False
        self._lock = threading.Lock()
        self._closed = False

    def receive(self, targets: Callable[[int], memoryview], *, first: int, room: int, end: int) -> list[memoryview]:
        """The next blocks, `first` and up to `room` behind it, each checked and in its target.

        `end` is the block behind the last one asked. At the first that is not as it should be the blocks before it are
        returned, and the next call raises `CacheError`.
        """
        if self._error is not None:
            raise self._error
        with _errors("Get"):
            if not self._heads:
                self._heads = self._next_heads(first, end)
            part = self._heads[:room]
            del self._heads[:room]
            views = [targets(head.block) for head in part if not head.miss]
            for head, view in zip(part, views, strict=False):
                if head.payload_bytes != len(view):
                    raise BadAnswer(f"Get: block {head.block} has {head.payload_bytes} bytes, not {len(view)}")
            self._connection.frames.receive_into(views, self._deadline)
        for number, head in enumerate(part):
            if head.miss:
                self._error = BlockMissing(f"Get: block {head.block} is gone", pb.MissReason.ValueType(head.miss))
                self._done = not self._heads
                return views
            if xxhash.xxh3_64_intdigest(views[number]) != head.checksum:
                self._error = BadChecksum(f"Get: block {head.block} fails its checksum")
                return views[:number]
        self._done = first + len(part) == end
        return views

    def _next_heads(self, first: int, end: int) -> list[bulk.Head]:
        status, body = self._connection.frames.receive(self._deadline)
        if status != bulk.BATCH:
            raise from_status(status, "Get", body.decode(errors="replace"))
        heads = bulk.unpack_heads(body)
        last = first + len(heads)
        missed = [number for number, head in enumerate(heads) if head.miss]
        if (
            [head.block for head in heads] != list(range(first, last))
            or not first < last <= end
            or missed not in ([], [len(heads) - 1])
        ):
            raise BadAnswer(f"Get: blocks {[head.block for head in heads]} came; {first} to {end} are wanted")
        return heads

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
    except (OSError, EOFError, ValueError, DecodeError) as error:
        raise Unreachable(f"{name}: {error}") from error
