"""Copying payloads, several threads at once, with their checksums computed on the way.

One thread moves about as many bytes as a core can; memory moves more. A checksum costs little while the bytes it is of
are still in the core's cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import xxhash

# Bytes copied before their checksums are computed: half of a core's cache at most.
_PIECE: Final = 512 << 10
# Bytes copied in one call without checksums.
_RUN: Final = 8 << 20
# Below this a second thread costs more than it brings.
_SHARED: Final = 2 << 20

Pair = tuple[memoryview, memoryview]
"""Target and source, of the same size."""


class Copier:
    """Thread-safe. Other threads run meanwhile: nothing here holds the interpreter for longer than a call."""

    def __init__(self, threads: int) -> None:
        """`threads` in all, the caller's own included."""
        self._threads = threads
        self._others: ThreadPoolExecutor | None = None

    def copy(self, pairs: Sequence[Pair], *, checksums: bool, padding: int = 0) -> list[int]:
        """Copies payloads of one size; returns xxh3_64 of each, or nothing without `checksums`.

        `padding`: so many bytes behind each target are not anybody's, and may be overwritten. Payloads that lie one
        behind the other on both sides are then copied together.
        """
        if not pairs:
            return []
        size = pairs[0][1].nbytes
        assert all(target.nbytes == size == source.nbytes for target, source in pairs), "payloads differ in size"
        parts = min(self._threads, len(pairs), max(1, size * len(pairs) // _SHARED))
        step = -(-len(pairs) // parts)
        others: list[Future[list[int]]] = []
        try:
            if parts > 1 and self._others is None:
                self._others = ThreadPoolExecutor(self._threads - 1, "cachesvc-copy")
            for start in range(step, len(pairs), step):
                assert self._others is not None
                others.append(self._others.submit(_copy_part, pairs[start : start + step], size, padding, checksums))
        except RuntimeError:  # no thread can be had: this one does it all, the rest perhaps twice
            step = len(pairs)
        sums = _copy_part(pairs[:step], size, padding, checksums)
        theirs = [other.result() for other in others]
        return sums if step == len(pairs) else sums + [total for part in theirs for total in part]

    def close(self) -> None:
        """Ends the other threads; a copy under way is finished."""
        if self._others is not None:
            self._others.shutdown(wait=False)


def _copy_part(pairs: Sequence[Pair], size: int, padding: int, checksums: bool) -> list[int]:
    if checksums and size > _PIECE:
        return [_copy_by_pieces(target, source) for target, source in pairs]
    targets = [_address(target) for target, _ in pairs]
    sources = [_address(source) for _, source in pairs]
    sums: list[int] = []
    longest = max(1, (_PIECE if checksums else _RUN) // size)
    first = 0
    while first < len(pairs):
        end = first + 1
        # Payloads that lie alike on both sides go in one call, with what is between them.
        while (
            end < len(pairs)
            and end - first < longest
            and 0 <= targets[end] - targets[end - 1] - size <= padding
            and sources[end] - sources[end - 1] == targets[end] - targets[end - 1]
        ):
            end += 1
        ctypes.memmove(targets[first], sources[first], targets[end - 1] - targets[first] + size)
        if checksums:
            sums += [xxhash.xxh3_64_intdigest(source) for _, source in pairs[first:end]]
        first = end
    return sums


def _copy_by_pieces(target: memoryview, source: memoryview) -> int:
    into, out_of = _address(target), _address(source)
    total = xxhash.xxh3_64()
    for start in range(0, source.nbytes, _PIECE):
        end = min(start + _PIECE, source.nbytes)
        ctypes.memmove(into + start, out_of + start, end - start)
        total.update(source[start:end])
    return total.intdigest()


class _Buffer(ctypes.Structure):
    """``Py_buffer``: the only way to the address of a read-only buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get: Final[Any] = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release: Final[Any] = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_Buffer),)
_release.restype = None


def _address(view: memoryview) -> int:
    """Where a buffer's bytes lie. The caller keeps `view` alive as long as the address is used."""
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    buffer = _Buffer()
    _get(view, ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf)
    finally:
        _release(ctypes.byref(buffer))
