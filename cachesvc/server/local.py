"""The arena's socket: the same messages as gRPC, length-prefixed, and the arena's descriptors at Attach.

gRPC cannot carry descriptors and costs five times as much per call on one host. The framing is in ``cache.proto``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from cachesvc.errors import CallError
from cachesvc.leases import Session
from cachesvc.limits import MAX_MESSAGE_BYTES, MAX_SESSIONS
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.frames import Frames
from cachesvc.server.grpc import CODES
from cachesvc.service import Service

log = logging.getLogger("cachesvc.server")

_ATTACH: Final = 1
_RELEASE: Final = 7
_OK: Final = int(grpc.StatusCode.OK.value[0])

# Seconds that a client may take to send the rest of a message it began, or to take a reply.
_STALL: Final = 10.0

# Seconds between tries to accept when the system has no descriptors or memory left.
_ACCEPT_RETRY: Final = 0.1


class LocalServer:
    """One thread per connection; at `MAX_SESSIONS` a new connection is closed at once."""

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
        self._connections: set[socket.socket] = set()
        self._stopping = False
        self._lock = threading.Lock()
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        os.chmod(path, 0o600)
        self._listener.listen(64)

    def start(self) -> None:
        threading.Thread(target=self._accept, name="arena-accept", daemon=True).start()

    def stop(self) -> None:
        """Closes all connections and removes the socket."""
        self._stopping = True
        self._listener.close()
        self.path.unlink(missing_ok=True)
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._stopping:
                    return
                log.warning("the arena's socket cannot accept a client now: %s", error.strerror)
                time.sleep(_ACCEPT_RETRY)
                continue
            with self._lock:
                full = len(self._connections) >= MAX_SESSIONS
                if not full:
                    self._connections.add(connection)
            if full:
                log.warning("%d clients are connected to the arena's socket: one more is turned away", MAX_SESSIONS)
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="arena-client", daemon=True).start()
            except RuntimeError as error:  # no thread can be had
                log.warning("the arena's socket cannot serve a client now: %s", error)
                with self._lock:
                    self._connections.discard(connection)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        session = Session()
        try:
            self._talk(connection, session)
        except (OSError, DecodeError, EOFError) as error:
            log.debug("connection to the arena's socket ends: %s", error)
        except Exception:
            log.exception("fault in a call on the arena's socket")
        finally:
            with self._lock:
                self._connections.discard(connection)
            # In this order: a client looks at its connection to know whether its slots are still its own. At shutdown
            # they are not given to anybody any more.
            connection.close()
            if not self._stopping:
                self._service.end_session(session)

    def _talk(self, connection: socket.socket, session: Session) -> None:
        frames = Frames(connection, MAX_MESSAGE_BYTES)
        attached = False
        while frames.wait():
            number, body = frames.receive(time.monotonic() + _STALL)
            if number not in self._methods or attached == (number == _ATTACH):
                raise EOFError(f"malformed or untimely call {number} of {len(body)} bytes")
            request_type, method, takes_session = self._methods[number]
            request = request_type.FromString(body)
            arguments: list[Any] = [request, session] if takes_session else [request]
            try:
                code, reply = _OK, method(*arguments).SerializeToString()
            except CallError as error:
                code, reply = CODES[type(error)].value[0], str(error).encode()
            if number == _RELEASE:
                continue  # nobody waits for it
            descriptors: list[int] = []
            if number == _ATTACH and code == _OK:
                attached = True
                memory = self._service.store.arena.memory
                descriptors = [memory.readable, memory.writable]
            frames.send(code, reply, time.monotonic() + _STALL, descriptors)
