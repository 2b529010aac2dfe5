"""Payloads of one size, as memory that is read or written: many views of one mapping, and the addresses behind them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol, overload, runtime_checkable

SLOT_PAGE: Final = 4096
"""Slots begin on, and are padded to, multiples of this many bytes (``cache.proto``), whatever pages the system has."""


class Region:
    """A mapping and its address. The address is good as long as the region lives.

    `writable`: the same memory, mapped to be written to, which is what a device registers; None if there is no such
    mapping, or the memory is not worth to be registered.
    """

    def __init__(self, memory: memoryview, writable: Region | None = None) -> None:
        self.memory = memory
        self.address = address_of(memory)
        self.writable = writable


class Payloads(Sequence[memoryview]):
    """`payload_bytes` at each of `offsets` into a region. Views are made when they are asked for.

    An engine may use them one by one as any sequence of buffers; whoever copies or registers many at once takes
    `addresses`. Raises `ValueError` when one does not lie in the region.
    """

    def __init__(self, region: Region, offsets: Sequence[int], payload_bytes: int) -> None:
        if offsets and not 0 <= min(offsets) <= max(offsets) <= len(region.memory) - payload_bytes:
            raise ValueError(
                f"payloads of {payload_bytes} bytes from {min(offsets)} to {max(offsets)} do not lie in "
                f"{len(region.memory)} bytes"
            )
        self.payload_bytes = payload_bytes
        self.region = region
        self.offsets = offsets

    @property
    def addresses(self) -> list[int]:
        base = self.region.address
        return [base + offset for offset in self.offsets]

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[memoryview]:
        memory, size = self.region.memory, self.payload_bytes
        return (memory[offset : offset + size] for offset in self.offsets)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> Payloads: ...
    def __getitem__(self, index: int | slice) -> memoryview | Payloads:
        if isinstance(index, slice):
            return Payloads(self.region, self.offsets[index], self.payload_bytes)
        offset = self.offsets[index]
        return self.region.memory[offset : offset + self.payload_bytes]


@runtime_checkable
class Elsewhere(Protocol):
    """Payloads in memory of a device, of which some can be chosen without bringing them to the host."""

    @property
    def payload_bytes(self) -> int: ...
    def pick(self, indices: Sequence[int]) -> Sequence[memoryview]: ...


class Pieces:
    """One payload that lies in several places of the caller's memory, one behind the other: ``(address, bytes)`` each.

    The caller keeps that memory alive, and as it is, as long as this is used.
    """

    def __init__(self, pieces: Sequence[tuple[int, int]]) -> None:
        self.pieces = pieces
        self.nbytes = sum(size for _, size in pieces)

    def copy_to(self, address: int) -> None:
        """Into `nbytes` of memory from `address` on."""
        for source, size in self.pieces:
            ctypes.memmove(address, source, size)
            address += size

    def fill_from(self, address: int) -> None:
        """Out of `nbytes` of memory from `address` on."""
        for target, size in self.pieces:
            ctypes.memmove(target, address, size)
            address += size

    def joined(self) -> memoryview:
        """A copy in one place."""
        whole = (ctypes.c_char * self.nbytes)()
        self.copy_to(ctypes.addressof(whole))
        return memoryview(whole).cast("B")


def addresses_of(payloads: Sequence[memoryview]) -> list[int]:
    """Where payloads lie. The caller keeps them alive as long as the addresses are used."""
    return payloads.addresses if isinstance(payloads, Payloads) else [address_of(payload) for payload in payloads]


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


def address_of(view: memoryview) -> int:
    """Where a buffer's bytes lie. The caller keeps `view` alive as long as the address is used."""
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    buffer = _Buffer()
    _get(view, ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf)
    finally:
        _release(ctypes.byref(buffer))
