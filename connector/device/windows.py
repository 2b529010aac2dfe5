"""Which host memory the device reaches: mappings of the arena, each registered once."""

from __future__ import annotations

import logging
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import torch

from cachesvc.connector.device.cuda import CudaError
from cachesvc.connector.device.device import Device
from cachesvc.connector.payloads import Payloads, Region
from cachesvc.kernels import Blocks

logger = logging.getLogger("cachesvc.connector")

MAX_WINDOWS: Final = 2
"""Arenas registered at a time: the daemon's, and that of the boot before. An older one is let go."""


class Windows:
    """Thread-safe. What cannot be registered is remembered, and said once: its payloads are copied the slow way."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._known: OrderedDict[int, tuple[Region, torch.Tensor | None]] = OrderedDict()

    def locate(self, payloads: Sequence[memoryview]) -> Blocks | None:
        """Where the device finds these payloads; None when they lie in memory that it does not reach.

        The first call for an arena registers it, which takes about 50 ms for each GiB.
        """
        if not isinstance(payloads, Payloads):
            return None
        region = payloads.region.writable
        memory = None if region is None else self._memory(region)
        return None if memory is None else Blocks(memory, payloads.offsets)

    def close(self) -> None:
        """Nothing may be under way any more."""
        with self._lock:
            while self._known:
                self._forget()

    def _memory(self, region: Region) -> torch.Tensor | None:
        with self._lock:
            if id(region) not in self._known:
                self._known[id(region)] = (region, self._register(region))
                while len(self._known) > MAX_WINDOWS:
                    self._forget()
            return self._known[id(region)][1]

    def _register(self, region: Region) -> torch.Tensor | None:
        try:
            self._device.register(region.address, len(region.memory))
        except CudaError as error:
            logger.error("%d bytes of the arena are copied by way of other memory: %s", len(region.memory), error)
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.frombuffer(region.memory, dtype=torch.uint8)

    def _forget(self) -> None:
        """The oldest. CUDA itself waits for what the device still does with it."""
        region, memory = self._known.popitem(last=False)[1]
        if memory is not None:
            try:
                self._device.unregister(region.address)
            except CudaError as error:
                logger.error("an arena that is not used any more stays pinned: %s", error)
