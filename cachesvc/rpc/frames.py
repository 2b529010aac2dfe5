"""Length-prefixed messages on a stream socket: length uint32 ‖ code uint8 ‖ body (see ``cache.proto``), for both ends.

The socket blocks in the kernel, with the kernel's own timeouts, and is read through a buffer: most messages cost one
system call each way, where a Python socket with a timeout needs two for every part of a message.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Final

_HEAD: Final = struct.Struct("<IB")
_TIMEVAL: Final = struct.Struct("@ll")
_BUFFER_BYTES: Final = 256 << 10
# How long an answer, or the next call, is waited for without sleeping; by one thread of a process at a time. Longer in
# the middle of a save, where both ends work side by side: a sleeper is often woken on the processor that wakes it, and
# both then share one.
SPIN_SECONDS: Final = 100e-6
SAVE_SPIN_SECONDS: Final = 5e-3
_MAY_SPIN: Final = (os.cpu_count() or 1) > 1
_SPINNING: Final = threading.Lock()
# Seconds after which the kernel gives a waiting call back, so that its deadline is looked at.
_STEPS: Final = (10.0, 1.0, 0.1, 0.01, 0.001)


class Frames:
    """Not thread-safe: one thread talks at a time. Everything raises `OSError` when the connection breaks."""

    def __init__(self, connection: socket.socket, limit: int, *, ahead: bool = True) -> None:
        """A message longer than `limit` bytes is a lie and ends the connection.

        `ahead` False: not a byte is read behind a message, because bytes follow that are for another buffer.
        """
        connection.settimeout(None)
        self._connection = connection
        self._limit = limit
        self._ahead = ahead
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._timeouts: dict[int, float] = {}
        self.spin_s = SPIN_SECONDS

    def send(self, code: int, body: bytes, deadline: float, descriptors: Sequence[int] = ()) -> None:
        """Raises `TimeoutError` when the other end does not take it by `deadline` (`time.monotonic`).

        `descriptors` travel with the first byte.
        """
        unsent = memoryview(_HEAD.pack(1 + len(body), code) + body)
        while unsent:
            self._wait_at_most(socket.SO_SNDTIMEO, deadline)
            try:
                if descriptors:
                    sent = socket.send_fds(self._connection, [unsent], descriptors)
                else:
                    sent = self._connection.send(unsent)
            except BlockingIOError:
                continue
            unsent, descriptors = unsent[sent:], ()

    def receive(self, deadline: float) -> tuple[int, bytes]:
        """Code and body of the next message. Raises `TimeoutError` at `deadline`, `EOFError` for an end or a lie."""
        self._fill(_HEAD.size, deadline)
        length, code = _HEAD.unpack_from(self._buffer, self._start)
        if not 1 <= length <= self._limit:
            raise EOFError(f"a message of {length} bytes")
        self._start += _HEAD.size
        size = length - 1
        if size <= len(self._buffer):
            self._fill(size, deadline)
            body = bytes(self._view[self._start : self._start + size])
            self._start += size
            return code, body
        large = bytearray(size)
        done = self._end - self._start
        large[:done] = self._view[self._start : self._end]
        self._start = self._end = 0
        with memoryview(large) as target:
            self.receive_into([target[done:]], deadline)
        return code, bytes(large)

    def send_with(self, code: int, body: bytes, payloads: Sequence[memoryview], deadline: float) -> None:
        """A message, and bytes behind it that are not part of it. Raises `TimeoutError`."""
        unsent = [memoryview(_HEAD.pack(1 + len(body), code) + body), *payloads]
        while unsent:
            self._wait_at_most(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._connection.sendmsg(unsent)
            except BlockingIOError:
                continue
            _advance(unsent, sent)

    def receive_into(self, targets: Sequence[memoryview], deadline: float, stall: float = math.inf) -> None:
        """Fills buffers with bytes that are not a message (`ahead` is False). Raises `TimeoutError`, `EOFError`.

        `stall`: seconds after which it ends if nothing has come.
        """
        empty = list(targets)
        last = time.monotonic()
        while empty:
            self._wait_at_most(socket.SO_RCVTIMEO, min(deadline, last + stall))
            try:
                got = self._connection.recvmsg_into(empty, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            last = time.monotonic()
            if not got:
                raise EOFError("the other end closed the connection")
            _advance(empty, got)

    def wait(self, seconds: float = math.inf) -> bool:
        """Waits for a message to begin. False when the other end has closed instead. Raises `TimeoutError`."""
        deadline = time.monotonic() + seconds
        while self._start == self._end:
            try:
                self._fill(1, deadline)
            except EOFError:
                return False
        return True

    def feed(self, data: bytes) -> None:
        """Bytes that were received past this object, before anything else."""
        self._view[self._end : self._end + len(data)] = data
        self._end += len(data)

    def _fill(self, size: int, deadline: float) -> None:
        """Makes sure that the buffer holds at least `size` bytes to be read."""
        if self._start == self._end:
            self._start = self._end = 0
        if self._start + size > len(self._buffer):
            rest = self._end - self._start
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        while (missing := size - self._end + self._start) > 0:
            until = len(self._buffer) if self._ahead else self._end + missing
            self._end += self._receive_into(self._view[self._end : until], deadline)

    def _receive_into(self, target: memoryview, deadline: float) -> int:
        if self._ahead and (got := self._spin(target)):
            return got
        while True:
            self._wait_at_most(socket.SO_RCVTIMEO, deadline)
            try:
                got = self._connection.recv_into(target)
            except BlockingIOError:
                continue
            if not got:
                raise EOFError("the other end closed the connection")
            return got

    def _spin(self, target: memoryview) -> int:
        """What arrives at once, or 0. To put a processor to sleep and wake it takes longer than most calls do."""
        if not _MAY_SPIN or not _SPINNING.acquire(blocking=False):
            return 0
        try:
            until = time.monotonic() + self.spin_s
            while time.monotonic() < until:
                try:
                    return self._connection.recv_into(target, 0, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    if self.spin_s > SPIN_SECONDS:
                        os.sched_yield()  # to whom it waits for, should that be next on this processor
            return 0
        finally:
            _SPINNING.release()

    def _wait_at_most(self, option: int, deadline: float) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        step = next((step for step in _STEPS if step <= remaining), _STEPS[-1])
        if self._timeouts.get(option) != step:
            self._timeouts[option] = step
            timeval = _TIMEVAL.pack(int(step), int(step % 1 * 1e6))
            self._connection.setsockopt(socket.SOL_SOCKET, option, timeval)


def _advance(parts: list[memoryview], done: int) -> None:
    """Takes the first `done` bytes out of `parts`."""
    whole = 0
    while whole < len(parts) and done >= len(parts[whole]):
        done -= len(parts[whole])
        whole += 1
    del parts[:whole]
    if done:
        parts[0] = parts[0][done:]
