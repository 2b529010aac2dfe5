"""Loads in threads. An engine begins to compute when all copies are enqueued, and waits for each layer on the device.

What it computes then is void if the load turns out to have failed: `DeviceLoad.result` says so, before any token is
shown to anybody or any block saved.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from cachesvc.connector.base import BasePrefixCache
from cachesvc.connector.device.device import Event, Stream
from cachesvc.connector.device.transfers import Transfers
from cachesvc.connector.passes import Pass
from cachesvc.connector.workers import Workers

logger = logging.getLogger("cachesvc.connector")

MAX_WAITING: Final = 4096
"""Loads that wait for a thread; past it a load fails at once, and is computed."""

Tables = Callable[[int, int], Sequence[Sequence[int]]]
"""The pages of so many blocks from the block of that index on, for each group of the pool."""


class _Abandoned(Exception):
    """The engine does not want the load any more."""


class DeviceLoad:
    """One load under way. Its public methods are for the engine's thread."""

    def __init__(self, transfers: Transfers, goal_blocks: int) -> None:
        self._transfers = transfers
        self._goal = goal_blocks
        self._changed = threading.Condition()
        self._enqueuing = threading.Lock()
        self._abandoned = False
        self._last_batch = False  # what is enqueued now completes the hit
        self._stages: list[tuple[int, Event]] = []  # of the batch under way: up to which layer, and when
        self._loaded: int | None = None

    @property
    def ended(self) -> bool:
        return self._loaded is not None

    @property
    def can_start(self) -> bool:
        """Whether computing may begin: the last blocks are on their way, or the load has ended."""
        return self.ended or (self._last_batch and bool(self._stages))

    def wait_start(self, timeout_s: float) -> bool:
        """`can_start`, after waiting so long for it."""
        with self._changed:
            return self._changed.wait_for(lambda: self.can_start, timeout_s)

    def wait_layer(self, stream: Stream, layer: int) -> None:
        """What is submitted to `stream` from now on happens after this layer's KV has come.

        Only if that is not even enqueued yet does the caller wait: a load enqueues faster than a device computes.
        """

        def of_layer() -> Event | None:
            return next((event for end, event in self._stages if layer < end), None)

        with self._changed:
            self._changed.wait_for(lambda: self.ended or of_layer() is not None)
            event = of_layer()
        if event is not None:
            stream.wait(event)

    def result(self, compute: Stream) -> int:
        """Tokens of the prefix that are there and were good all the while. Waits for the load to end.

        The pages behind may be used again by what is submitted to `compute` from now on.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.ended)
        self._transfers.after_loads(compute)
        assert self._loaded is not None, "waited for"
        return self._loaded

    def abandon(self, compute: Stream) -> None:
        """Nothing more is enqueued; pages may be used again by what is submitted to `compute` from now on."""
        self._abandoned = True
        with self._enqueuing:  # it stops at the next stage
            self._transfers.after_loads(compute)

    # For the loading thread

    def scatter(
        self, first: int, payloads: Sequence[memoryview], tables: Tables, after: Event, skip: Sequence[int]
    ) -> None:
        def enqueued(end: int, event: Event) -> None:
            with self._changed:
                self._stages.append((end, event))
                self._changed.notify_all()
            if self._abandoned:
                raise _Abandoned

        with self._enqueuing:
            if self._abandoned:
                raise _Abandoned
            with self._changed:
                self._stages.clear()
                self._last_batch = first + len(payloads) >= self._goal
            last = self._transfers.load(payloads, tables(first, len(payloads)), enqueued, after=after, skip=skip)
        last.synchronize()  # the payloads must stay what they are until then

    def end(self, loaded: int) -> None:
        with self._changed:
            self._loaded = loaded
            self._changed.notify_all()


class DeviceLoads:
    """Starts loads; `threads` run at a time."""

    def __init__(self, transfers: Transfers, *, threads: int = 2) -> None:
        self._transfers = transfers
        self._workers = Workers("cachesvc-device-load", threads=threads, limit=MAX_WAITING)

    def start(
        self,
        cache: BasePrefixCache,
        p: Pass,
        tables: Tables,
        *,
        hit_blocks: int,
        after: Event,
        skip: Sequence[int] = (),
    ) -> DeviceLoad:
        """Begins `cache.load` of a pass with a hit. Its pages are nobody else's once `after` has come.

        `skip`: pages of the first block loaded, for each group, that the engine has already.
        """
        load = DeviceLoad(self._transfers, hit_blocks)
        first_block: list[int] = []

        def scatter(first: int, payloads: Sequence[memoryview]) -> None:
            left_out = skip if not first_block else ()
            first_block.append(first)
            load.scatter(first, payloads, tables, after, left_out)

        def run() -> None:
            loaded = 0
            try:
                loaded = cache.load(p, scatter)
            except _Abandoned:
                pass
            except Exception:  # the engine computes what could not be loaded
                logger.exception("a load failed")
            finally:
                load.end(loaded)

        if not self._workers.submit(run):
            load.end(0)
        return load

    def close(self, timeout_s: float) -> None:
        """Waits so long for loads under way to end."""
        self._workers.close(timeout_s)
