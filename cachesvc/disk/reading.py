"""Reading blocks from segment files. Position, identity and checksum of every record are checked; doubt is a miss."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cachesvc.catalog import Catalog
from cachesvc.errors import BlockUnreadable
from cachesvc.index.table import Entry, block_id
from cachesvc.limits import MAX_READ_BYTES
from cachesvc.record import check_record
from cachesvc.rpc.cache_pb2 import MissReason

log = logging.getLogger("cachesvc.store")


@dataclass(frozen=True)
class Wanted:
    """One payload to read: an entry that has a segment, and the identity that its record must prove."""

    key: bytes
    shard: int
    entry: Entry


class Reader:
    """Thread-safe. The caller has pinned the segments of what it wants."""

    def __init__(self, catalog: Catalog, events: Counter[str]) -> None:
        self._catalog = catalog
        self._events = events

    def read(self, wanted: Sequence[Wanted], payloads: Sequence[memoryview]) -> Iterator[int]:
        """Fills `payloads` in order; yields the checksum of each once it is checked. Neighbours are read together.

        Raises `BlockUnreadable` at the first block that cannot be served; a damaged one is dropped for good.
        """
        position = 0
        while position < len(wanted):
            run = _run_length(wanted, position)
            segment = wanted[position].entry.segment
            assert segment is not None, "a block that is only in the arena was to be read from disk"
            targets = payloads[position : position + run]
            try:
                with segment.reading() as descriptor:
                    trailers = segment.read_records(descriptor, wanted[position].entry.record, targets)
            except BlockUnreadable as error:
                self._unreadable(wanted[position], error)
                raise
            for item, payload, trailer in zip(wanted[position : position + run], targets, trailers, strict=True):
                try:
                    found = check_record(
                        payload,
                        trailer,
                        key=item.key,
                        shard=item.shard,
                        number=item.entry.record,
                        segment_tag=segment.head.tag,
                    )
                    if found != item.entry.checksum:
                        raise BlockUnreadable(f"{item.key.hex()} is not the payload that was committed", corrupt=True)
                except BlockUnreadable as error:
                    self._unreadable(item, error)
                    raise
                yield found
            position += run

    def read_each(self, wanted: Sequence[Wanted], payloads: Sequence[memoryview]) -> list[int | None]:
        """As `read`, past blocks that cannot be served: their checksum is None."""
        found: list[int | None] = []
        while len(found) < len(wanted):
            try:
                for total in self.read(wanted[len(found) :], payloads[len(found) :]):
                    found.append(total)
            except BlockUnreadable:
                found.append(None)
        return found

    def _unreadable(self, item: Wanted, error: BlockUnreadable) -> None:
        log.warning("block is a miss: %s", error)
        if error.corrupt:
            self._catalog.drop(block_id(item.key, item.shard), item.entry, MissReason.CORRUPT)
        else:
            self._events["read_errors"] += 1


def _run_length(wanted: Sequence[Wanted], position: int) -> int:
    """How many payloads from `position` on lie one behind the other in one file, within one request's size."""
    first = wanted[position].entry
    limit = max(1, MAX_READ_BYTES // first.shape.payload_bytes)
    length = 1
    while (
        length < limit
        and position + length < len(wanted)
        and wanted[position + length].entry.segment is first.segment
        and wanted[position + length].entry.record == first.record + length
    ):
        length += 1
    return length
