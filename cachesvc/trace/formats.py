"""Readers of traces: one request after the other, in order of time, whatever the length of the file.

Rules that hold for all formats: only full blocks have keys; a key names its block and the whole prefix, so at a coarser
block every n-th id names a block. Formats:

* ``mooncake`` (FAST'25): ``{"timestamp" ms, "input_length", "output_length", "hash_ids"}``, 512 tokens a block, ids
  global to the file, ``ceil(input / 512)`` of them.
* ``agent``: one session a line, ``{"block_size", "reqs": [[t, input, output, agent, [[first id, count], …]], …]}``, ids
  local to the session, times relative to its start.
* ``cachesvc``: our own. First line ``{"cachesvc_trace": 1, …}``, then events; ``ask`` is a request, see `OwnTrace`.
"""

from __future__ import annotations

import base64
import gzip
import heapq
import json
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, NamedTuple, cast

from cachesvc.classes import CLASS_NAME
from cachesvc.errors import ConfigError, TraceError
from cachesvc.keys import BLOCK_TOKENS
from cachesvc.limits import MAX_TRACE_BLOCKS, MAX_TRACE_LINE_BYTES

ID_BITS: Final = 40
"""Ids that are local to a file or session get a number of their own above these bits."""
_GZIP: Final = b"\x1f\x8b"
_TRACE_VERSION: Final = 1
_LATEST: Final = 1e11
"""Seconds since the epoch: some 3,000 years. Later times lose their parts of a second."""


class Request(NamedTuple):
    """One prompt. `at` in seconds; `keys` of its full blocks, in prefix order.

    Of its tokens the first `local_tokens` were in the engine's own cache.
    """

    at: float
    traffic_class: str
    input_tokens: int
    keys: list[int]
    local_tokens: int = 0


class Trace(ABC):
    """One file. `block` is its own block size in tokens; `classes` those it can name, None if its lines name them."""

    name: ClassVar[str]
    default_class: ClassVar[str]

    def __init__(self, path: Path, first: Mapping[str, Any], traffic_class: str | None) -> None:
        self.path = path
        self.size = path.stat().st_size
        self.traffic_class = traffic_class
        self.position = 0
        """Bytes of the file read so far."""
        self.block = self._own_block(first)
        if self.block <= 0:
            raise TraceError(f"{path}: blocks of {self.block} tokens; they must have at least 1")

    @property
    def classes(self) -> frozenset[str] | None:
        return frozenset({self.traffic_class or self.default_class})

    @staticmethod
    @abstractmethod
    def recognises(first: Mapping[str, Any]) -> bool:
        """Whether a file with this first line has this format."""

    @abstractmethod
    def requests(self, block: int, spaces: Iterator[int], session_gap: float) -> Iterator[Request]:
        """The file's requests at `block` tokens a block, in order of time. Raises `TraceError`.

        Each of `spaces` sets ids apart from all others.
        """

    @abstractmethod
    def _own_block(self, first: Mapping[str, Any]) -> int: ...

    def _lines(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        for number, line, position in _read(self.path):
            self.position = position
            yield number, line

    def _step(self, block: int, own: int, line: int) -> int:
        """How many own blocks make one of `block` tokens."""
        if own <= 0 or block % own:
            why = "mixed block sizes" if own != self.block else "a finer or uneven block"
            raise TraceError(
                f"{self.path} line {line}: {why}: its blocks have {own} tokens, of which {block} is not a multiple; "
                "give --block a multiple"
            )
        return block // own

    def _broken(self, line: int, error: Exception) -> TraceError:
        what = f"lacks {error}" if isinstance(error, KeyError) else f"is malformed ({error})"
        return TraceError(f"{self.path} line {line}: a {self.name} line that {what}")

    def _checked(self, at: float, input_tokens: int, line: int) -> None:
        if not 0 <= at < _LATEST:
            raise TraceError(f"{self.path} line {line}: time {at:g} s; it must not be negative, nor over {_LATEST:g}")
        if not 0 <= input_tokens < 1 << 40:
            raise TraceError(f"{self.path} line {line}: {input_tokens} input tokens")


_MALFORMED: Final = (KeyError, TypeError, ValueError, IndexError, OverflowError)


class MooncakeTrace(Trace):
    name = "mooncake"
    default_class = "chat"
    BLOCK: Final = 512

    @staticmethod
    def recognises(first: Mapping[str, Any]) -> bool:
        return "hash_ids" in first

    def _own_block(self, first: Mapping[str, Any]) -> int:
        return self.BLOCK

    def requests(self, block: int, spaces: Iterator[int], session_gap: float) -> Iterator[Request]:
        step = self._step(block, self.BLOCK, 1)
        space = next(spaces)
        traffic_class = self.traffic_class or self.default_class
        for line, row in self._lines():
            try:
                at, tokens, ids = row["timestamp"] / 1000, int(row["input_length"]), row["hash_ids"]
                self._checked(at, tokens, line)
                expected = -(-tokens // self.BLOCK)
                if len(ids) != expected:
                    raise TraceError(
                        f"{self.path} line {line}: {len(ids)} hash_ids for {tokens} tokens; at {self.BLOCK} tokens a "
                        f"block there must be {expected} (mixed block sizes?)"
                    )
                keys = ids[step - 1 : tokens // block * step : step]
                yield Request(at, traffic_class, tokens, _apart(keys, space))
            except _MALFORMED as error:
                raise self._broken(line, error) from error


class AgentTrace(Trace):
    name = "agent"
    default_class = "agent"

    @staticmethod
    def recognises(first: Mapping[str, Any]) -> bool:
        return "reqs" in first

    def _own_block(self, first: Mapping[str, Any]) -> int:
        try:
            return int(first["block_size"])
        except _MALFORMED as error:
            raise self._broken(1, error) from error

    def requests(self, block: int, spaces: Iterator[int], session_gap: float) -> Iterator[Request]:
        for session, turn in interleaved(self._sessions(block, spaces, session_gap)):
            try:
                request = session.request(turn)
                self._checked(request.at, request.input_tokens, session.line)
            except _MALFORMED as error:
                raise self._broken(session.line, error) from error
            yield request

    def _sessions(self, block: int, spaces: Iterator[int], session_gap: float) -> Iterator[Session]:
        traffic_class = self.traffic_class or self.default_class
        for number, (line, row) in enumerate(self._lines()):
            try:
                step = self._step(block, int(row["block_size"]), line)
                turns = sorted(row["reqs"], key=lambda turn: float(turn[0]))
                if turns:
                    self._checked(turns[0][0], 0, line)
                    yield Session(number * session_gap, turns, step, block, next(spaces), line, traffic_class)
            except _MALFORMED as error:
                raise self._broken(line, error) from error


class Session(NamedTuple):
    """A line of an agent file. `start` in seconds; `step` of its blocks make one of `block` tokens."""

    start: float
    turns: Sequence[Any]
    step: int
    block: int
    space: int
    line: int
    traffic_class: str

    def time(self, turn: int) -> float:
        return self.start + float(self.turns[turn][0])

    def request(self, turn: int) -> Request:
        """Raises `ValueError` and the like for what makes no sense."""
        _, tokens, _, _, ranges = self.turns[turn]
        step, keys, passed = self.step, cast(list[int], []), 0
        for first, length in ranges:
            if length < 0 or not 0 <= first <= first + length < 1 << ID_BITS:
                raise ValueError(f"ids {first} to {first + length}")
            if passed + length > MAX_TRACE_BLOCKS:
                raise ValueError(f"{passed + length} blocks; a request can have {MAX_TRACE_BLOCKS}")
            if (passed + length) * self.block > tokens * step:
                raise ValueError(f"{passed + length} full blocks in {tokens} tokens")
            begin = self.space + first
            keys.extend(range(begin + (step - 1 - passed) % step, begin + length, step))
            passed += length
        return Request(self.time(turn), self.traffic_class, tokens, keys)


def interleaved(sessions: Iterable[Session]) -> Iterator[tuple[Session, int]]:
    """The turns of all sessions in order of time. Sessions come in order of their start.

    A session is taken when its start has come, and forgotten after its last turn.
    """
    running: list[tuple[float, int, int, Session]] = []
    coming = enumerate(sessions)
    following = next(coming, None)
    while running or following:
        while following and (not running or following[1].start <= running[0][0]):
            number, session = following
            heapq.heappush(running, (session.time(0), number, 0, session))
            following = next(coming, None)
        _, number, turn, session = running[0]
        if turn + 1 < len(session.turns):
            heapq.heapreplace(running, (session.time(turn + 1), number, turn + 1, session))
        else:
            heapq.heappop(running)
        yield session, turn


class OwnTrace(Trace):
    """What `cachesvc record` writes. An event that counts::

        {"event": "ask", "at": seconds since the epoch, "class": "agent", "block": 128, "input": 6607, "local": 0,
         "keys": base64 of 8 bytes for each asked block, "again": true if this pass had asked before}

    A pass that asks again is not another request. Other events and fields mean nothing here.
    """

    name = "cachesvc"
    default_class = "agent"

    @staticmethod
    def recognises(first: Mapping[str, Any]) -> bool:
        return "cachesvc_trace" in first

    @property
    def classes(self) -> frozenset[str] | None:
        return super().classes if self.traffic_class else None

    def _own_block(self, first: Mapping[str, Any]) -> int:
        if first["cachesvc_trace"] != _TRACE_VERSION:
            raise TraceError(
                f"{self.path} has version {first['cachesvc_trace']!r} of our format; only {_TRACE_VERSION} is known"
            )
        for line, row in self._asks():
            try:
                return int(row["block"])
            except _MALFORMED as error:
                raise self._broken(line, error) from error
        return BLOCK_TOKENS

    def requests(self, block: int, spaces: Iterator[int], session_gap: float) -> Iterator[Request]:
        for line, row in self._asks():
            try:
                at, tokens, own = float(row["at"]), int(row["input"]), int(row["block"])
                self._checked(at, tokens, line)
                keys = array("Q", base64.b64decode(row["keys"], validate=True))
                if len(keys) * own > tokens:
                    raise ValueError(f"{len(keys)} full blocks of {own} in {tokens} tokens")
                local = int(row.get("local", 0))
                if not 0 <= local <= tokens:
                    raise ValueError(f"{local} local tokens of {tokens}")
                step = self._step(block, own, line)
                traffic_class = self.traffic_class or row["class"]
                if not CLASS_NAME.fullmatch(traffic_class):
                    raise ValueError(f"class {traffic_class!r}")
                yield Request(at, traffic_class, tokens, keys[step - 1 :: step].tolist(), local)
            except _MALFORMED as error:
                raise self._broken(line, error) from error

    def _asks(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        return ((line, row) for line, row in self._lines() if row.get("event") == "ask" and not row.get("again"))


FORMATS: Final[Sequence[type[Trace]]] = (OwnTrace, MooncakeTrace, AgentTrace)


def open_trace(path: Path, traffic_class: str | None = None) -> Trace:
    """The reader for what the first line looks like. Raises `TraceError` for an empty file or an unknown format."""
    first = next((row for _, row, _ in _read(path)), None)
    if first is None:
        raise TraceError(f"{path} is empty: no requests to replay")
    for reader in FORMATS:
        if reader.recognises(first):
            return reader(path, first, traffic_class)
    known = ", ".join(reader.name for reader in FORMATS)
    raise TraceError(f"{path}: unknown format, its first line has the fields {_names(first)}; known are {known}")


def common_block(traces: Sequence[Trace], block: int | None) -> int:
    """Tokens a block for all traces: `block`, else 128 where that is possible, else their own.

    Raises `TraceError` for sizes that do not go together, `ConfigError` for a `block` that does not go with them.
    """
    own = {trace.block for trace in traces}
    if block is None:
        if all(BLOCK_TOKENS % size == 0 for size in own):
            return BLOCK_TOKENS
        if len(own) > 1:
            sizes = ", ".join(f"{trace.path} {trace.block}" for trace in traces)
            raise TraceError(f"mixed block sizes ({sizes}); give --block a common multiple")
        return own.pop()
    for trace in traces:
        if block % trace.block:
            raise ConfigError(
                f"--block {block} is not a multiple of the {trace.block} tokens that {trace.path} has a block: a finer "
                "block cannot be told from it"
            )
    return block


def merged(traces: Sequence[Trace], block: int, session_gap: float) -> Iterator[Request]:
    """The requests of all traces in order of time; at the same time in the order of the traces. Raises `TraceError`."""
    spaces = (number << ID_BITS for number in count())
    streams = [trace.requests(block, spaces, session_gap) for trace in traces]
    requests = heapq.merge(*streams, key=lambda request: request.at) if len(streams) > 1 else iter(streams[0])
    first = next(requests, None)
    if first is None:
        raise TraceError(f"{', '.join(str(trace.path) for trace in traces)} is empty: no requests to replay")
    yield first
    yield from requests


def events(paths: Sequence[Path]) -> Iterator[tuple[Path, int, Mapping[str, Any]]]:
    """All events of recordings, file after file, and the lines on which they stand. Raises `TraceError`."""
    for path in paths:
        if not isinstance(open_trace(path), OwnTrace):
            raise TraceError(f"{path} is no recording of a daemon: only those say what became of each request")
        yield from ((path, line, row) for line, row, _ in _read(path) if "event" in row)


def _apart(ids: list[int], space: int) -> list[int]:
    array("Q", ids)  # raises what is malformed for ids that are no whole numbers
    if ids and max(ids) >= 1 << ID_BITS:
        raise ValueError(f"ids up to {max(ids)}")
    return list(map(space.__add__, ids)) if space else ids


def _read(path: Path) -> Iterator[tuple[int, Mapping[str, Any], int]]:
    """Number, content and end (bytes in the file) of each line; gzip is seen by its first bytes."""
    number = 0
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
            raw.seek(0)
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
            while line := stream.readline(MAX_TRACE_LINE_BYTES):
                number += 1
                if len(line) == MAX_TRACE_LINE_BYTES:
                    raise TraceError(f"{path} line {number} is longer than {MAX_TRACE_LINE_BYTES} bytes")
                if not line.isspace():
                    yield number, _parsed(path, number, line), raw.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path} is cut off or damaged after line {number}: {error}") from error
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error


def _parsed(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        if number == 1:
            raise TraceError(f"{path}: unknown format, its first line is no JSON or cut off") from error
        how = "is no JSON" if line.endswith(b"\n") else "is cut off; delete it to replay what is before it"
        raise TraceError(f"{path} line {number} {how}") from error
    if not isinstance(row, dict):
        raise TraceError(f"{path}: unknown format, line {number} is no JSON object")
    return row


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(row)[:8]) or "none"
