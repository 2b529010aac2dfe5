"""Saving: blocks are copied out of the engine at once, and one background thread brings them to the daemon.

The engine waits for its own copy only, never for the network. What does not fit into the queue is not taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from cachesvc.connector.buffers import Slots
from cachesvc.connector.client import Attachment, Client
from cachesvc.connector.copying import Copier, PayloadCopier
from cachesvc.connector.errors import BadAnswer, CacheError
from cachesvc.connector.link import Link
from cachesvc.connector.memory import FailedKeys, KnownKeys
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.stats import Counters
from cachesvc.connector.workers import Workers
from cachesvc.rpc import cache_pb2 as pb

logger = logging.getLogger("cachesvc.connector")

MAX_WAITING_BATCHES = 65_536
"""Far more than the queue's bytes allow for any real payload; a bound all the same."""


@dataclass(frozen=True)
class Batch:
    """Blocks of one prefix in order, each in its slot, to be stored under one write lease."""

    keys: Sequence[bytes]
    slots: list[int]
    traffic_class: str


class SaveSlots(Protocol):
    """Buffers of the save queue, handed out by number: `Slots`, or a device's."""

    def views(self, slots: Sequence[int]) -> Sequence[memoryview]: ...
    def take(self, wanted: int) -> list[int]: ...
    def give(self, slots: list[int]) -> None: ...
    @property
    def used_bytes(self) -> int: ...


class Staging(PayloadCopier, Protocol):
    """Where the save queue lies, and how it is copied into the arena, by how many threads that save."""

    threads: int

    def slots(self, payload_bytes: int, count: int) -> SaveSlots:
        """Raises `OSError`."""
        ...


class HostStaging(Copier):
    """In memory of the host."""

    threads = 1

    def slots(self, payload_bytes: int, count: int) -> SaveSlots:
        return Slots(payload_bytes, count)


class Saver:
    """The bounded save queue and its thread."""

    def __init__(
        self,
        client: Client,
        link: Link,
        known: KnownKeys,
        failed: FailedKeys,
        counters: Counters,
        options: CacheOptions,
        payload_bytes: int,
        on_stored: Callable[[Sequence[bytes]], None],
        staging: Staging,
    ) -> None:
        """`on_stored` is told, on the worker thread, which keys are stored now."""
        self._staging = staging
        self._on_stored = on_stored
        self._client = client
        self._link = link
        self._known = known
        self._failed = failed
        self._counters = counters
        self._options = options
        self._payload_bytes = payload_bytes
        self._batch_blocks = max(1, options.save_batch_bytes // payload_bytes)
        self._slots: SaveSlots | None = None
        self._making = threading.Lock()
        self._paused_until = 0.0
        self._worker = Workers("cachesvc-save", threads=staging.threads, limit=MAX_WAITING_BATCHES)

    @property
    def queued_bytes(self) -> int:
        return self._slots.used_bytes if self._slots else 0

    def take(
        self,
        keys: Sequence[bytes],
        fill: Callable[[Sequence[memoryview]], None],
        *,
        traffic_class: str,
        max_keys: int,
    ) -> int:
        """Queues a first part of `keys`, for whose buffers `fill` is called, and returns how many; 0 when full.

        One call of the daemon takes `max_keys`. What `fill` raises goes to the caller, and nothing is queued then.
        """
        slots = self._buffers()
        if time.monotonic() < self._paused_until:
            return 0
        taken = slots.take(len(keys))
        if not taken:
            return 0
        try:
            fill(slots.views(taken))
        except BaseException:
            slots.give(taken)
            raise
        self._known.add(keys[: len(taken)])
        step = min(self._batch_blocks, max_keys)
        for start in range(0, len(taken), step):
            end = start + step
            self._queue(Batch(keys[start : min(end, len(taken))], taken[start:end], traffic_class))
        self._counters.add(queued_blocks=len(taken))
        return len(taken)

    def flush(self, timeout_s: float) -> bool:
        """True once nothing is queued or under way."""
        return self._worker.wait_idle(timeout_s)

    def close(self, timeout_s: float) -> None:
        self._worker.close(timeout_s)

    def _buffers(self) -> SaveSlots:
        with self._making:
            if self._slots is None:
                count = self._options.save_queue_bytes // self._payload_bytes
                try:
                    self._slots = self._staging.slots(self._payload_bytes, count)
                except OSError as error:
                    logger.error("no memory for saving (%d bytes): %s", self._options.save_queue_bytes, error)
                    self._slots = Slots(self._payload_bytes, 0)
            return self._slots

    def _queue(self, batch: Batch) -> None:
        if not self._worker.submit(lambda: self._save(batch)):
            self._done(batch, [], failed_blocks=len(batch.keys))

    def _save(self, batch: Batch) -> None:
        """On the worker thread: stores one batch, whatever happens gives its buffers back."""
        started = time.monotonic()
        stored: list[bytes] = []
        counts: Counter[str] = Counter()
        try:
            self._link.use(
                partial(self._store, batch, stored, counts),
                renew_s=self._options.control_deadline_s,
                engine_waited=False,
            )
        except CacheError as error:
            logger.debug("%d blocks are not saved: %s", len(batch.keys), error)
        finally:
            counts["failed_blocks"] = len(batch.keys) - sum(counts.values())
            self._done(batch, stored, **counts, save_seconds=time.monotonic() - started)

    def _store(self, batch: Batch, stored: list[bytes], counts: Counter[str], attachment: Attachment) -> None:
        """Fills in the keys that are stored, and what became of all others."""
        stored.clear()
        counts.clear()
        slots = self._slots
        assert slots is not None, "a batch was made without buffers"
        reserved, committed = self._client.store(attachment, batch.keys, slots.views(batch.slots), batch.traffic_class)
        done = [key for key, state in zip(batch.keys, committed, strict=True) if state == pb.STORED]
        stored.extend(key for key, state in zip(batch.keys, reserved, strict=True) if state == pb.PRESENT)
        counts.update(present_blocks=len(stored), busy_blocks=reserved.count(pb.BUSY), stored_blocks=len(done))
        stored.extend(done)
        self._failed.discard(done)
        refused = reserved.count(pb.REFUSED) + committed.count(pb.WRITE_REFUSED)
        counts.update(refused_blocks=refused)
        if refused and not done:  # to gather more at once would be in vain
            self._paused_until = time.monotonic() + self._options.saves_refused_pause_s
        if pb.CHECKSUM_MISMATCH in committed or pb.INCOMPLETE in committed:
            self._link.failure(attachment, BadAnswer(f"Commit: states {committed.hex()}"), engine_waited=False)

    def _done(self, batch: Batch, stored: Sequence[bytes], **counts: float) -> None:
        self._known.discard(set(batch.keys).difference(stored))
        if self._slots is not None:
            self._slots.give(batch.slots)
        if stored:
            self._on_stored(stored)
        counts["stored_bytes"] = counts.get("stored_blocks", 0) * self._payload_bytes
        self._counters.add(**counts)
