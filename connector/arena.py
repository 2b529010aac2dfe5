"""The daemon's arena, mapped into this process, and the calls of the daemon's local socket (see ``cache.proto``).

Payloads are read from, and written to, the daemon's own memory: no byte of them passes a socket. The memory is mapped
twice: once read-only, for loading, and once writable, of which only slots that Reserve granted may be touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import threading
import time
import weakref
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

from google.protobuf.message import DecodeError

from cachesvc.connector.errors import BadAnswer, CacheError, NotAttached, TimedOut, Unreachable, from_status
from cachesvc.connector.payloads import SLOT_PAGE, Payloads, Region
from cachesvc.connector.prefault import Prefault
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.frames import SAVE_SPIN_SECONDS, SPIN_SECONDS, Frames

NO_SLOT: Final = 2**64 - 1
MAX_REPLY_BYTES: Final = 4 << 20
"""Far more than the replies to the largest calls; a longer one is a lie and ends the connection."""

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


class Session:
    """One connection. The daemon holds what was leased on it until it closes, and may then give the slots to others.

    `lock` is held while a slot is written and while the session is ended, so that nobody writes after its end.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames = Frames(connection, MAX_REPLY_BYTES)
        self.lock = threading.Lock()
        self.ended = False
        _SESSIONS.add(self)

    def end(self) -> None:
        """From now on nothing leased on it is good. Marked before the daemon can notice."""
        with self.lock:
            self.ended = True
            with contextlib.suppress(OSError):  # it was not connected any more
                self.connection.shutdown(socket.SHUT_RDWR)

    @property
    def alive(self) -> bool:
        """Whether what is leased on it is still held. The daemon closes a connection before it frees its slots."""
        if self.ended:
            return False
        poller = select.poll()
        try:
            poller.register(self.connection, select.POLLRDHUP)
        except ValueError:
            return False  # closed
        return not poller.poll(0)


class Pipeline:
    """Calls sent and answers read, in the same order. What goes wrong is `Arena.pipeline`'s to say."""

    def __init__(self, session: Session, deadline: float) -> None:
        self.session = session
        self._deadline = deadline

    def send(self, name: str, request: Any) -> None:
        self.session.frames.send(_METHODS[name][0], request.SerializeToString(), self._deadline)

    def receive(self, name: str) -> Any:
        return _reply(self.session.frames, name, self._deadline)


_SESSIONS: Final[weakref.WeakSet[Session]] = weakref.WeakSet()


def _close_inherited() -> None:
    """In a forked child: its copies would keep the parent's sessions alive after the parent has died."""
    for session in list(_SESSIONS):
        session.connection.close()


os.register_at_fork(after_in_child=_close_inherited)


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
        # Weak: a session ends with the thread that used it, once no lease of it is used any more.
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._closed = False
        self._prefault = Prefault([])
        try:
            self._own.session, reply, descriptors = self._connect(time.monotonic() + timeout_s)
        except OSError as error:
            raise ArenaUnavailable(f"{path}: {error.strerror or error}") from error
        except (CacheError, EOFError) as error:
            raise ArenaUnavailable(f"{path}: {error}") from error
        try:
            read, write = descriptors
            _check_sealed(read, reply.arena_bytes)
            readable = mmap.mmap(read, reply.arena_bytes, prot=mmap.PROT_READ)
            writable = mmap.mmap(write, reply.arena_bytes)
            memory = os.dup(read)
        except (OSError, ValueError, OverflowError) as error:
            self.close()
            raise ArenaUnavailable(f"{path}: the shared memory cannot be mapped: {error}") from error
        finally:
            _close_all(descriptors)
        self._writable = Region(memoryview(writable))
        self._writable.writable = self._writable
        self._readable = Region(memoryview(readable), self._writable)
        self._prefault = Prefault([(readable, False), (writable, True)], memory)
        self._prefault.start()

    def close(self) -> None:
        """Ends all sessions, and calls that are under way with `Unreachable`."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions)
        self._prefault.stop()
        for session in sessions:
            session.end()

    def reachable(self, timeout_s: float) -> bool:
        """Whether this thread has a session, or gets one."""
        deadline = time.monotonic() + timeout_s
        try:
            return self._open(deadline).alive
        except (CacheError, OSError, EOFError):
            return False

    @property
    def session(self) -> Session:
        """The session of this thread's last call: what it leased is good while it is alive. Raises `Unreachable`."""
        session: Session | None = getattr(self._own, "session", None)
        if session is None:
            raise Unreachable("this thread's session has ended")
        return session

    def call(self, name: str, request: Any, deadline_s: float) -> Any:
        """The reply; None for Release, which has none. Raises `CacheError`.

        After a call that was not answered in time the session is ended.
        """
        deadline = time.monotonic() + deadline_s
        try:
            return _exchange(self._open(deadline).frames, name, request, deadline)
        except TimeoutError as error:
            self._drop()
            raise TimedOut(f"{name}: no answer from {self._path} within {deadline_s:.3f} s") from error
        except (OSError, EOFError, DecodeError) as error:
            self._drop()
            raise self._lost(name, error, deadline) from error

    @contextlib.contextmanager
    def pipeline(self, deadline_s: float) -> Iterator[Pipeline]:
        """Calls of this thread that do not wait for each other. Raises `CacheError`.

        After any exception the session is ended, and with it all leases that were taken on it: answers may be missing.
        """
        deadline = time.monotonic() + deadline_s
        try:
            session = self._open(deadline)
            session.frames.spin_s = SAVE_SPIN_SECONDS
            yield Pipeline(session, deadline)
            session.frames.spin_s = SPIN_SECONDS
        except TimeoutError as error:
            self._drop()
            raise TimedOut(f"no answer from {self._path} within {deadline_s:.3f} s") from error
        except (OSError, EOFError, DecodeError) as error:
            self._drop()
            raise self._lost("a pipeline of calls", error, deadline) from error
        except BaseException:
            self._drop()
            raise

    def readable(self, offsets: Sequence[int], size: int) -> Payloads:
        """Payloads in slots, read-only. Raises `BadAnswer` for one outside of the arena."""
        return self._payloads(self._readable, offsets, size)

    def writable(self, offsets: Sequence[int], size: int) -> Payloads:
        """Slots to be filled while the write lease lives. Raises `BadAnswer`."""
        return self._payloads(self._writable, offsets, size)

    def _payloads(self, region: Region, offsets: Sequence[int], size: int) -> Payloads:
        if NO_SLOT in offsets:
            raise BadAnswer("a block was granted without a slot")
        if any(offset % SLOT_PAGE for offset in offsets):
            raise BadAnswer(f"a slot does not begin on a multiple of {SLOT_PAGE}")
        try:
            return Payloads(region, offsets, size)
        except ValueError as error:
            raise BadAnswer(f"slots are not in the arena: {error}") from error

    def _open(self, deadline: float) -> Session:
        """This thread's session, made if there is none."""
        session: Session | None = getattr(self._own, "session", None)
        if session is None or session.ended:
            session, _, descriptors = self._connect(deadline)
            _close_all(descriptors)
            self._own.session = session
        return session

    def _connect(self, deadline: float) -> tuple[Session, Any, list[int]]:
        """A new session: connection, the daemon's reply, and the arena's descriptors for the caller to close."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.connect(self._path)
            session = Session(connection)
            reply, descriptors = _attach(session, self._attach, deadline)
            if reply.boot_id != self.boot_id or len(descriptors) != 2:
                _close_all(descriptors)
                raise NotAttached(f"{self._path} belongs to boot {reply.boot_id.hex()}, not {self.boot_id.hex()}")
            with self._lock:
                if self._closed:
                    _close_all(descriptors)
                    raise EOFError("this client is closed")
                self._sessions.add(session)
        except BaseException:
            connection.close()
            raise
        return session, reply, descriptors

    def _drop(self) -> None:
        """Ends this thread's session: its next call makes another."""
        session, self._own.session = getattr(self._own, "session", None), None
        if session is not None:
            session.end()

    def _lost(self, name: str, error: Exception, deadline: float) -> CacheError:
        """A broken connection: did the daemon restart (attach again), or is it gone?"""
        if self._closed:
            return Unreachable(f"{name}: this client is closed")
        try:
            session, _, descriptors = self._connect(deadline)
        except NotAttached as restarted:
            return restarted
        except (CacheError, OSError, EOFError):
            return Unreachable(f"{name}: {self._path}: {error}")
        _close_all(descriptors)
        self._own.session = session
        return Unreachable(f"{name}: the daemon closed the connection")


def slot_positions(packed: bytes, count: int, name: str) -> Sequence[int]:
    """Unpacks `count` fixed64 values. Raises `BadAnswer` for another number of bytes."""
    if len(packed) != 8 * count:
        raise BadAnswer(f"{name}: {len(packed)} bytes came for {count} slots")
    return array("Q", packed)


def _attach(session: Session, request: Any, deadline: float) -> tuple[Any, list[int]]:
    """The daemon's reply, and the descriptors that came with it, for the caller to close."""
    session.frames.send(_METHODS["Attach"][0], request.SerializeToString(), deadline)
    session.connection.settimeout(max(0.001, deadline - time.monotonic()))
    # Descriptors come with the first byte of the reply, and only with a call that asks for them.
    first, descriptors, _, _ = socket.recv_fds(session.connection, 1, 2)
    session.connection.settimeout(None)
    try:
        if not first:
            raise EOFError("the daemon closed the connection")
        session.frames.feed(first)
        return _reply(session.frames, "Attach", deadline), descriptors
    except DecodeError as error:
        _close_all(descriptors)
        raise EOFError(f"the answer to Attach cannot be read: {error}") from error
    except BaseException:
        _close_all(descriptors)
        raise


def _exchange(frames: Frames, name: str, request: Any, deadline: float) -> Any:
    frames.send(_METHODS[name][0], request.SerializeToString(), deadline)
    return None if name == "Release" else _reply(frames, name, deadline)


def _reply(frames: Frames, name: str, deadline: float) -> Any:
    status, body = frames.receive(deadline)
    if status:
        raise from_status(status, name, body.decode(errors="replace"))
    return _METHODS[name][1].FromString(body)


def _check_sealed(descriptor: int, size: int) -> None:
    """Raises `ValueError` for memory that is smaller than said, or could be cut under us, which ends a process."""
    actual = os.fstat(descriptor).st_size
    if actual < size or not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError(f"{actual} bytes of {size} are there, or its size is not sealed")


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
