"""What was counted, minute by minute, kept for 30 days within a byte budget.

A line per half minute in which something happened: a digest and JSON. One file per day (UTC); past days, and parts of a
busy one, are packed into compressed files with a line per minute.
A killed daemon loses the half minute it was in, and passes that were not closed yet: the last minute at most. A line
that cannot be read (cut off by a crash, damaged) is left out. What the disk refuses goes into the next line.
"""

from __future__ import annotations

import datetime
import gzip
import json
import logging
import os
import re
import secrets
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from cachesvc.accounting import Row, RowKey
from cachesvc.limits import KEEP_SECONDS, MAX_ROLLUP_BYTES, ROLLUP_DAYS
from cachesvc.store_dir import write_atomically

log = logging.getLogger("cachesvc.rollups")

MINUTE: Final = 60
_DAY_MINUTES: Final = 1_440
_PLAIN: Final = ".jsonl"
_PACKED: Final = ".jsonl.gz"
_FILE_NAME: Final = re.compile(r"\d{4}-\d\d-\d\d(\.\d{4}\.jsonl\.gz|\.jsonl)")
_PARTS: Final = 32
"""Of the budget: as much is packed at once."""


@dataclass
class Counts:
    """Everything counted, since some moment or within some time."""

    rows: dict[RowKey, Row] = field(default_factory=dict)
    other: Counter[str] = field(default_factory=Counter)
    """What belongs to no row: lifetime.N, reuse.N."""
    store: dict[str, int] = field(default_factory=dict)
    """The store at the end: bytes, budget, blocks, arena_used, arena."""

    def since(self, earlier: Counts) -> Counts:
        """What came after `earlier`."""
        rows = {key: _difference(row, earlier.rows.get(key, Counter())) for key, row in self.rows.items()}
        return Counts(
            {key: row for key, row in rows.items() if row}, _difference(self.other, earlier.other), self.store
        )

    def add(self, later: Counts) -> None:
        for key, row in later.rows.items():
            self.rows.setdefault(key, Counter()).update(row)  # falling counts too: what was pending becomes a hit
        self.other.update(later.other)
        self.store = later.store or self.store

    def __bool__(self) -> bool:
        return bool(self.rows or self.other)


class Rollups:
    """Thread-safe. `keep` waits while a `history` is read."""

    def __init__(self, path: Path, *, budget: int = MAX_ROLLUP_BYTES) -> None:
        self._path = path
        self._budget = budget
        self._lock = threading.Lock()
        self._kept = Counts()
        self._period: int | None = None
        self._ragged: set[Path] = set()
        """Files whose last line may be cut off."""
        self._unpacked = 0
        """Bytes written since a file was packed."""

    def keep(self, counted: Callable[[], Counts], now: float, *, closing: bool = False) -> bool:
        """Writes what is new when `KEEP_SECONDS` are over or the daemon stops.

        `counted` gives all since the daemon started. Returns whether something was written. Raises `OSError`; nothing
        is lost by it.
        """
        period = max(0, int(now // KEEP_SECONDS))  # before 1970 nothing is, whatever a clock says
        if period == self._period and not closing:
            return False
        with self._lock:
            first = self._period is None
            began, self._period = period if self._period is None else self._period, period
            over, minute = began * KEEP_SECONDS // MINUTE, period * KEEP_SECONDS // MINUTE
            if first:
                self._path.mkdir(exist_ok=True)
                self._ragged = set(self._path.glob(f"*{_PLAIN}"))
            new = counted().since(self._kept)
            if new:
                self._append(over, new)
                self._kept.add(new)
            if first or minute // _DAY_MINUTES != over // _DAY_MINUTES or self._unpacked > self._budget // _PARTS:
                self._tidy(minute)
        return bool(new)

    def history(
        self, counted: Callable[[], Counts], now: float, since: float, until: float, width: int
    ) -> dict[int, Counts]:
        """Counts by start of bucket (seconds), `width` seconds wide; one bucket, at `since`, when that is 0."""
        buckets: dict[int, Counts] = {}

        def add(minute: int, counts: Counts) -> None:
            if since <= minute * MINUTE + MINUTE - 1 and minute * MINUTE < until:
                start = minute * MINUTE // width * width if width else int(since)
                buckets.setdefault(start, Counts()).add(counts)

        with self._lock:
            read: dict[int, set[str]] = {}
            for path in self._files():
                day = _day_of(path)
                begin = day * _DAY_MINUTES * MINUTE
                if since < begin + _DAY_MINUTES * MINUTE and begin < until:
                    for minute, _, counts in _read(path, read.setdefault(day, set())):
                        add(minute, counts)
            unwritten = counted().since(self._kept)
        if unwritten:
            add(int(now // MINUTE), unwritten)
        return dict(sorted(buckets.items()))

    def _append(self, minute: int, counts: Counts) -> None:
        path = self._path / (_name_of(minute // _DAY_MINUTES) + _PLAIN)
        text = ("\n" if path in self._ragged else "") + _line(minute, [secrets.token_hex(4)], counts)
        self._ragged.add(path)
        with path.open("a") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self._ragged.discard(path)
        self._unpacked += len(text)

    def _tidy(self, minute: int) -> None:
        """Packs past days, and today so far if that is much; removes the oldest over the days and over the budget."""
        try:
            today = _name_of(minute // _DAY_MINUTES)
            for path in self._files():
                past = path.name[:10] < today or path.stat().st_size > self._budget // _PARTS
                if path.name.endswith(_PLAIN) and past:
                    self._pack(path)
            files = self._files()
            sizes = [path.stat().st_size for path in files]
            # By number, not by date: a clock that jumps ahead once must not clear everything.
            days = sorted({path.name[:10] for path in files})[-ROLLUP_DAYS - 1 :]
            for number, path in enumerate(files[:-1]):
                if path.name[:10] not in days or sum(sizes[number:]) > self._budget:
                    path.unlink()
        except OSError as error:
            log.warning("older counts are left as they are for now: %s", error)

    def _pack(self, path: Path) -> None:
        """Compresses a file into a new one, a line for each minute.

        A kill may leave both: lines say of which they consist, and are read once.
        """
        minutes: dict[int, tuple[list[str], Counts]] = {}
        for minute, ids, counts in _read(path, set()):
            known = minutes.setdefault(minute, ([], Counts()))
            known[0].extend(ids)
            known[1].add(counts)
        text = "".join(_line(minute, ids, counts) for minute, (ids, counts) in minutes.items())
        parts = [int(known.name[11:15]) for known in self._files() if known.name[:10] == path.name[:10] != known.stem]
        target = self._path / f"{path.name[:10]}.{1 + max(parts, default=0):04d}{_PACKED}"
        write_atomically(target, gzip.compress(text.encode()))
        path.unlink()
        self._unpacked = 0

    def _files(self) -> list[Path]:
        """In order of time: those of one day by number, the one that is not packed last."""
        found = self._path.glob("????-??-??.*")
        return sorted(path for path in found if _FILE_NAME.fullmatch(path.name) and _day_of(path) >= 0)


def _line(minute: int, ids: list[str], counts: Counts) -> str:
    rows = [[*key, row] for key, row in counts.rows.items()]
    body = json.dumps({"minute": minute, "ids": ids, "rows": rows, "other": counts.other, "store": counts.store})
    return f"{_digest(body.encode())} {body}\n"


def _read(path: Path, seen: set[str]) -> Iterator[tuple[int, list[str], Counts]]:
    """The lines of a file, as minute, ids and counts, but for those of which some were `seen` before."""
    day = _day_of(path)
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                digest, _, body = line.rstrip(b"\n").partition(b" ")
                found = _parse(body) if digest == _digest(body).encode() else None
                if found is not None and found[0] // _DAY_MINUTES == day and seen.isdisjoint(found[1]):
                    seen.update(found[1])
                    yield found
    except FileNotFoundError:
        return  # compressed or removed meanwhile
    except (OSError, EOFError, zlib.error) as error:
        log.warning("the rest of %s is left out: %s", path, error)


def _digest(body: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(body)


def _parse(body: bytes) -> tuple[int, list[str], Counts] | None:
    try:
        found = json.loads(body)
        rows = {
            RowKey(_name(traffic_class), _name(model), _name(tenant)): _counter(row)
            for traffic_class, model, tenant, row in found["rows"]
        }
        store = {name: max(0, count) for name, count in _counter(found["store"]).items()}
        return int(found["minute"]), list(map(str, found["ids"])), Counts(rows, _counter(found["other"]), store)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _name(found: Any) -> str:
    text = str(found)
    text.encode()  # a half of a surrogate pair could not be sent
    return text


def _counter(found: Any) -> Counter[str]:
    counts = Counter({_name(name): int(count) for name, count in found.items()})
    if any(abs(count) >= 1 << 62 for count in counts.values()):
        raise ValueError("a count that no daemon counts to")
    return counts


def _difference(later: Mapping[str, int], earlier: Mapping[str, int]) -> Counter[str]:
    return Counter({name: n - earlier.get(name, 0) for name, n in later.items() if n != earlier.get(name, 0)})


def _name_of(day: int) -> str:
    return (datetime.date(1970, 1, 1) + datetime.timedelta(days=day)).isoformat()


def _day_of(path: Path) -> int:
    """Days since the epoch, -1 for a file of another name."""
    try:
        return (datetime.date.fromisoformat(path.name[:10]) - datetime.date(1970, 1, 1)).days
    except ValueError:
        return -1
