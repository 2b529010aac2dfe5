"""Copying payloads, several threads at once, with their checksums computed on the way.

One thread moves about as many bytes as a core can; memory moves more. A checksum costs little while the bytes it is of
are still in the core's cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import xxhash

# Bytes copied before their checksum is computed: half of a core's cache at most.
_PIECE: Final = 256 << 10
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

    def copy(self, pairs: Sequence[Pair], *, checksums: bool) -> list[int]:
        """Copies; returns xxh3_64 of each payload, or zeros without `checksums`."""
        total = sum(source.nbytes for _, source in pairs)
        parts = min(self._threads, len(pairs), max(1, total // _SHARED))
        if parts < 2:
            return _copy_all(pairs, checksums)
        if self._others is None:
            self._others = ThreadPoolExecutor(self._threads - 1, "cachesvc-copy")
        step = -(-len(pairs) // parts)
        try:
            others = [
                self._others.submit(_copy_all, pairs[start : start + step], checksums)
                for start in range(step, len(pairs), step)
            ]
        except RuntimeError:  # no thread can be had, or the interpreter ends
            return _copy_all(pairs, checksums)
        sums = _copy_all(pairs[:step], checksums)
        for other in others:
            sums += other.result()
        return sums

    def close(self) -> None:
        """Ends the other threads; a copy under way is finished."""
        if self._others is not None:
            self._others.shutdown(wait=False)


def _copy_all(pairs: Sequence[Pair], checksums: bool) -> list[int]:
    return [_copy(target, source, checksums) for target, source in pairs]


def _copy(target: memoryview, source: memoryview, checksum: bool) -> int:
    size = source.nbytes
    assert target.nbytes == size, f"{size} bytes do not fill {target.nbytes}"
    into, out_of = _address(target), _address(source)
    if not checksum:
        ctypes.memmove(into, out_of, size)
        return 0
    if size <= _PIECE:
        ctypes.memmove(into, out_of, size)
        return xxhash.xxh3_64_intdigest(source)
    total = xxhash.xxh3_64()
    for start in range(0, size, _PIECE):
        end = min(start + _PIECE, size)
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
