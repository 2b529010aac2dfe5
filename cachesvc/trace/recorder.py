"""Writes what was asked of the daemon, and what became of it, as a trace that `cachesvc replay` reads.

Lines of JSON, in files of bounded size; over the byte budget the oldest goes. Nothing leads back to content: keys and
tenants are digests under a secret salt that stays beside the files. A file begins with ``{"cachesvc_trace": 1}``; then
comes one event a line, with ``at`` (seconds since the epoch) and ``event``:

===========  =====================================================================================================
ask          a Match: ``pass`` (number), ``id`` (as given by the client), ``again`` (it had asked before), ``class``,
             ``model``, ``tenant``, ``block`` (tokens), ``input`` and ``local`` (tokens), ``shards``, ``keys``
end          what became of it: ``pass``, ``loaded`` (blocks), ``tiers`` (one byte per matched block), ``reason``
uncounted    a look-up by another rank of an engine, for a pass that is counted already
unreachable  ``tokens`` of passes that could not ask, with ``class``, ``model``, ``tenant``
stored       ``keys`` that can be matched from here on, of one ``shard``
dropped      ``keys`` that cannot be any more, and the ``reason``
boot         nothing is stored; what is, follows. Written when recording begins, at each start of the daemon
lost         ``count`` events that could not be written stand at this place
===========  =====================================================================================================

``keys`` are 8 bytes a block, in base64. Events stand in the order in which they took effect.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from cachesvc.clock import Clock
from cachesvc.index.table import split_id
from cachesvc.keys import KEY_BYTES as CHAIN_KEY_BYTES
from cachesvc.limits import MAX_QUEUED_EVENTS
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.store_dir import write_atomically

log = logging.getLogger("cachesvc.trace")

HEADER: Final = {"cachesvc_trace": 1}
KEY_BYTES: Final = 8

_FILES: Final = 8  # of which the budget consists
_KEYS_A_LINE: Final = 4_096
_WRITE_SECONDS: Final = 0.25
_SALT_BYTES: Final = 16


class Event:
    """An event at its place in the order. One whose content is not yet known holds up those behind it."""

    __slots__ = ("content", "identities")

    def __init__(self, content: dict[str, Any] | None = None, identities: Iterable[bytes] = ()) -> None:
        self.content = content
        self.identities = identities
        """Blocks that it is about."""

    def fill(self, content: dict[str, Any], identities: Iterable[bytes] = ()) -> None:
        self.identities = identities
        self.content = content


class Recorder:
    """Events are put into a queue, and written by a thread of its own. Thread-safe."""

    def __init__(self, path: Path, budget: int, clock: Clock) -> None:
        """`budget` is in bytes, for all files."""
        self.path = path
        self.budget = budget
        self.lost = 0
        self._clock = clock
        self._queue: deque[Event] = deque()
        self._missing = 0
        self._salt = b""
        self._file: Path | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self._files())

    def start(self, identities: Iterable[bytes]) -> None:
        """Begins with what is stored. Raises `OSError`."""
        self.path.mkdir(exist_ok=True)
        self._salt = self._read_salt()
        self._file = None
        for path in self._files()[-1:]:
            _end_with_a_line(path)  # a kill may have cut it off
        self._queue.clear()
        self.note({"event": "boot"})
        self.stored(identities)
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Writes what was noted."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def note(self, content: dict[str, Any], identities: Iterable[bytes] = ()) -> None:
        self.place().fill({"at": self._clock.now()} | content, identities)

    def place(self) -> Event:
        """A place in the order, to be filled soon."""
        event = Event()
        if len(self._queue) >= MAX_QUEUED_EVENTS:
            self.lost += 1
            self._missing += 1
        else:
            self._queue.append(event)
        return event

    def stored(self, identities: Iterable[bytes]) -> None:
        for shard, group in groupby(identities, lambda identity: split_id(identity)[1]):
            self.note({"event": "stored", "shard": shard}, list(group))

    def stored_keys(self, keys: bytes, shard: int) -> None:
        """`stored`, for keys of one shard back to back."""
        blocks = (keys[i : i + CHAIN_KEY_BYTES] for i in range(0, len(keys), CHAIN_KEY_BYTES))
        self.note({"event": "stored", "shard": shard}, blocks)

    def dropped(self, identities: Iterable[bytes], reason: MissReason.ValueType) -> None:
        for shard, group in groupby(identities, lambda identity: split_id(identity)[1]):
            name = MissReason.Name(reason).lower()
            self.note({"event": "dropped", "shard": shard, "reason": name}, list(group))

    # ---- inside --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(_WRITE_SECONDS):
            self._write()
        self._write()

    def _write(self) -> None:
        lines: list[str] = []
        while self._queue and (content := self._queue[0].content) is not None:
            identities = [*self._queue.popleft().identities]
            while self._queue and _same_drop(content, self._queue[0].content):
                identities += self._queue.popleft().identities
            lines += self._lines(content, identities)
        said = 0 if self._queue else self._missing
        if said:
            lines.append(json.dumps({"at": self._clock.now(), "event": "lost", "count": said}))
            self._missing -= said
        try:
            while lines:
                written = self._append(lines)
                del lines[:written]
        except OSError as error:
            lost = len(lines) - bool(said)
            self.lost += lost
            self._missing += lost + said
            if lost:
                log.warning("%d lines of the recording are lost: %s", lost, error.strerror)

    def _append(self, lines: list[str]) -> int:
        """Writes as many of the lines as there is room for in one file, at least one; says how many. All or none."""
        target, room = self._target(len(lines[0].encode()) + 1)
        size, part = target.stat().st_size, list[bytes]()
        for line in lines:
            content = line.encode() + b"\n"
            if part and room < len(content):
                break
            part.append(content)
            room -= len(content)
        try:
            with target.open("ab", buffering=0) as file:
                rest = memoryview(b"".join(part))
                while rest:
                    rest = rest[file.write(rest) :]
        except OSError:
            self._file = None  # what comes next must not stand behind half a line
            os.truncate(target, size)
            self._file = target
            raise
        return len(part)

    def _lines(self, content: dict[str, Any], identities: Iterable[bytes]) -> Iterable[str]:
        keys = b"".join(self._digest(split_id(identity)[0]) for identity in identities)
        if content.get("tenant"):
            content["tenant"] = self._digest(content["tenant"].encode()).hex()
        if content["event"] in ("stored", "dropped"):
            for start in range(0, len(keys), _KEYS_A_LINE * KEY_BYTES):
                yield json.dumps(content | {"keys": _text(keys[start : start + _KEYS_A_LINE * KEY_BYTES])})
        elif content["event"] == "ask":
            yield json.dumps(content | {"keys": _text(keys)})
        else:
            yield json.dumps(content)

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, digest_size=KEY_BYTES, key=self._salt).digest()

    def _target(self, needed: int) -> tuple[Path, int]:
        """The file to append a line of `needed` bytes to, and the bytes that it has room for.

        When the line does not fit it is the next file, and the oldest go until that one fits into the budget.
        """
        share = self.budget // _FILES
        if self._file is not None and (room := share - self._file.stat().st_size) >= needed:
            return self._file, room
        self._file = None  # it may be one of those that go
        header = json.dumps(HEADER).encode() + b"\n"
        files = self._files()
        sizes = [path.stat().st_size for path in files]
        for i, path in enumerate(files):
            if sum(sizes[i:]) + max(share, len(header) + needed) > self.budget:
                path.unlink()
        number = 1 + max((int(path.stem) for path in files), default=0)
        path = self.path / f"{number:08d}.jsonl"
        write_atomically(path, header)
        self._file = path
        return path, share - len(header)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.path.glob("*.jsonl") if path.stem.isdecimal())

    def _read_salt(self) -> bytes:
        path = self.path / "salt"
        salt = path.read_bytes() if path.exists() else b""
        if len(salt) != _SALT_BYTES:
            if salt or self._files():
                log.warning("the salt of %s is lost: from here on keys are others than in its older files", self.path)
            salt = secrets.token_bytes(_SALT_BYTES)
            write_atomically(path, salt, mode=0o600)
        return salt


def _end_with_a_line(path: Path) -> None:
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def _same_drop(one: dict[str, Any], other: dict[str, Any] | None) -> bool:
    return other is not None and one["event"] == "dropped" and one | {"at": 0} == other | {"at": 0}


def _text(keys: bytes) -> str:
    return base64.b64encode(keys).decode()
