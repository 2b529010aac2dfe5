"""Copying payloads, several threads at once, with their checksums computed on the way.

One thread moves about as many bytes as a core can; memory moves more. A checksum costs little while the bytes it is of
are still in the core's cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, Protocol, cast

import xxhash

from cachesvc.connector.payloads import Pieces, addresses_of

# Bytes copied before their checksums are computed: half of a core's cache at most.
_PIECE: Final = 512 << 10
# Bytes copied in one call without checksums.
_RUN: Final = 8 << 20
# Below this a second thread costs more than it brings.
_SHARED: Final = 2 << 20


class PayloadCopier(Protocol):
    """`Copier`, or a device's way from its own memory."""

    def copy(
        self,
        targets: Sequence[memoryview],
        sources: Sequence[memoryview] | Sequence[Pieces],
        *,
        checksums: bool,
        padding: int = 0,
    ) -> list[int]: ...
    def close(self) -> None: ...


class Copier:
    """Thread-safe. Other threads run meanwhile: nothing here holds the interpreter for longer than a call."""

    def __init__(self, threads: int) -> None:
        """`threads` in all, the caller's own included."""
        self._threads = threads
        self._others: ThreadPoolExecutor | None = None

    def copy(
        self,
        targets: Sequence[memoryview],
        sources: Sequence[memoryview] | Sequence[Pieces],
        *,
        checksums: bool,
        padding: int = 0,
    ) -> list[int]:
        """Copies payloads of one size; returns xxh3_64 of each, or nothing without `checksums`.

        `padding`: so many bytes behind each target are not anybody's, and may be overwritten. Payloads that lie one
        behind the other on both sides are then copied together.
        """
        count = len(sources)
        if not count:
            return []
        size = sources[0].nbytes
        assert len(targets) == count and targets[0].nbytes == size, "targets and sources differ"
        parts = min(self._threads, count, max(1, size * count // _SHARED))
        step = -(-count // parts)
        others: list[Future[list[int]]] = []
        try:
            if parts > 1 and self._others is None:
                self._others = ThreadPoolExecutor(self._threads - 1, "cachesvc-copy")
            for start in range(step, count, step):
                part = slice(start, start + step)
                assert self._others is not None
                others.append(self._others.submit(_copy_part, targets[part], sources[part], padding, checksums))
        except RuntimeError:  # no thread can be had: this one does it all, a part perhaps twice
            step = count
        try:
            sums = _copy_part(targets[:step], sources[:step], padding, checksums)
        finally:
            wait(others)  # whatever happens here: nobody writes to the targets any more when this returns
        theirs = [other.result() for other in others]
        return sums if step == count else sums + [total for part in theirs for total in part]

    def close(self) -> None:
        """Ends the other threads; a copy under way is finished."""
        if self._others is not None:
            self._others.shutdown(wait=False)


def _copy_part(
    targets: Sequence[memoryview], sources: Sequence[memoryview] | Sequence[Pieces], padding: int, checksums: bool
) -> list[int]:
    if isinstance(sources[0], Pieces):
        return _copy_pieces(targets, cast("Sequence[Pieces]", sources), checksums)
    return _copy_whole(targets, cast("Sequence[memoryview]", sources), padding, checksums)


def _copy_pieces(targets: Sequence[memoryview], sources: Sequence[Pieces], checksums: bool) -> list[int]:
    """The checksum is of what has arrived, which is what the source held: nobody else writes to the target."""
    sums: list[int] = []
    for target, into, source in zip(targets, addresses_of(targets), sources, strict=True):
        source.copy_to(into)
        if checksums:
            sums.append(xxhash.xxh3_64_intdigest(target))
    return sums


def _copy_whole(
    targets: Sequence[memoryview], sources: Sequence[memoryview], padding: int, checksums: bool
) -> list[int]:
    size = sources[0].nbytes
    into, out_of = addresses_of(targets), addresses_of(sources)
    if checksums and size > _PIECE:
        return [_copy_by_pieces(to, source, at) for to, source, at in zip(into, sources, out_of, strict=True)]
    sums: list[int] = []
    longest = max(1, (_PIECE if checksums else _RUN) // size)
    first = 0
    while first < len(into):
        end = first + 1
        # Payloads that lie alike on both sides go in one call, with what is between them.
        while (
            end < len(into)
            and end - first < longest
            and 0 <= (step := into[end] - into[end - 1]) - size <= padding
            and out_of[end] - out_of[end - 1] == step
        ):
            end += 1
        ctypes.memmove(into[first], out_of[first], into[end - 1] - into[first] + size)
        if checksums:
            sums += map(xxhash.xxh3_64_intdigest, sources[first:end])
        first = end
    return sums


def _copy_by_pieces(into: int, source: memoryview, out_of: int) -> int:
    total = xxhash.xxh3_64()
    for start in range(0, source.nbytes, _PIECE):
        end = min(start + _PIECE, source.nbytes)
        ctypes.memmove(into + start, out_of + start, end - start)
        total.update(source[start:end])
    return total.intdigest()
