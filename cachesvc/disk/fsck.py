"""Checking a store that no daemon has open: every file, every record, and whether the index agrees with them.

==================  ============================================  ==================================================
finding             meaning                                       `repair`
==================  ============================================  ==================================================
unsealed_segment    a crash left it open: no damage               its torn end is cut, and it is sealed
torn_end            bytes behind its last whole record: no damage as above
damaged_record      trailer, identity or checksum are wrong       the footer says so: it is never served nor found again
damaged_footer      it is sealed, but its list or tail is damaged written anew from the records
footer_mismatch     the list says something else than a record    as above
damaged_header      one of the header's two copies is damaged     written anew from the other
torn_file           it has no whole header: no damage             removed
foreign_file        no segment, or no header copy is good         none: never deleted, never served
misplaced_segment   its directory contradicts its header          none
damaged_namespace   its JSON does not have its directory's digest removed; written again when it is used
damaged_state       STORE.json is damaged, or counts too few      written anew; one of another format stays as it is
                    starts
damaged_index       it cannot be read                             removed; rebuilt at the next start
index_mismatch      it lists blocks of a file that is not there,  as above
                    or that ends before them
leftover            a file of a write that was interrupted        removed
unreadable          the device does not give a file's bytes       none
==================  ============================================  ==================================================

A segment that was sealed and then cut looks like one that a crash left open; only the index tells them apart. After a
loss of power, its blocks beyond the end may be some that nobody was promised.

Removing the index forgets uses of blocks since they were written: they may expire that much earlier.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cachesvc.classes import TrafficClasses
from cachesvc.errors import StoreUnusable
from cachesvc.index.rocks import IndexDamaged, RocksIndex, decode_uses
from cachesvc.index.rows import NO_CLASS
from cachesvc.record import PAGE, RecordHead
from cachesvc.segments.format import (
    OWN_NAME,
    SUFFIX,
    ForeignFile,
    SegmentHead,
    decode_footer,
    encode_footer,
    encode_head,
    footer_bytes,
)
from cachesvc.segments.recover import Found, damaged_tail, read_head, scan, seal_recovered
from cachesvc.store_dir import last_epoch, lock_store, next_epoch, read_state

HARMLESS: Final = frozenset({"unsealed_segment", "torn_end", "torn_file", "leftover"})
"""What a crash leaves, and the next start deals with: no damage."""

MAX_FINDINGS: Final = 10_000
"""Kept in full; further ones are only counted."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Finding:
    kind: str
    path: str
    """Relative to the store."""
    text: str
    repaired: bool


@dataclass
class Summary:
    """What was checked and found. `counts` is by kind, and so is `left`, without what was repaired."""

    path: str
    segments: int = 0
    records: int = 0
    bytes: int = 0
    blocks_in_index: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    @property
    def damaged(self) -> bool:
        """Whether there is damage that was not repaired."""
        return any(count for kind, count in self.left.items() if kind not in HARMLESS)

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("path", "segments", "records", "bytes", "blocks_in_index")},
            "seconds": round(self.seconds, 3),
            "damaged": self.damaged,
            "counts": dict(self.counts),
            "left": {kind: count for kind, count in self.left.items() if count},
            "findings": [asdict(finding) for finding in self.findings],
        }


class Check:
    """Used once. `progress` is told bytes done, and bytes in all."""

    def __init__(self, path: Path, *, repair: bool = False, progress: Progress = lambda done, total: None) -> None:
        self._path = path
        self._repair = repair
        self._progress = progress
        self._summary = Summary(str(path))
        self._ends: dict[int, int] = {}
        """Records of the segments that are there, by tag."""

    def run(self) -> Summary:
        """Raises `StoreLocked` while a daemon has it open, and `StoreUnusable` when there is no store."""
        if not (self._path / "STORE.json").exists() and not any(self._path.glob(f"*/*/*/*{SUFFIX}")):
            raise StoreUnusable(f"{self._path} is no store; give the directory that the daemon was given as --store")
        lock = lock_store(self._path)
        started = time.monotonic()
        try:
            self._state()
            self._segments()
            self._index()
            self._leftovers()
        finally:
            os.close(lock)
        self._summary.seconds = time.monotonic() - started
        return self._summary

    # ---- inside --------------------------------------------------------------------------------------------------

    def _found(self, kind: str, path: Path, text: str, repair: Callable[[], object] | None = None) -> None:
        """Notes a finding, and repairs it if that was asked for and can be done."""
        repaired = False
        if self._repair and repair is not None:
            try:
                repair()
                repaired = True
            except OSError as error:
                text += f"; not repaired: {error.strerror}"
        name = str(path.relative_to(self._path))
        self._summary.counts[kind] += 1
        self._summary.left[kind] += not repaired
        if len(self._summary.findings) < MAX_FINDINGS:
            self._summary.findings.append(Finding(kind, name, text, repaired))

    def _state(self) -> None:
        target = self._path / "STORE.json"
        try:
            state = read_state(self._path)
        except (OSError, ValueError):
            self._found("damaged_state", target, "is missing or not understood", lambda: next_epoch(self._path))
        else:
            epoch = last_epoch(self._path, state.daemon)
            if fault := state.format_fault():
                self._found("damaged_state", target, fault)
            elif epoch > state.epoch:
                text = f"counts {state.epoch} starts, a segment is of start {epoch}"
                self._found("damaged_state", target, text, lambda: next_epoch(self._path))
        for namespace in sorted(self._path.glob("*/namespace.json")):
            try:
                digest = hashlib.sha256(namespace.read_bytes()).hexdigest()
            except OSError as error:
                self._found("unreadable", namespace, str(error.strerror))
                continue
            if digest != namespace.parent.name:
                self._found("damaged_namespace", namespace, f"has the digest {digest}", namespace.unlink)

    def _segments(self) -> None:
        paths = sorted(self._path.glob(f"*/*/*/*{SUFFIX}"))
        sizes = [path.stat().st_size if path.is_file() else 0 for path in paths]
        total = sum(sizes)
        done = 0
        for path, size in zip(paths, sizes, strict=True):
            try:
                self._segment(path)
            except ForeignFile as error:
                if OWN_NAME.fullmatch(path.name) and path.is_file() and size < PAGE:
                    self._found("torn_file", path, f"{size} bytes", path.unlink)
                else:
                    self._found("foreign_file", path, str(error))
            except OSError as error:
                self._found("unreadable", path, str(error.strerror))
            done += size
            self._progress(done, total)

    def _segment(self, path: Path) -> None:
        head, size, count = read_head(path)
        self._summary.segments += 1
        self._summary.bytes += size
        with path.open("rb", buffering=0) as file:
            if file.read(PAGE) != encode_head(head):
                self._found("damaged_header", path, "one of its copies", lambda: _put(path, 0, encode_head(head)))
        here = (head.namespace, head.traffic_class, str(head.slice_end))
        if path.relative_to(self._path).parts[:3] != here:
            self._found("misplaced_segment", path, f"its header says {'/'.join(here)}")
        whole_tail = count is not None
        if count is None:
            count = damaged_tail(path, head, size)
        slots = head.records_in(size) if count is None else count
        heads, damaged = scan(path, head, slots)
        good = {record.number: record for record in heads}
        self._summary.records += len(good)
        self._ends[head.tag] = max(good, default=-1) + 1 if count is None else count
        if count is None:
            self._unsealed(path, Found(head, heads, slots, size, sealed=False, damaged=tuple(damaged), scanned=True))
        else:
            self._sealed(path, head, count, good, whole_tail=whole_tail)

    def _unsealed(self, path: Path, found: Found) -> None:
        end = found.head.offset(max((record.number for record in found.heads), default=-1) + 1)
        holes = (end - found.head.offset(0)) // found.head.stride - len(found.heads)
        self._found("unsealed_segment", path, f"{len(found.heads)} records", lambda: seal_recovered(path, found))
        for _ in range(holes):
            self._found("damaged_record", path, "before its last whole record", lambda: None)  # sealed as damaged
        if found.size > end:
            self._found("torn_end", path, f"{found.size - end} bytes", lambda: None)  # cut when it was sealed

    def _sealed(
        self, path: Path, head: SegmentHead, count: int, good: dict[int, RecordHead], *, whole_tail: bool
    ) -> None:
        with path.open("rb", buffering=0) as file:
            file.seek(head.offset(count))
            listed = decode_footer(head, file.read(footer_bytes(count))) if whole_tail else None

        def mend() -> None:
            _put(path, head.offset(count), encode_footer(head, [good.get(number) for number in range(count)]))

        if listed is None:
            self._found("damaged_footer", path, f"of {count} records", mend)
            for number in set(range(count)) - good.keys():
                self._found("damaged_record", path, f"record {number}", mend)
            return
        by_number = {record.number: record for record in listed}
        for number, record in by_number.items():
            if number not in good:
                self._found("damaged_record", path, f"record {number}, block {record.key.hex()}/{record.shard}", mend)
            elif good[number] != record:
                self._found("footer_mismatch", path, f"record {number}", mend)
        for number in good.keys() - by_number.keys():
            self._found("footer_mismatch", path, f"record {number} is not listed", mend)

    def _index(self) -> None:
        """That everything the index says is there. What it lacks is found by the next start."""
        directory = self._path / "index"
        if not directory.exists():
            return

        def remove() -> None:
            shutil.rmtree(directory)

        try:
            index = RocksIndex(directory, read_only=True)
            try:
                stored = {tag: decode_uses(row, TrafficClasses({})).kinds for tag, row in index.uses().items()}
            finally:
                index.close()
        except (IndexDamaged, ValueError) as error:
            self._found("damaged_index", directory, str(error), remove)
            return
        self._summary.blocks_in_index = sum(map(_blocks, stored.values()))
        lost = sum(_blocks(kinds[self._ends.get(tag, 0) :]) for tag, kinds in stored.items())
        if lost:
            text = f"{lost} blocks are in files that are not there or end before them"
            self._found("index_mismatch", directory, text, remove)

    def _leftovers(self) -> None:
        for path in (*self._path.glob("*.tmp"), *self._path.glob("*/*.tmp"), self._path / "PROBE"):
            if path.exists():
                self._found("leftover", path, f"{path.stat().st_size} bytes", path.unlink)
        fresh = self._path / "index.new"
        if fresh.exists():
            self._found("leftover", fresh, "an index that was being written", lambda: shutil.rmtree(fresh))


def _blocks(kinds: NDArray[np.uint8]) -> int:
    """Those that were stored, by a row of the index."""
    return int(np.count_nonzero(kinds != NO_CLASS))


def _put(path: Path, offset: int, content: bytes) -> None:
    """Overwrites a part of a file. Raises `OSError`."""
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        if file.write(content) != len(content):
            raise OSError(0, "written only in part")
        os.fdatasync(file.fileno())
