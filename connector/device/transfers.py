"""Loads, layer by layer, and saves by way of staging: what is enqueued on which stream, and what waits for what.

=======  ==========================================  =============================================================
stream   does                                        waits for
=======  ==========================================  =============================================================
copy     host → staging, whole pieces                the piece that lay in that half of the staging before
load     staging, or host, → pages                   its piece; compute up to the start of the load
compute  the engine's                                the layer it comes to; before pages are used again: their gather
save     pages → staging of a save                   compute up to the save
drain    staging → the arena's slots (`staging`)     its gather
=======  ==========================================  =============================================================

Pages may be freed and used again as soon as a call here has returned: what comes after on the compute stream, or in
a later load, is ordered behind whatever still reads or writes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
import torch

from cachesvc.connector.device.copies import WORTH_A_COPY, Plan, enqueue, plan
from cachesvc.connector.device.device import Device, Event, Stream
from cachesvc.connector.device.windows import Windows
from cachesvc.kernels import BlockKernels, Blocks, PagedPool

STAGE_BYTES: Final = 256 << 20
"""Bytes after which a load says that further layers are there: about five milliseconds of the link."""

LOAD_STAGING_BYTES: Final = 768 << 20
"""Memory of the device for pieces on their way to their pages, in two halves."""

_SHORT_BYTES: Final = 96 << 20
"""Of the staging that is used for a load of one stage."""

LINK_PROGRAMS: Final = 16
"""Multiprocessors at most that a kernel over the link takes from compute."""


Enqueued = Callable[[int, Event], None]
"""Told that the layers before that one are on their way, and when they will have come."""


class Transfers:
    """For one pool. Loads may be enqueued by any thread, one after the other; saves by the engine's."""

    def __init__(
        self,
        pool: PagedPool,
        kernels: BlockKernels,
        device: Device,
        windows: Windows,
        *,
        stage_bytes: int = STAGE_BYTES,
        staging_bytes: int = LOAD_STAGING_BYTES,
    ) -> None:
        """`staging_bytes` must hold two payloads' part of one layer."""
        self.pool = pool
        self.device = device
        self._windows = windows
        self._kernels = kernels
        self._stage_bytes = stage_bytes
        self._copying, self._loading = device.stream(), device.stream()
        self._saving = device.stream()
        self._lock = threading.Lock()
        self._half = staging_bytes // 2
        self._staging = torch.empty(2 * self._half, dtype=torch.uint8, device=device.torch_device)
        self._turn = 0
        self._free: list[Event | None] = [None, None]  # when the halves of the staging may be filled again
        self._latest: Event | None = None

    # ---- loads ---------------------------------------------------------------------------------------------------

    def load(
        self,
        payloads: Sequence[memoryview],
        tables: Sequence[Sequence[int]],
        enqueued: Enqueued = lambda end, event: None,
        *,
        after: Event,
        skip: Sequence[int] = (),
    ) -> Event:
        """Enqueues the way of payloads into pages, which nobody else uses once `after` has come; when all is there.

        `tables`, `skip`: as in `BlockKernels.scatter_blocks`, the tables as plain integers. `enqueued` is called after
        each stage; what it raises ends the load. The payloads must stay what they are until the event that is returned.
        Raises `ValueError`, `CudaError`.
        """
        blocks = self._windows.locate(payloads)
        with self._lock:
            self._loading.wait(after)
            on_device = self._tables(tables, self._loading)
            try:
                if blocks is None:
                    self._load_slowly(payloads, on_device, skip)
                    enqueued(self.pool.layers, self._loading.record())
                else:
                    size = self.pool.payload_bytes
                    even = plan(blocks.offsets, np.arange(len(blocks)) * size, size)
                    for layers in self._stages(blocks, even):
                        enqueued(layers[1], self._load_stage(blocks, even, on_device, skip, layers))
            finally:  # also after an error: something may have been enqueued
                self._latest = self._loading.record()
            return self._latest

    def after_loads(self, stream: Stream) -> None:
        """What is submitted to `stream` from now on happens after all loads that are enqueued."""
        with self._lock:
            if self._latest is not None:
                stream.wait(self._latest)

    def _stages(self, blocks: Blocks, even: Plan) -> list[tuple[int, int]]:
        """Layers [first, end). The first stage is short, and copies of what it takes of a payload are worth it."""
        layers, size = self.pool.layers, self.pool.payload_bytes
        total = len(blocks) * size
        number = total // self._stage_bytes
        if even.copies * WORTH_A_COPY > total // layers:
            number = min(number, size // WORTH_A_COPY)
        each = -(-layers // max(1, min(layers, number)))
        first = 1 if number > 1 and even.copies * WORTH_A_COPY <= total // layers else each
        return list(pairwise(sorted({0, first, *range(each, layers, each), layers})))

    def _load_stage(
        self, blocks: Blocks, even: Plan, tables: list[torch.Tensor], skip: Sequence[int], layers: tuple[int, int]
    ) -> Event:
        spans = self.pool.spans(layers)
        width = sum(size for _, size in spans)
        # The copy engines take one span of a payload at a time; what lies apart in several groups is the kernel's.
        if len(spans) == 1 and width <= self._half:
            place = spans[0][0]
            # What comes last is scattered when the link is idle again: in a load of one stage that part is short.
            step = max(
                1, (min(self._half, _SHORT_BYTES) if layers[1] - layers[0] == self.pool.layers else self._half) // width
            )
            if width * len(blocks) >= WORTH_A_COPY * even.copies:
                for first in range(0, len(blocks), step):
                    self._by_staging(blocks[first : first + step], first, tables, skip, layers, place, width)
                return self._loading.record()
        self._loading.submit(
            partial(
                self._kernels.scatter_blocks,
                blocks,
                self.pool,
                tables,
                skip=skip,
                layers=layers,
                programs=LINK_PROGRAMS,
            )
        )
        return self._loading.record()

    def _by_staging(
        self,
        blocks: Blocks,
        number: int,
        tables: list[torch.Tensor],
        skip: Sequence[int],
        layers: tuple[int, int],
        place: int,
        width: int,
    ) -> None:
        """Blocks from the one of that number on: into one half of the staging, and from there into their pages."""
        half, self._turn = self._turn, 1 - self._turn
        free = self._free[half]
        if free is not None:
            self._copying.wait(free)
        start = half * self._half
        sources = blocks.offsets + blocks.memory.data_ptr() + place
        targets = self._staging.data_ptr() + start + np.arange(len(blocks), dtype=np.int64) * width
        enqueue(self._copying, targets, sources, width, plan(sources, targets, width))
        self._loading.wait(self._copying.record())
        staged = Blocks(self._staging, start + np.arange(len(blocks), dtype=np.int64) * width)
        parts, left_out = [], []
        for index, (group, table) in enumerate(zip(self.pool.groups, tables, strict=True)):
            parts.append(table[number * group.pages : (number + len(blocks)) * group.pages])
            skipped = skip[index] - number * group.pages if skip else 0
            left_out.append(min(max(0, skipped), len(parts[-1])))
        self._loading.submit(
            partial(self._kernels.scatter_blocks, staged, self.pool, parts, skip=left_out, layers=layers, origin=place)
        )
        self._free[half] = self._loading.record()

    def _load_slowly(self, payloads: Sequence[memoryview], on_device: list[torch.Tensor], skip: Sequence[int]) -> None:
        """From memory that the device does not reach, as torch copies from such."""
        size = self.pool.payload_bytes
        packed = torch.empty(size * len(payloads), dtype=torch.uint8)
        for index, payload in enumerate(payloads):
            packed[index * size : (index + 1) * size] = torch.frombuffer(payload, dtype=torch.uint8)

        def work() -> None:
            there = packed.to(self.device.torch_device)
            blocks = Blocks(there, np.arange(len(payloads)) * size)
            self._kernels.scatter_blocks(blocks, self.pool, on_device, skip=skip)

        self._loading.submit(work)

    # ---- saves ---------------------------------------------------------------------------------------------------

    def stage(self, tables: Sequence[Sequence[int]], into: Blocks) -> Event:
        """Enqueues a gather of pages, as compute has them by now, into memory of the device; when that is done.

        Compute goes on behind it: at the speed of the device's memory that is a fraction of a step.
        """
        compute = self.device.current()
        self._saving.wait(compute.record())
        on_device = self._tables(tables, self._saving)
        self._saving.submit(partial(self._kernels.gather_blocks, self.pool, on_device, into))
        done = self._saving.record()
        compute.wait(done)
        return done

    def _tables(self, tables: Sequence[Sequence[int]], stream: Stream) -> list[torch.Tensor]:
        """On the device, for what is submitted to `stream`."""
        host = [torch.from_numpy(np.array(table, dtype=np.int64)) for table in tables]
        if self.device.torch_device.type == "cpu":
            return host
        there: list[torch.Tensor] = []

        def work() -> None:
            there.extend(table.pin_memory().to(self.device.torch_device, non_blocking=True) for table in host)

        stream.submit(work)
        return there
