"""Accepting connections and giving each a thread: what the arena's socket and the bulk channel have in common."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from google.protobuf.message import DecodeError

from cachesvc.limits import MAX_SESSIONS

log = logging.getLogger("cachesvc.server")

# Seconds between tries to accept when the system has no descriptors or memory left.
_ACCEPT_RETRY: Final = 0.1


class Connections:
    """One thread per connection; at `MAX_SESSIONS` a new connection is closed at once.

    `serve` talks until the client is gone. It may raise `OSError`, `EOFError` or `DecodeError` when the connection
    breaks or the client does not keep to the contract.
    """

    def __init__(self, name: str, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        self.stopping = False
        self._name = name
        self._listener = listener
        self._serve = serve
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()

    def start(self) -> None:
        threading.Thread(target=self._accept, name=f"{self._name}-accept", daemon=True).start()

    def stop(self) -> None:
        """Closes the listener and all connections."""
        self.stopping = True
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self.stopping:
                    return
                log.warning("%s: no client can be accepted now: %s", self._name, error.strerror)
                time.sleep(_ACCEPT_RETRY)
                continue
            with self._lock:
                full = len(self._open) >= MAX_SESSIONS
                if not full:
                    self._open.add(connection)
            if full:
                log.warning("%s: %d clients are connected, one more is turned away", self._name, MAX_SESSIONS)
                connection.close()
                continue
            try:
                threading.Thread(target=self._run, args=(connection,), name=f"{self._name}-client", daemon=True).start()
            except RuntimeError as error:  # no thread can be had
                log.warning("%s: a client cannot be served now: %s", self._name, error)
                self._forget(connection)

    def _run(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        except (OSError, DecodeError, EOFError) as error:
            log.debug("%s: a connection ends: %s", self._name, error)
        except Exception:
            log.exception("%s: fault in a call", self._name)
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
        connection.close()
