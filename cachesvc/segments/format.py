"""The bytes of a segment file.

::

    header page ‖ record 0 ‖ record 1 ‖ … ‖ footer entries ‖ footer tail

* header, one 4 KiB page: magic 8 ‖ version u16 ‖ zero u16 ‖ JSON length u32 ‖ JSON ‖ zeros ‖ xxh3_64 of the page's rest
* records of one size each (see `cachesvc.record`)
* only in a sealed segment: one 48-byte entry per record (key 16 ‖ shard u32 ‖ damaged u32 ‖ created µs ‖ used µs ‖
  payload checksum; all zero but `damaged` for a record that was found damaged before), and a 40-byte tail: magic 8 ‖
  version u32 ‖ count u32 ‖ segment tag u64 ‖ xxh3_64 of the entries ‖ xxh3_64 of the tail's rest. The file ends there.
  A file with no valid tail is unsealed: it is scanned.
"""

from __future__ import annotations

import functools
import json
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cachesvc.classes import slice_width
from cachesvc.record import PAGE, RecordHead, checksum, microseconds, record_bytes

VERSION: Final = 2
SUFFIX: Final = ".seg"
OWN_NAME: Final = re.compile(rf"[0-9a-f]{{8}}-\d{{6,}}-\d{{8,}}{re.escape(SUFFIX)}")
"""What this service calls its files: daemon, epoch, number."""
_HEAD_MAGIC: Final = b"CSVSEG\x00\x01"
_HALF: Final = PAGE // 2  # of the header page: it holds two copies, so that damage to one costs nothing
_HEAD: Final = struct.Struct("<8sHHI")
_ENTRY: Final = struct.Struct("<16sIIQQQ")
_DAMAGED: Final = _ENTRY.pack(bytes(16), 0, 1, 0, 0, 0)
FOOTER_ENTRY: Final = np.dtype(
    [
        ("key", "<u8", (2,)),
        ("shard", "<u4"),
        ("damaged", "<u4"),
        ("created", "<u8"),
        ("used", "<u8"),
        ("checksum", "<u8"),
    ]
)
"""The same for thousands at once; times are in microseconds."""
FooterEntries = NDArray[np.void]
"""Of dtype `FOOTER_ENTRY`, by record."""
_TAIL_MAGIC: Final = b"CSVEND\x00\x01"
_TAIL: Final = struct.Struct("<8sIIQQ")
_SUM: Final = struct.Struct("<Q")
TAIL_BYTES: Final = _TAIL.size + _SUM.size


class ForeignFile(Exception):
    """The file is not a segment of this version, or its header is damaged. Never deleted, never served."""


class Shape(NamedTuple):
    """What a reader expects of a block besides its key."""

    namespace: str
    """Namespace digest, hex."""
    payload_bytes: int


@functools.lru_cache(maxsize=65_536)
def shape_of(namespace: str, payload_bytes: int) -> Shape:
    """One object per shape, so that look-ups compare them at the price of a pointer."""
    return Shape(namespace, payload_bytes)


@dataclass(frozen=True)
class SegmentHead:
    """What a segment's header says. Times are seconds since the epoch."""

    namespace: str
    """Namespace digest, hex."""
    payload_bytes: int
    traffic_class: str
    ttl: float
    slice_end: int
    """When every block is past its TTL unless it was used after it was written here."""
    created: float
    tag: int
    """Random, in every record too: a record that belongs to another file is not taken for one of this."""

    @property
    def stride(self) -> int:
        return record_bytes(self.payload_bytes)

    @property
    def oldest_use(self) -> float:
        """No block with an earlier use belongs into this slice."""
        return self.slice_end - slice_width(self.ttl) - self.ttl

    def offset(self, number: int) -> int:
        return PAGE + number * self.stride

    def records_in(self, size: int) -> int:
        """Whole records in a file of `size` bytes without footer."""
        return max(0, size - PAGE) // self.stride


def encode_head(head: SegmentHead) -> bytes:
    text = json.dumps(asdict(head), sort_keys=True, separators=(",", ":")).encode()
    half = (_HEAD.pack(_HEAD_MAGIC, VERSION, 0, len(text)) + text).ljust(_HALF - _SUM.size, b"\0")
    if len(half) > _HALF - _SUM.size:
        raise ValueError(f"segment header of {len(text)} bytes does not fit half a page")
    return 2 * (half + _SUM.pack(checksum(half)))


def decode_head(page: bytes) -> SegmentHead:
    """From either of its copies. Raises `ForeignFile`."""
    halves = [page[:_HALF], page[_HALF:]] if len(page) == PAGE else []
    if not any(half.startswith(_HEAD_MAGIC) for half in halves):
        raise ForeignFile("does not start like a segment")
    half = next((h for h in halves if _SUM.unpack(h[-_SUM.size :])[0] == checksum(h[: -_SUM.size])), None)
    if half is None:
        raise ForeignFile("its header is damaged")
    _, version, _, length = _HEAD.unpack_from(half)
    if version != VERSION:
        raise ForeignFile(f"is a segment of version {version}; this build reads {VERSION}")
    fields: dict[str, Any] = json.loads(half[_HEAD.size : _HEAD.size + length])
    return SegmentHead(**fields)


def encode_footer(head: SegmentHead, records: Sequence[RecordHead | None]) -> bytes:
    """One entry for each record slot; None is one whose record is damaged."""
    return footer_of(head, footer_entries(records), len(records))


def footer_of(head: SegmentHead, entries: bytes, count: int) -> bytes:
    """The footer of `count` packed entries."""
    tail = _TAIL.pack(_TAIL_MAGIC, VERSION, count, head.tag, checksum(entries))
    return entries + tail + _SUM.pack(checksum(tail))


def footer_entries(records: Iterable[RecordHead | None]) -> bytes:
    """A footer without its tail."""
    return b"".join(
        _DAMAGED
        if r is None
        else _ENTRY.pack(r.key, r.shard, 0, microseconds(r.created), microseconds(r.used), r.checksum)
        for r in records
    )


def footer_records(head: SegmentHead, tail: bytes, size: int) -> int | None:
    """Number of records that the last `TAIL_BYTES` of a file of `size` bytes claim, or None when it is not sealed."""
    if len(tail) != TAIL_BYTES or _SUM.unpack(tail[_TAIL.size :])[0] != checksum(tail[: _TAIL.size]):
        return None
    magic, version, count, tag, _ = _TAIL.unpack(tail[: _TAIL.size])
    if (
        magic != _TAIL_MAGIC
        or version != VERSION
        or tag != head.tag
        or size != head.offset(count) + footer_bytes(count)
    ):
        return None
    return int(count)


def footer_records_by_size(head: SegmentHead, tail: bytes, size: int) -> int | None:
    """Number of records of a file that was sealed, but whose tail is damaged; None when it was not.

    It has the size of a sealed one. A crash leaves no such file: what of a footer did not reach the device is not there
    or zeros, from some page on.
    """
    count, rest = divmod(size - PAGE - TAIL_BYTES, head.stride + _ENTRY.size)
    return count if count >= 0 and not rest and any(tail[: _SUM.size]) and any(tail[-_SUM.size :]) else None


def footer_bytes(count: int) -> int:
    return count * _ENTRY.size + TAIL_BYTES


def check_footer(footer: bytes) -> FooterEntries | None:
    """The entries of a footer, or None when it is damaged itself."""
    entries, tail = footer[:-TAIL_BYTES], footer[-TAIL_BYTES:]
    if _TAIL.unpack(tail[: _TAIL.size])[4] != checksum(entries):
        return None
    return np.frombuffer(entries, FOOTER_ENTRY)


def decode_footer(head: SegmentHead, footer: bytes) -> list[RecordHead] | None:
    """The records a footer lists as undamaged, or None when it is damaged itself."""
    entries = check_footer(footer)
    if entries is None:
        return None
    return [
        RecordHead(key, shard, head.payload_bytes, number, created / 1e6, used / 1e6, head.tag, payload_sum)
        for number, (key, shard, damaged, created, used, payload_sum) in enumerate(
            _ENTRY.iter_unpack(entries.tobytes())
        )
        if not damaged
    ]
