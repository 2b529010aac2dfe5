"""What a segment file holds, found from the file alone: by its footer, or by scanning an unsealed one."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from cachesvc.record import PAGE, TRAILER_BYTES, RecordHead, checksum, decode_trailer
from cachesvc.segments.format import (
    TAIL_BYTES,
    FooterEntries,
    ForeignFile,
    SegmentHead,
    check_footer,
    decode_footer,
    decode_head,
    encode_footer,
    footer_bytes,
    footer_records,
    footer_records_by_size,
)


@dataclass(frozen=True)
class Found:
    """`records` is the number of record slots in the file; `heads` lists those that are whole (all, unless damaged).

    `damaged` lists those of which only the trailer is whole. `scanned`: every record was read and checked.
    """

    head: SegmentHead
    heads: list[RecordHead]
    records: int
    size: int
    sealed: bool
    damaged: tuple[RecordHead, ...] = ()
    scanned: bool = False


def read_head(path: Path) -> tuple[SegmentHead, int, int | None]:
    """Header, file size, and the number of records if a valid footer tail ends the file. Raises as `read_segment`."""
    if not path.is_file():  # opening a pipe would wait for whoever writes to it
        raise ForeignFile("is no regular file")
    with path.open("rb", buffering=0) as file:
        try:
            head = decode_head(file.read(PAGE))
        except (KeyError, TypeError, ValueError) as error:
            raise ForeignFile(f"its header is not understood: {error}") from error
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - TAIL_BYTES))
        return head, size, footer_records(head, file.read(TAIL_BYTES), size)


def damaged_tail(path: Path, head: SegmentHead, size: int) -> int | None:
    """Of a file without a valid tail: the number of records if it was sealed all the same. Raises `OSError`."""
    with path.open("rb", buffering=0) as file:
        file.seek(max(0, size - TAIL_BYTES))
        return footer_records_by_size(head, file.read(TAIL_BYTES), size)


@dataclass(frozen=True)
class Sealed:
    """What the footer of a file says. `size` is the file's, in bytes."""

    head: SegmentHead
    entries: FooterEntries
    size: int


def read_sealed(path: Path) -> Sealed | None:
    """Takes a footer's word; None when there is none, or a damaged one. Raises as `read_segment`."""
    head, size, count = read_head(path)
    if count is None:
        return None
    with path.open("rb", buffering=0) as file:
        file.seek(head.offset(count))
        entries = check_footer(file.read(footer_bytes(count)))
    return None if entries is None else Sealed(head, entries, size)


def read_segment(path: Path) -> Found:
    """Reads a segment's footer, or scans it when it has none or a damaged one. Raises `ForeignFile` or `OSError`."""
    head, size, count = read_head(path)
    with path.open("rb", buffering=0) as file:
        if count is not None:
            file.seek(head.offset(count))
            heads = decode_footer(head, file.read(footer_bytes(count)))
            if heads is not None:
                return Found(head, heads, count, size, sealed=True)
    # Only the tail of an unsealed segment can be torn, but bits can flip anywhere: every record is checked whole.
    slots = head.records_in(size) if count is None else count
    heads, damaged = scan(path, head, slots)
    return Found(head, heads, slots, size, sealed=count is not None, damaged=tuple(damaged), scanned=True)


def scan(path: Path, head: SegmentHead, slots: int) -> tuple[list[RecordHead], list[RecordHead]]:
    """Reads `slots` records whole: those that are good, and those of which only the trailer is. Raises `OSError`."""
    heads: list[RecordHead] = []
    damaged: list[RecordHead] = []
    with path.open("rb", buffering=0) as file:
        for number in range(slots):
            file.seek(head.offset(number))
            record = memoryview(file.read(head.stride))
            found = decode_trailer(record[-TRAILER_BYTES:]) if len(record) == head.stride else None
            if found is not None and (found.number, found.segment_tag, found.payload_bytes) == (
                number,
                head.tag,
                head.payload_bytes,
            ):
                whole = checksum(record[: found.payload_bytes]) == found.checksum
                (heads if whole else damaged).append(found)
    return heads, damaged


def seal_recovered(path: Path, found: Found) -> Found:
    """Cuts the torn end of an unsealed segment and seals it: it is immutable from now on. Raises `OSError`.

    Damaged records before the last whole one stay where they are; the footer says that they are none.
    """
    by_number = {head.number: head for head in found.heads}
    count = max(by_number, default=-1) + 1
    footer = encode_footer(found.head, [by_number.get(number) for number in range(count)])
    with path.open("r+b", buffering=0) as file:
        file.truncate(found.head.offset(count))
        file.seek(found.head.offset(count))
        written = file.write(footer)
        os.fdatasync(file.fileno())
    if written != len(footer):
        raise OSError(f"wrote {written} of {len(footer)} bytes of the footer of {path}")
    return replace(found, records=count, size=found.head.offset(count) + len(footer), sealed=True)
