"""What a store holds when it is opened: from the index where it can be trusted, from the files where not."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from cachesvc.catalog import Catalog
from cachesvc.classes import TrafficClasses
from cachesvc.disk.durable import DurableIndex
from cachesvc.disk.files import SegmentFiles
from cachesvc.index.rocks import StoredEntry, StoredSegment
from cachesvc.index.table import Entry, block_id
from cachesvc.record import PAGE
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.segments.format import OWN_NAME, SUFFIX, ForeignFile, footer_bytes
from cachesvc.segments.recover import Found, read_head, read_segment, seal_recovered
from cachesvc.segments.segment import Segment

log = logging.getLogger("cachesvc.store")

_SAY_SECONDS = 2.0


class Progress:
    """A line in the log every few seconds: a scan of many files takes long, and people look at it."""

    def __init__(self, files: int) -> None:
        self._files = files
        self._done = 0
        self._bytes = 0
        self._started = self._said = time.monotonic()

    def done(self, size: int) -> None:
        """One file is done, of which so many bytes were read."""
        self._done += 1
        self._bytes += size
        now = time.monotonic()
        if now - self._said < _SAY_SECONDS and self._done < self._files:
            return
        self._said = now
        passed = max(now - self._started, 1e-3)
        log.info(
            "recovered %d of %d segments from their files [%s] %.0f %%, %.0f segments/s, %.0f MB/s, %.0f s left",
            self._done,
            self._files,
            ("#" * (20 * self._done // self._files)).ljust(20, "."),
            100 * self._done / self._files,
            self._done / passed,
            self._bytes / passed / 1e6,
            passed / self._done * (self._files - self._done),
        )


class Opening:
    """Used once, before anything else touches the store."""

    def __init__(
        self,
        path: Path,
        catalog: Catalog,
        files: SegmentFiles,
        durable: DurableIndex,
        classes: TrafficClasses,
        events: Counter[str],
    ) -> None:
        self._path = path
        self._catalog = catalog
        self._files = files
        self._durable = durable
        self._classes = classes
        self._events = events

    def run(self, known: dict[str, StoredSegment], entries: list[tuple[bytes, StoredEntry]]) -> None:
        """Fills the table: from the index for segments that it knows as sealed, from the files for all others."""
        started = time.monotonic()
        self._files.next_segment = 1 + max((s.number for s in known.values()), default=0)
        trusted: dict[int, Segment] = {}
        unknown: list[Path] = []
        files = sorted(self._path.glob(f"*/*/*/*{SUFFIX}"))
        for path in files:
            name = str(path.relative_to(self._path))
            try:
                head, size, records = read_head(path)
            except (ForeignFile, OSError) as error:
                self._foreign(path, error)
                continue
            stored = known.get(name)
            if stored is None or records is None or not (stored.sealed and stored.size == size):
                unknown.append(path)
                continue
            trusted[stored.number] = self._files.register(stored.number, path, head, records, size, sealed=True)
        untrusted = self._load_entries(trusted, entries)
        progress = Progress(len(unknown))
        for path in unknown:
            progress.done(self._recover_file(path, known.get(str(path.relative_to(self._path))), untrusted))
        gone = [identity for identity in untrusted if self._catalog.where(identity) is None]
        if gone:
            self._durable.record(delete=gone)
        present = {str(segment.path.relative_to(self._path)) for segment in self._files.segments.values()}
        lost = [stored.number for name, stored in known.items() if name not in present]
        if lost:
            self._durable.record(drop_segments=lost)
        for segment in self._files.segments.values():
            uses = [entry.used for _, entry in self._catalog.live_locked(segment)]
            segment.dead = segment.records - len(uses)
            segment.oldest_use = min(uses, default=segment.oldest_use)
        log.info(
            "store %s: %d blocks in %d segments, %.2f s",
            self._path,
            len(self._catalog),
            len(self._files.segments),
            time.monotonic() - started,
        )

    def _load_entries(
        self, trusted: dict[int, Segment], entries: list[tuple[bytes, StoredEntry]]
    ) -> dict[bytes, StoredEntry]:
        """Returns those of segments that are not trusted: they tell use times, but not what is there."""
        untrusted: dict[bytes, StoredEntry] = {}
        for identity, stored in entries:
            segment = trusted.get(stored.segment)
            if segment is None or stored.record >= segment.records:
                untrusted[identity] = stored
                continue
            traffic_class = self._classes.of_file(stored.traffic_class, segment.head.ttl)
            entry = Entry(
                segment.shape,
                segment,
                stored.record,
                stored.checksum,
                stored.created,
                stored.used,
                traffic_class,
                -1.0 if stored.touched else stored.used,
            )
            segment.place(identity, stored.record)
            self._catalog.insert_locked(identity, entry)
        return untrusted

    def _recover_file(self, path: Path, stored: StoredSegment | None, uses: Mapping[bytes, StoredEntry]) -> int:
        """Takes the blocks that a file holds; `uses` may know later uses of them than the file does.

        Returns the bytes that were read for it.
        """
        try:
            found = read_segment(path)
        except (ForeignFile, OSError) as error:
            self._foreign(path, error)
            return 0
        if not found.sealed:
            self._events["recovered_segments"] += 1
            try:
                found = seal_recovered(path, found)
            except OSError as error:
                # A full disk must not keep its blocks from being served; the next start scans the file again.
                log.warning("cannot seal %s: %s", path, error.strerror)
        number = stored.number if stored is not None else self._files.next_segment
        self._files.next_segment = max(self._files.next_segment, number + 1)
        segment = self._files.register(number, path, found.head, found.records, found.size, sealed=found.sealed)
        if found.scanned:
            self._damaged(path, found)
        put = []
        for record in found.heads:
            identity = block_id(record.key, record.shard)
            segment.place(identity, record.number)
            old = self._catalog.where(identity)
            if old is None or old.used < record.used:
                used, traffic_class = record.used, segment.traffic_class
                use = uses.get(identity)
                if use is not None and (use.segment, use.record) == (number, record.number) and use.used > used:
                    used, traffic_class = use.used, self._classes.of_file(use.traffic_class, found.head.ttl)
                entry = Entry(
                    segment.shape,
                    segment,
                    record.number,
                    record.checksum,
                    record.created,
                    used,
                    traffic_class,
                    record.used,
                )
                self._catalog.insert_locked(identity, entry)
                put.append((identity, entry))
        self._durable.record(put=put)
        self._durable.record(segment=segment)
        return found.size if found.scanned else footer_bytes(found.records)

    def _damaged(self, path: Path, found: Found) -> None:
        """Counts the records that a scan found damaged; those whose trailer is whole are remembered by name."""
        count = found.records - len(found.heads)
        if count:
            log.warning("%s: %d of %d records are damaged; the others stay in use", path, count, found.records)
        self._events["corrupt_blocks"] += count
        for record in found.damaged:
            self._catalog.lost(block_id(record.key, record.shard), MissReason.CORRUPT)

    def _foreign(self, path: Path, error: Exception) -> None:
        if isinstance(error, ForeignFile) and OWN_NAME.fullmatch(path.name) and path.stat().st_size < PAGE:
            log.info("%s has no whole header, as a crash leaves it: removed", path)
            path.unlink()
            self._events["torn_files"] += 1
            return
        self._events["foreign_files"] += 1
        log.warning("%s is left alone: %s", path, error)
