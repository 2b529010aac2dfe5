"""The durable index: what the files do not say of their blocks, in RocksDB. It can be deleted at any time.

What is stored, the footers of the segments say. They do not change; which blocks were used since, and which were
dropped or lie elsewhere by now, stands here, in one row per segment that was sealed or changed::

    'v'               → format version
    'u' ‖ segment tag → names u16 ‖ records u32 ‖ JSON of the classes' names ‖ last use f64 s each ‖ class u8 each
                        ‖ flags u8 each

Numbers are little-endian. What a crash loses is the uses of the last seconds: a dropped block may be back (and is
checked like any other), a used one may count as unused.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray
from rocksdict import AccessType, Options, Rdict, WriteBatch

from cachesvc.classes import TrafficClasses
from cachesvc.errors import StoreLocked
from cachesvc.index.blocks import StoredUses

log = logging.getLogger("cachesvc.store")

_VERSION: Final = b"4"
_TAG: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<HI")
_UNWRITABLE: Final = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))
_HELD: Final = ("While lock file:", "lock hold by current process")


class IndexDamaged(Exception):
    """The index cannot be opened or read, or is of another version. The store goes on with a new one."""


class IndexUnwritable(IndexDamaged):
    """The disk is full or read-only. What the index holds is good, and can be read."""


class RocksIndex:
    """Not thread-safe for writes: the store's write lock covers them. Methods raise `IndexDamaged`.

    Opening one that another process has open raises `StoreLocked`: the store's own lock was removed by somebody.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(16 << 20)
        options.set_max_total_wal_size(64 << 20)
        options.set_keep_log_file_num(2)
        self.path = path
        try:
            access = AccessType.read_only() if read_only else AccessType.read_write()
            self._db = Rdict(str(path), options, access_type=access)
            version = self._db.get(b"v")
            if version is None and not read_only:
                self._db[b"v"] = _VERSION
        except Exception as error:
            if any(why in str(error) for why in _HELD):
                raise StoreLocked(f"store {path.parent} is in use: another process has its index open") from error
            unwritable = not read_only and any(why in str(error) for why in _UNWRITABLE)
            raise (IndexUnwritable if unwritable else IndexDamaged)(str(error)) from error
        if version not in (None, _VERSION):
            self._db.close()
            raise IndexDamaged(f"version {version!r}, this build reads {_VERSION!r}")

    @staticmethod
    def destroy(path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def row(self, tag: int) -> bytes | None:
        """A segment's, for `decode_uses`."""
        try:
            return cast("bytes | None", self._db.get(b"u" + _TAG.pack(tag)))
        except Exception as error:
            raise IndexDamaged(str(error)) from error

    def tags(self) -> set[int]:
        """Of all segments that it knows; reads everything."""
        try:
            return {_TAG.unpack(key[1:])[0] for key, _ in self._scan(b"u")}
        except struct.error as error:
            raise IndexDamaged(f"a key is not understood: {error}") from error

    def uses(self) -> dict[int, bytes]:
        """All rows by segment tag."""
        try:
            return {_TAG.unpack(key[1:])[0]: value for key, value in self._scan(b"u")}
        except struct.error as error:
            raise IndexDamaged(f"a key is not understood: {error}") from error

    def write(self, *, put: Iterable[tuple[int, StoredUses]] = (), drop: Iterable[int] = ()) -> None:
        """One atomic batch of rows, and of those to be removed, by segment tag."""
        batch = WriteBatch(raw_mode=True)
        for tag, uses in put:
            batch.put(b"u" + _TAG.pack(tag), encode_uses(uses))
        for tag in drop:
            batch.delete(b"u" + _TAG.pack(tag))
        try:
            self._db.write(batch)
        except Exception as error:
            raise IndexDamaged(str(error)) from error

    def close(self) -> None:
        """Never raises: what did not reach the index costs use times only."""
        try:
            self._db.close()
        except Exception as error:  # noqa: BLE001  as above
            log.warning("the index was not closed cleanly: %s", error)

    def _scan(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        cursor = self._db.iter()
        try:
            cursor.seek(prefix)
            while cursor.valid():
                # In raw mode keys and values are bytes, which rocksdict's type hints do not know.
                key, value = cast("tuple[bytes, bytes]", (cursor.key(), cursor.value()))
                if not key.startswith(prefix):
                    break
                yield key, value
                cursor.next()
            cursor.status()  # a damaged block ends a scan like the end of the data does; only this tells them apart
        except Exception as error:
            raise IndexDamaged(str(error)) from error
        finally:
            del cursor  # an iterator keeps the database's files open, also after close


def encode_uses(uses: StoredUses) -> bytes:
    classes = json.dumps([[traffic_class.name, traffic_class.ttl] for traffic_class in uses.classes]).encode()
    head = _HEAD.pack(len(classes), len(uses.used))
    return head + classes + uses.used.astype("<f8").tobytes() + uses.kinds.tobytes() + uses.flags.tobytes()


def decode_uses(row: bytes, classes: TrafficClasses) -> StoredUses:
    """Classes that are not configured any more have the TTL that they had. Raises `ValueError`."""
    known, used, kinds, flags = _split(row)
    return StoredUses(tuple(classes.of_file(name, ttl) for name, ttl in known), used, kinds, flags)


def _split(row: bytes) -> tuple[list[tuple[str, float]], NDArray[np.float64], NDArray[np.uint8], NDArray[np.uint8]]:
    try:
        length, count = _HEAD.unpack_from(row)
        classes = json.loads(row[_HEAD.size : _HEAD.size + length])
        numbers = row[_HEAD.size + length :]
        if len(numbers) != 10 * count:
            raise ValueError(f"{len(numbers)} bytes for {count} records")
        known = [(str(name), float(ttl)) for name, ttl in classes]
    except (struct.error, TypeError) as error:
        raise ValueError(f"a row is not understood: {error}") from error
    kinds, flags = (np.frombuffer(numbers, np.uint8, count, start * count) for start in (8, 9))
    return known, np.frombuffer(numbers, "<f8", count), kinds, flags
