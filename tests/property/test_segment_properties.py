"""Segment files: what was written is what recovery finds, whatever is cut off or flipped."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.errors import BlockUnreadable
from cachesvc.record import (
    PAGE,
    TRAILER_BYTES,
    RecordHead,
    check_record,
    checksum,
    decode_trailer,
    encode_trailer,
    record_bytes,
)
from cachesvc.segments.format import ForeignFile, SegmentHead, decode_head, encode_head
from cachesvc.segments.recover import read_segment, seal_recovered
from cachesvc.segments.writer import SegmentWriter

HEADS = st.builds(
    RecordHead,
    key=st.binary(min_size=16, max_size=16),
    shard=st.integers(0, 2**16 - 1),
    payload_bytes=st.integers(1, 20_000),
    number=st.integers(0, 2**32 - 1),
    created=st.integers(0, 2**40).map(lambda us: us / 1e6),
    used=st.integers(0, 2**40).map(lambda us: us / 1e6),
    segment_tag=st.integers(0, 2**64 - 1),
    checksum=st.integers(0, 2**64 - 1),
)


def segment_head(payload_bytes: int) -> SegmentHead:
    return SegmentHead("ab" * 32, payload_bytes, "agent", 259_200.0, 1_800_000_000, 1_700_000_000.5, tag=77)


def write_segment(path: Path, payloads: list[bytes], *, seal: bool) -> list[RecordHead]:
    head = segment_head(len(payloads[0]))
    writer = SegmentWriter(path, head)
    heads = [
        RecordHead(bytes([i]) * 16, i, len(p), i, 1000.25 + i, 2000.5 + i, head.tag, checksum(p))
        for i, p in enumerate(payloads)
    ]
    writer.append(list(zip(heads[:1], payloads[:1], strict=True)))
    writer.append(list(zip(heads[1:], payloads[1:], strict=True)))
    if seal:
        assert writer.seal() == path.stat().st_size
    return heads


@given(HEADS)
def test_a_trailer_says_what_was_put_in_and_fills_whole_pages(head: RecordHead) -> None:
    encoded = encode_trailer(head)
    assert decode_trailer(encoded[-TRAILER_BYTES:]) == head
    assert (head.payload_bytes + len(encoded)) == record_bytes(head.payload_bytes)
    assert record_bytes(head.payload_bytes) % PAGE == 0


@given(HEADS, st.integers(0, TRAILER_BYTES * 8 - 1))
def test_no_flipped_bit_in_a_trailer_goes_unnoticed(head: RecordHead, bit: int) -> None:
    trailer = bytearray(encode_trailer(head)[-TRAILER_BYTES:])
    trailer[bit // 8] ^= 1 << bit % 8
    assert decode_trailer(trailer) is None


@given(st.binary(min_size=1, max_size=5000), st.data())
def test_a_record_passes_only_for_its_own_key_place_and_content(payload: bytes, data: st.DataObject) -> None:
    head = RecordHead(b"k" * 16, 3, len(payload), 9, 1.0, 2.0, 42, checksum(payload))
    trailer = memoryview(encode_trailer(head)[-TRAILER_BYTES:])
    mine: dict[str, Any] = {"key": b"k" * 16, "shard": 3, "number": 9, "segment_tag": 42}
    content = bytearray(payload)
    assert check_record(memoryview(content), trailer, **mine) == checksum(payload)
    for wrong in ({"key": b"l" * 16}, {"shard": 4}, {"number": 8}, {"segment_tag": 41}):
        with pytest.raises(BlockUnreadable):
            check_record(memoryview(content), trailer, **(mine | wrong))
    with pytest.raises(BlockUnreadable):
        check_record(memoryview(content + b"x"), trailer, **mine)
    bit = data.draw(st.integers(0, len(payload) * 8 - 1))
    content[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BlockUnreadable):
        check_record(memoryview(content), trailer, **mine)


@given(st.integers(0, PAGE * 4 - 1), st.integers(0, PAGE * 4 - 1))
def test_a_segment_header_is_read_from_its_good_copy_and_never_from_two_bad_ones(first: int, second: int) -> None:
    page = bytearray(encode_head(segment_head(100)))
    page[first // 8] ^= 1 << first % 8
    assert decode_head(bytes(page)) == segment_head(100)
    page[PAGE // 2 + second // 8] ^= 1 << second % 8
    with pytest.raises(ForeignFile):
        decode_head(bytes(page))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 6000), st.booleans(), st.data())
def test_recovery_finds_every_whole_record_of_a_cut_file(
    count: int, size: int, sealed: bool, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.seg"
        heads = write_segment(path, [bytes([i + 1]) * size for i in range(count)], seal=sealed)
        cut = data.draw(st.integers(PAGE, path.stat().st_size))
        with path.open("r+b") as file:
            file.truncate(cut)
        whole = min(count, (cut - PAGE) // record_bytes(size))
        found = read_segment(path)
        assert found.heads == heads[:whole]
        recovered = seal_recovered(path, found) if not found.sealed else found
        assert read_segment(path).sealed
        assert read_segment(path).heads == recovered.heads == heads[:whole]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.booleans(), st.data())
def test_recovery_never_reports_a_record_whose_bytes_changed(count: int, sealed: bool, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.seg"
        size = 3000
        heads = write_segment(path, [bytes([i + 1]) * size for i in range(count)], seal=sealed)
        content = bytearray(path.read_bytes())
        where = data.draw(st.integers(PAGE, len(content) - 1))
        content[where] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        found = read_segment(path)
        assert all(head in heads for head in found.heads)
        if not found.sealed:
            number = (where - PAGE) // record_bytes(size)
            inside = (where - PAGE) % record_bytes(size)
            padding = size <= inside < record_bytes(size) - TRAILER_BYTES
            if number < count and not padding:
                assert heads[number] not in found.heads
