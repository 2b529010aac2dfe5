"""A device on the CPU whose streams fall behind at random, as far as events allow it."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from cachesvc.connector.device.cuda import CudaError


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.done = False

    def synchronize(self) -> None:
        self._device.run_until(lambda: self.done)


class FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.queue: deque[Callable[[], bool]] = deque()

    def submit(self, work: Callable[[], None]) -> None:
        def step() -> bool:
            work()
            return True

        self._add(step)

    def wait(self, event: FakeEvent) -> None:
        self._add(lambda: event.done)

    def record(self) -> FakeEvent:
        event = FakeEvent(self._device)

        def step() -> bool:
            event.done = True
            return True

        self._add(step)
        return event

    def copy_rows(self, target: int, source: int, step_to: int, step_from: int, width: int, rows: int) -> None:
        assert min(step_to, step_from) >= width
        for row in range(rows):  # one by one: another stream may come between
            self._copy(target + row * step_to, source + row * step_from, width)

    def copy_many(self, targets: Sequence[int], sources: Sequence[int], size: int) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._copy(target, source, size)

    def _copy(self, target: int, source: int, size: int) -> None:
        self._device.check(source, target)
        self.submit(lambda: ctypes.memmove(target, source, size) and None)

    def _add(self, step: Callable[[], bool]) -> None:
        with self._device.lock:
            self.queue.append(step)


class PromptStream(FakeStream):
    """Of a model that computes on the calling thread: nothing on it is still to be done when a call returns."""

    def _add(self, step: Callable[[], bool]) -> None:
        super()._add(step)
        self._device.run_until(lambda: not self.queue)


class FakeDevice:
    """Work is done by whoever synchronizes, or by `idle`, in an order that `seed` chooses."""

    def __init__(self, seed: int = 0, *, computes_at_once: bool = False) -> None:
        self.torch_device = torch.device("cpu")
        self.lock = threading.RLock()
        self.registered: dict[int, int] = {}
        self.refuse_to_register = False
        self._random = random.Random(seed)
        self._streams: list[FakeStream] = []
        self.compute = self.stream()
        if computes_at_once:
            self.compute = self._streams[0] = PromptStream(self)

    def stream(self) -> FakeStream:
        with self.lock:
            self._streams.append(FakeStream(self))
            return self._streams[-1]

    def current(self) -> FakeStream:
        return self.compute

    def register(self, address: int, size: int) -> None:
        if self.refuse_to_register:
            raise CudaError("cudaHostRegister: cudaErrorMemoryAllocation: out of memory")
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def check(self, *addresses: int) -> None:
        """One side of a copy lies in registered memory."""
        inside = [start <= one < start + size for one in addresses for start, size in self.registered.items()]
        assert any(inside), "a copy between memories that are not registered"

    def idle(self, steps: int) -> None:
        """Does up to `steps` pieces of work."""
        for _ in range(steps):
            if not self._step():
                return

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert self._step() or done(), "streams wait for each other"

    def finish(self) -> None:
        self.run_until(lambda: not any(stream.queue for stream in self._streams))

    def _step(self) -> bool:
        with self.lock:
            streams = [stream for stream in self._streams if stream.queue]
            self._random.shuffle(streams)
            for stream in streams:
                if stream.queue[0]():
                    stream.queue.popleft()
                    return True
            return False
