"""The save queue's buffers in the device's memory, and how they get into the arena.

They take the place of the connector's buffers in host memory: an engine's `gather` fills them on the device, so that
its pages are free at once, and the thread that saves copies them straight into the slots that the daemon has granted.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, overload

import numpy as np
import torch

from cachesvc.connector.copying import Copier
from cachesvc.connector.device.copies import WORTH_A_COPY, enqueue, plan
from cachesvc.connector.device.device import Device, Event, Stream
from cachesvc.connector.device.transfers import Transfers
from cachesvc.connector.device.windows import Windows
from cachesvc.connector.payloads import SLOT_PAGE, Pieces
from cachesvc.kernels import BlockKernels, Blocks, PagedPool, PageGroup, kernels_for

_HOST_THREADS: Final = 2

SAVE_PROGRAMS: Final = 8
"""Multiprocessors at most that a kernel takes from compute where slots lie too far apart for copies."""


class DevicePayloads(Sequence[memoryview]):
    """Buffers of `DeviceSlots`, to be filled by `Transfers.stage`.

    As a sequence it yields copies in host memory: for a daemon to which payloads have to be sent.
    """

    def __init__(self, slots: DeviceSlots, numbers: Any) -> None:
        self.slots = slots
        self.numbers = np.asarray(numbers, dtype=np.int64)
        self.blocks = Blocks(slots.memory, self.numbers * slots.stride)

    def filled(self, ready: Event) -> None:
        """Says when they are: to be called by `gather`."""
        self.slots.ready[self.numbers] = ready

    @property
    def payload_bytes(self) -> int:
        return self.slots.payload_bytes

    def pick(self, indices: Sequence[int]) -> DevicePayloads:
        return DevicePayloads(self.slots, self.numbers[list(indices)])

    @property
    def ready(self) -> Event:
        """The latest point at which one of them is filled. Raises `ValueError` when somebody did not fill them."""
        events = set(self.slots.ready[self.numbers].tolist())
        if None in events:
            raise ValueError(f"some of {len(self)} buffers were never filled")
        last: Event = events.pop()
        for event in events:
            event.synchronize()
        return last

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[memoryview]:
        return (self[index] for index in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> DevicePayloads: ...
    def __getitem__(self, index: int | slice) -> memoryview | DevicePayloads:
        if isinstance(index, slice):
            return DevicePayloads(self.slots, self.numbers[index])
        self.ready.synchronize()
        start = int(self.blocks.offsets[index])
        payload: Any = self.slots.memory[start : start + self.slots.payload_bytes].cpu().numpy()
        return memoryview(payload)


class DeviceSlots:
    """`count` buffers of `payload_bytes` in one piece of the device's memory, as far apart as slots of the arena."""

    def __init__(self, payload_bytes: int, count: int, device: torch.device) -> None:
        self.payload_bytes = payload_bytes
        self.count = count
        self.stride = -(-payload_bytes // SLOT_PAGE) * SLOT_PAGE
        self.memory = torch.empty(max(1, self.stride * count), dtype=torch.uint8, device=device)
        self.ready = np.full(count, None, dtype=object)  # an `Event` for each
        self._lock = threading.Lock()
        self._free = list(range(count))  # a heap: neighbours are given out together, and copied together

    def views(self, slots: Sequence[int]) -> DevicePayloads:
        return DevicePayloads(self, slots)

    def take(self, wanted: int) -> list[int]:
        """Up to `wanted` free buffers, perhaps none. The caller owns them until `give`."""
        with self._lock:
            return [heapq.heappop(self._free) for _ in range(min(wanted, len(self._free)))]

    def give(self, slots: list[int]) -> None:
        with self._lock:
            self.ready[slots] = None
            for slot in slots:
                heapq.heappush(self._free, slot)
            assert len(self._free) <= self.count, "a buffer was given back twice"

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return (self.count - len(self._free)) * self.payload_bytes


class DeviceStaging:
    """What a `PrefixCache` saves by way of, instead of memory of the host."""

    threads = 2
    """So that the link is busy while one of them reserves slots, commits, or is woken up."""

    def __init__(self, device: Device, kernels: BlockKernels | None = None) -> None:
        """`kernels`: by default the fastest for the device."""
        self.device = device
        self._kernels = kernels or kernels_for(device.torch_device)
        self.windows = Windows(device)
        self._draining = threading.local()
        self._host = Copier(_HOST_THREADS)

    def transfers(self, pool: PagedPool) -> Transfers:
        """Of an engine's KV, into and out of the same arena."""
        return Transfers(pool, self._kernels, self.device, self.windows)

    def slots(self, payload_bytes: int, count: int) -> DeviceSlots:
        """Raises `OSError` when the device has no memory for them."""
        try:
            return DeviceSlots(payload_bytes, count, self.device.torch_device)
        except RuntimeError as error:  # torch's OutOfMemoryError is one
            raise OSError(str(error).splitlines()[0]) from error

    def copy(
        self,
        targets: Sequence[memoryview],
        sources: Sequence[memoryview] | Sequence[Pieces],
        *,
        checksums: bool,
        padding: int = 0,
    ) -> list[int]:
        """Copies payloads into slots of the arena and waits for it. No checksums: the daemon computes them.

        Payloads in memory of the host, which checkpoints and `store_now` have, are copied as without a device.
        Raises `CudaError`, after which nothing more is written to the targets.
        """
        if not len(sources):
            return []
        if not isinstance(sources, DevicePayloads):
            return self._host.copy(targets, sources, checksums=checksums, padding=padding)
        into, staged = self.windows.locate(targets), sources.blocks
        if into is None:
            for target, source in zip(targets, sources, strict=True):
                target[:] = source
            return []
        size = sources.slots.payload_bytes
        out_of, to = staged.offsets + staged.memory.data_ptr(), into.offsets + into.memory.data_ptr()
        planned = plan(to, out_of, size)
        stream = self._stream()
        try:
            stream.wait(sources.ready)
            if size * len(staged) >= WORTH_A_COPY * planned.copies:
                enqueue(stream, to, out_of, size, planned)
            else:
                stream.submit(partial(self._by_kernel, sources, into))
        finally:  # also after an error: afterwards the slots may be somebody else's
            stream.record().synchronize()
        return []

    def _stream(self) -> Stream:
        """This thread's own."""
        if not hasattr(self._draining, "stream"):
            self._draining.stream = self.device.stream()
        stream: Stream = self._draining.stream
        return stream

    def _by_kernel(self, sources: DevicePayloads, into: Blocks) -> None:
        """The buffers are pages of a pool of one region then."""
        slots = sources.slots
        rows = slots.memory.view(slots.count, slots.stride)[:, : slots.payload_bytes]
        table = torch.from_numpy(sources.numbers)
        if self.device.torch_device.type != "cpu":
            table = table.pin_memory().to(self.device.torch_device, non_blocking=True)
        pool = PagedPool((PageGroup((rows,), pages=1, layers=1),))
        self._kernels.gather_blocks(pool, [table], into, programs=SAVE_PROGRAMS)

    def close(self) -> None:
        """Nothing may be under way any more."""
        self._host.close()
        self.windows.close()
