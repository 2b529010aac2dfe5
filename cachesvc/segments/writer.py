"""Appending blocks to one segment, and sealing it.

Order of events: header and directory entry first, then whole records in order, then the footer. A crash in between
leaves a file whose whole records are all good and whose torn end is recognised (see `recover`). What fails half-way is
cut off again, so that the numbering of records stays dense.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

from cachesvc.errors import WriteRefused
from cachesvc.record import Buffer, RecordHead, encode_trailer
from cachesvc.segments.format import SegmentHead, encode_footer, encode_head

_IOV_MAX = 512


class SegmentWriter:
    """One open segment; used by one thread at a time. Every method raises `WriteRefused` when the device fails."""

    def __init__(self, path: Path, head: SegmentHead, root: Path | None = None) -> None:
        """`root` is the store's directory: those from there down to the file are synced with it for the first time."""
        self.path = path
        self.broken = False
        """A sync failed: what was written before may be lost, whatever a later one says."""
        below = len(path.relative_to(root).parts) if root is not None else 1
        self._unsynced = list(path.parents[:below])
        self.head = head
        self.records: list[RecordHead] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise WriteRefused(f"cannot create {path}: {error.strerror}") from error
        try:
            _write(self._descriptor, [encode_head(head)], 0)
        except OSError as error:
            os.close(self._descriptor)
            path.unlink(missing_ok=True)
            raise WriteRefused(f"cannot write {path}: {error.strerror}") from error

    @property
    def size(self) -> int:
        """Bytes of the file so far."""
        return self.head.offset(len(self.records))

    def append(self, blocks: Sequence[tuple[RecordHead, Buffer]]) -> None:
        """Writes whole records; all of them or none. Heads must be numbered on from the last record."""
        vector: list[Buffer] = []
        for head, payload in blocks:
            vector += (payload, encode_trailer(head))
        try:
            _write(self._descriptor, vector, self.size)
        except OSError as error:
            self._cut()
            raise WriteRefused(f"cannot append to {self.path}: {error.strerror}") from error
        self.records += [head for head, _ in blocks]

    def sync(self) -> None:
        """Returns when everything appended, and the file's name, survive a loss of power."""
        try:
            self._sync()
        except OSError as error:
            raise WriteRefused(f"cannot sync {self.path}: {error.strerror}") from error

    def seal(self) -> int:
        """Writes the footer, syncs and closes. Returns the size. After a failure `seal` or `abandon` may follow."""
        footer = encode_footer(self.head, self.records)
        size = self.size
        try:
            _write(self._descriptor, [footer], size)
            self._sync()
        except OSError as error:
            self._cut()
            raise WriteRefused(f"cannot seal {self.path}: {error.strerror}") from error
        os.close(self._descriptor)
        return size + len(footer)

    def abandon(self) -> None:
        """Closes the file as it is."""
        os.close(self._descriptor)

    def _sync(self) -> None:
        if self.broken:
            raise OSError(errno.EIO, "an earlier sync failed")
        try:
            os.fdatasync(self._descriptor)
        except OSError:
            self.broken = True
            raise
        if not os.fstat(self._descriptor).st_nlink:
            raise OSError(errno.ENOENT, "it was deleted")
        while self._unsynced:  # nearest first, and again after a failure
            sync_directory(self._unsynced[0])
            del self._unsynced[0]

    def _cut(self) -> None:
        # If this fails too, the scan at the next start cuts what is not a whole record; the index never points there.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, self.size)


def sync_directory(path: Path) -> None:
    """Makes created, renamed and removed names in `path` survive a loss of power. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, vector: Sequence[Buffer], offset: int) -> None:
    """Writes all of `vector` at `offset`, however the system splits it. Raises `OSError`."""
    pending = [memoryview(part).cast("B") for part in vector if len(part)]
    while pending:
        wrote = os.pwritev(descriptor, pending[:_IOV_MAX], offset)
        offset += wrote
        while pending and wrote >= len(pending[0]):
            wrote -= len(pending.pop(0))
        if wrote:
            pending[0] = pending[0][wrote:]
