"""The CUDA runtime's calls that torch does not offer, by ctypes. Each raises `CudaError` with the name of its error."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, Final

import torch

_REGISTER_MAPPED: Final = 2
_KIND_DEFAULT: Final = 4  # which side is the device's follows from the addresses
_ORDER_STREAM: Final = 1


class CudaError(RuntimeError):
    """A call of the CUDA runtime has failed: its name, the error's name, and what that means."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``cudaMemcpyAttributes``."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class Cuda:
    """The runtime that torch has loaded. Raises `CudaError` when there is none."""

    def __init__(self) -> None:
        version = torch.version.cuda
        if version is None:
            raise CudaError("this torch was built without CUDA")
        self._major, minor = (int(part) for part in version.split(".")[:2])
        try:
            self._lib = ctypes.CDLL(f"libcudart.so.{self._major}")
        except OSError as error:
            raise CudaError(f"libcudart.so.{self._major} cannot be loaded: {error}") from error
        self._lib.cudaGetErrorName.restype = self._lib.cudaGetErrorString.restype = ctypes.c_char_p
        self.has_batches = (self._major, minor) >= (12, 8)

    def register(self, address: int, size: int) -> None:
        """Pins host memory and lets the device reach it, at the same address."""
        self._call("cudaHostRegister", ctypes.c_void_p(address), ctypes.c_size_t(size), _REGISTER_MAPPED)
        device = ctypes.c_void_p()
        self._call("cudaHostGetDevicePointer", ctypes.byref(device), ctypes.c_void_p(address), 0)
        if device.value != address:  # the kernels take one address for both sides
            self.unregister(address)
            raise CudaError(f"cudaHostGetDevicePointer: the device reaches {address:#x} at {device.value or 0:#x}")

    def unregister(self, address: int) -> None:
        self._call("cudaHostUnregister", ctypes.c_void_p(address))

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Enqueues one copy."""
        self._call(
            "cudaMemcpyAsync",
            ctypes.c_void_p(target),
            ctypes.c_void_p(source),
            ctypes.c_size_t(size),
            _KIND_DEFAULT,
            ctypes.c_void_p(stream),
        )

    def copy_rows(
        self, target: int, target_step: int, source: int, source_step: int, width: int, rows: int, stream: int
    ) -> None:
        """Enqueues one copy of `rows` rows of `width` bytes that lie so many bytes apart on either side."""
        self._call(
            "cudaMemcpy2DAsync",
            ctypes.c_void_p(target),
            ctypes.c_size_t(target_step),
            ctypes.c_void_p(source),
            ctypes.c_size_t(source_step),
            ctypes.c_size_t(width),
            ctypes.c_size_t(rows),
            _KIND_DEFAULT,
            ctypes.c_void_p(stream),
        )

    def copy_many(self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> None:
        """Enqueues many copies in one call. `stream` must not be the default one."""
        count = len(targets)
        attributes = _Attributes(_ORDER_STREAM, _Location(0, 0), _Location(0, 0), 0)
        first = ctypes.c_size_t(0)
        arguments: list[Any] = [
            (ctypes.c_void_p * count)(*targets),
            (ctypes.c_void_p * count)(*sources),
            (ctypes.c_size_t * count)(*sizes),
            ctypes.c_size_t(count),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
        ]
        if self._major < 13:
            arguments.append(ctypes.byref(ctypes.c_size_t(0)))  # where the index of a failed copy would come
        self._call("cudaMemcpyBatchAsync", *arguments, ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            self._lib.cudaGetLastError()  # so that nobody else takes it for theirs
            raise CudaError(
                f"{name}: {self._lib.cudaGetErrorName(code).decode()}: {self._lib.cudaGetErrorString(code).decode()}"
            )


@functools.cache
def cuda() -> Cuda:
    """The process's runtime. Raises `CudaError`."""
    return Cuda()
