"""The arena's socket: the same messages as gRPC, length-prefixed, and the arena's descriptors at Attach.

gRPC cannot carry descriptors and costs five times as much per call on one host. The framing is in ``cache.proto``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from cachesvc.errors import CallError
from cachesvc.leases import Session
from cachesvc.limits import CLIENT_STALL_SECONDS, MAX_MESSAGE_BYTES
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.frames import SAVE_SPIN_SECONDS, SPIN_SECONDS, Frames
from cachesvc.server.connections import Connections
from cachesvc.server.grpc import CODES
from cachesvc.service import Service

_ATTACH: Final = 1
_RELEASE: Final = 7
_OK: Final = int(grpc.StatusCode.OK.value[0])
_FAULT: Final = int(grpc.StatusCode.INTERNAL.value[0])

log = logging.getLogger("cachesvc.server")


class LocalServer:
    def __init__(self, service: Service, path: Path) -> None:
        """Binds; the caller holds the lock that makes `path` its own. Raises `OSError`."""
        self.path = path
        self._service = service
        self._methods: dict[int, tuple[type[Message], Callable[..., Message], bool]] = {
            _ATTACH: (pb.AttachRequest, service.attach, False),
            2: (pb.MatchRequest, service.match, True),
            3: (pb.LoadRequest, service.load, False),
            4: (pb.ReserveRequest, service.reserve, True),
            5: (pb.CommitRequest, service.commit, True),
            6: (pb.AbortRequest, service.abort, True),
            _RELEASE: (pb.ReleaseRequest, service.release, False),
            8: (pb.ReportRequest, service.report, False),
        }
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        os.chmod(path, 0o600)
        listener.listen(64)
        self._connections = Connections("arena", listener, self._serve)

    def start(self) -> None:
        self._connections.start()

    def stop(self) -> None:
        """Closes all connections and removes the socket."""
        self.path.unlink(missing_ok=True)
        self._connections.stop()

    def _serve(self, connection: socket.socket) -> None:
        session = Session()
        try:
            self._talk(connection, session)
        finally:
            # A client may be writing to its slots at this moment. That it has stopped is known only when it closes its
            # end; if it never does, its slots stay aside. At shutdown they are not given to anybody any more.
            if session.writes or session.aside:
                _wait_until_closed(connection)
            connection.close()
            if not self._connections.stopping:
                self._service.end_session(session)

    def _talk(self, connection: socket.socket, session: Session) -> None:
        frames = Frames(connection, MAX_MESSAGE_BYTES)
        attached = False
        while not attached or frames.wait():
            number, body = frames.receive(time.monotonic() + CLIENT_STALL_SECONDS)
            if number not in self._methods or attached == (number == _ATTACH):
                raise EOFError(f"malformed or untimely call {number} of {len(body)} bytes")
            request_type, method, takes_session = self._methods[number]
            request = request_type.FromString(body)
            arguments: list[Any] = [request, session] if takes_session else [request]
            try:
                code, reply = _OK, method(*arguments).SerializeToString()
            except CallError as error:
                code, reply = CODES[type(error)].value[0], str(error).encode()
            except Exception as error:
                log.exception("fault in a call")
                code, reply = _FAULT, f"fault of the daemon: {type(error).__name__}; see its log".encode()
            if number == _RELEASE:
                continue  # nobody waits for it
            descriptors: list[int] = []
            if number == _ATTACH and code == _OK:
                attached = True
                memory = self._service.store.arena.memory
                descriptors = [memory.readable, memory.writable]
            frames.send(code, reply, time.monotonic() + CLIENT_STALL_SECONDS, descriptors)
            if session.later is not None:
                later, session.later = session.later, None
                later()
            frames.spin_s = SAVE_SPIN_SECONDS if self._service.saving(session) else SPIN_SECONDS


def _wait_until_closed(connection: socket.socket) -> None:
    """Tells the client that it is cut off, and waits until it has closed its end or is gone."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(None)
        while True:
            try:
                if not connection.recv(65_536):
                    return
            except BlockingIOError:  # the kernel's own timeout, left from the talk
                continue
