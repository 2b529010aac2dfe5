"""Streams, events and copies: what the pipeline needs of a device. CUDA's here; tests have one on the CPU.

What is submitted to a stream happens in order, some time after the call. Between streams only events order anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from cachesvc.connector.device.cuda import Cuda, CudaError, cuda

_torch: Any = torch.cuda  # parts of it have no annotations


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Waits until the device has come there, without holding the interpreter. Raises `CudaError`."""
        ...


class Stream(Protocol):
    def submit(self, work: Callable[[], None]) -> None:
        """Enqueues what `work` does on the device. Raises what `work` raises while it is enqueued."""
        ...

    def wait(self, event: Event) -> None:
        """What is submitted from now on happens after `event`."""
        ...

    def record(self) -> Event:
        """The end of what has been submitted so far."""
        ...

    def copy_rows(self, target: int, source: int, step_to: int, step_from: int, width: int, rows: int) -> None:
        """Enqueues a copy of `rows` rows of `width` bytes, which lie so many bytes apart on either side."""
        ...

    def copy_many(self, targets: Sequence[int], sources: Sequence[int], size: int) -> None:
        """Enqueues copies of `size` bytes each."""
        ...


class Device(Protocol):
    torch_device: torch.device

    def stream(self) -> Stream:
        """A new one, which waits for no other by itself."""
        ...

    def current(self) -> Stream:
        """The stream on which the calling thread computes."""
        ...

    def register(self, address: int, size: int) -> None:
        """Lets the device reach host memory, at the same address. Raises `CudaError`."""
        ...

    def unregister(self, address: int) -> None:
        """Raises `CudaError`."""
        ...


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def synchronize(self) -> None:
        try:
            self.event.synchronize()
        except RuntimeError as error:
            raise CudaError(f"cudaEventSynchronize: {str(error).splitlines()[0]}") from error


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream, runtime: Cuda) -> None:
        self._stream = stream
        self._cuda = runtime

    def submit(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent), "an event of another device"
        self._stream.wait_event(event.event)

    def record(self) -> Event:
        # A thread that waits for it sleeps: spinning would take the processor from the engine's thread.
        event = _torch.Event(blocking=True)
        event.record(self._stream)
        return CudaEvent(event)

    def copy_rows(self, target: int, source: int, step_to: int, step_from: int, width: int, rows: int) -> None:
        self._cuda.copy_rows(target, step_to, source, step_from, width, rows, self._stream.cuda_stream)

    def copy_many(self, targets: Sequence[int], sources: Sequence[int], size: int) -> None:
        if self._cuda.has_batches:
            self._cuda.copy_many(targets, sources, [size] * len(targets), self._stream.cuda_stream)
            return
        for target, source in zip(targets, sources, strict=True):
            self._cuda.copy(target, source, size, self._stream.cuda_stream)


class CudaDevice:
    """The CUDA device that is current when this is made. Raises `CudaError` when there is none."""

    def __init__(self) -> None:
        self._cuda = cuda()
        if not torch.cuda.is_available():
            raise CudaError("there is no CUDA device that torch can use")
        _torch.init()
        self.torch_device = torch.device("cuda", torch.cuda.current_device())

    def stream(self) -> Stream:
        # Of high priority: its kernels are short, and somebody waits for each of them.
        made: Any = _torch.Stream(self.torch_device, priority=-1)
        return CudaStream(made, self._cuda)

    def current(self) -> Stream:
        return CudaStream(torch.cuda.current_stream(self.torch_device), self._cuda)

    def register(self, address: int, size: int) -> None:
        with torch.cuda.device(self.torch_device):
            self._cuda.register(address, size)

    def unregister(self, address: int) -> None:
        self._cuda.unregister(address)
