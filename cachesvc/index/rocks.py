"""The durable index: what the table held, in RocksDB. It can be deleted at any time and is rebuilt from the segments.

Keys and values (little-endian)::

    'v'            → format version
    'b' ‖ block id → segment number u32 ‖ record u32 ‖ checksum u64 ‖ created µs u64 ‖ used µs u64 ‖ touched u8 ‖ class
    's' ‖ number   → JSON {"path", "sealed", "size"}

One column family and a write-ahead log, so that what a crash loses is a suffix of what was written: a segment that is
recorded as sealed has all its blocks recorded.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from rocksdict import AccessType, Options, Rdict, WriteBatch

from cachesvc.index.table import Entry
from cachesvc.segments.segment import Segment

log = logging.getLogger("cachesvc.store")

_VERSION: Final = b"2"
_ENTRY: Final = struct.Struct("<IIQQQB")
_NUMBER: Final = struct.Struct(">I")
_UNWRITABLE: Final = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))


class IndexDamaged(Exception):
    """The index cannot be opened or read, or is of another version. The store rebuilds it."""


class IndexUnwritable(IndexDamaged):
    """The disk is full or read-only. What the index holds is good, and can be read."""


@dataclass(frozen=True)
class StoredEntry:
    segment: int
    record: int
    checksum: int
    created: float
    used: float
    touched: bool
    traffic_class: str


@dataclass(frozen=True)
class StoredSegment:
    number: int
    sealed: bool
    size: int


class RocksIndex:
    """Not thread-safe for writes: the store's write lock covers them. Methods raise `IndexDamaged`."""

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
            unwritable = not read_only and any(why in str(error) for why in _UNWRITABLE)
            raise (IndexUnwritable if unwritable else IndexDamaged)(str(error)) from error
        if version not in (None, _VERSION):
            self._db.close()
            raise IndexDamaged(f"version {version!r}, this build reads {_VERSION!r}")

    @staticmethod
    def destroy(path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def segments(self) -> dict[str, StoredSegment]:
        """Segments by path relative to the store."""
        found = {}
        try:
            for key, value in self._scan(b"s"):
                fields = json.loads(value)
                found[fields["path"]] = StoredSegment(_NUMBER.unpack(key[1:])[0], fields["sealed"], fields["size"])
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise IndexDamaged(f"a segment's entry is not understood: {error!r}") from error
        return found

    def entries(self) -> Iterator[tuple[bytes, StoredEntry]]:
        """All blocks, in no useful order."""
        for key, value in self._scan(b"b"):
            try:
                segment, record, checksum, created, used, touched = _ENTRY.unpack_from(value)
                name = value[_ENTRY.size :].decode()
            except (ValueError, struct.error) as error:
                raise IndexDamaged(f"a block's entry is not understood: {error!r}") from error
            yield key[1:], StoredEntry(segment, record, checksum, created / 1e6, used / 1e6, bool(touched), name)

    def write(
        self,
        *,
        put: Iterable[tuple[bytes, Entry]] = (),
        delete: Iterable[bytes] = (),
        segment: tuple[Segment, str] | None = None,
        drop_segments: Iterable[int] = (),
    ) -> None:
        """One atomic batch. `segment` comes with its path relative to the store, and after the blocks in it."""
        batch = WriteBatch(raw_mode=True)
        for identity, entry in put:
            assert entry.segment is not None, "only what is on disk has a place in the durable index"
            batch.put(
                b"b" + identity,
                _ENTRY.pack(
                    entry.segment.number,
                    entry.record,
                    entry.checksum,
                    round(entry.created * 1e6),
                    round(entry.used * 1e6),
                    entry.touched,
                )
                + entry.traffic_class.name.encode(),
            )
        for identity in delete:
            batch.delete(b"b" + identity)
        if segment is not None:
            state, path = segment
            fields = {"path": path, "sealed": state.sealed, "size": state.size}
            batch.put(b"s" + _NUMBER.pack(state.number), json.dumps(fields).encode())
        for number in drop_segments:
            batch.delete(b"s" + _NUMBER.pack(number))
        try:
            self._db.write(batch)
        except Exception as error:
            raise IndexDamaged(str(error)) from error

    def close(self) -> None:
        """Never raises: what did not reach the index is in the files."""
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
