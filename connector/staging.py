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
from cachesvc.connector.payloads import Pieces
from cachesvc.connector.stats import Counters
from cachesvc.connector.workers import Workers
from cachesvc.rpc import cache_pb2 as pb

logger = logging.getLogger("cachesvc.connector")

MAX_WAITING_BATCHES = 65_536
"""Far more than the queue's bytes allow for any real payload; a bound all the same."""


@dataclass(frozen=True)
class Batch:
    """Blocks of one prefix in order, to be stored under one write lease: each in its slot, or in the caller's
    memory."""

    keys: Sequence[bytes]
    slots: list[int]
    traffic_class: str
    payloads: Sequence[Pieces] | None = None


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
        shard: int,
        payload_bytes: int,
        on_stored: Callable[[Sequence[bytes]], None],
        staging: Staging,
    ) -> None:
        """`on_stored` is told, on the worker thread, which keys are stored now."""
        self._staging = staging
        self._on_stored = on_stored
        self._shard = shard
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
        taken = self._fill(len(keys), fill)
        self._known.add(keys[: len(taken)])
        step = min(self._batch_blocks, max_keys)
        for start in range(0, len(taken), step):
            end = start + step
            self._queue(Batch(keys[start : min(end, len(taken))], taken[start:end], traffic_class))
        self._counters.add(queued_blocks=len(taken))
        return len(taken)

    def take_back(
        self, key: bytes, fill: Callable[[Sequence[memoryview]], None], *, traffic_class: str
    ) -> Callable[[bool], None] | None:
        """Copies one block, to be queued or dropped later: by what is returned, with True or False. None when full."""
        taken = self._fill(1, fill)
        if not taken:
            return None

        def settle(store: bool) -> None:
            if store:
                self._known.add([key])
                self._queue(Batch([key], taken, traffic_class))
                self._counters.add(queued_blocks=1)
            elif self._slots is not None:
                self._slots.give(taken)

        return settle

    def store_now(
        self, keys: Sequence[bytes], payloads: Sequence[Pieces], *, traffic_class: str, max_keys: int
    ) -> set[bytes]:
        """Stores blocks on the calling thread, out of the caller's memory: on the daemon's host nothing is copied
        twice.

        Returns the keys that are stored now, or being stored by somebody else.
        """
        step = min(self._batch_blocks, max_keys)
        there: set[bytes] = set()
        for start in range(0, len(keys), step):
            part = slice(start, start + step)
            batch = Batch(keys[part], [], traffic_class, payloads[part])
            now = self._save(batch)
            there |= now
            if len(now) < len(batch.keys):
                break  # what follows would lie behind a hole
        return there

    def flush(self, timeout_s: float) -> bool:
        """True once nothing is queued or under way."""
        return self._worker.wait_idle(timeout_s)

    def close(self, timeout_s: float) -> None:
        self._worker.close(timeout_s)

    def _fill(self, count: int, fill: Callable[[Sequence[memoryview]], None]) -> list[int]:
        """Slots for a first part of so many blocks, none when full, which `fill` has filled."""
        slots = self._buffers()
        if time.monotonic() < self._paused_until:
            return []
        taken = slots.take(count)
        if taken:
            try:
                fill(slots.views(taken))
            except BaseException:
                slots.give(taken)
                raise
        return taken

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
        def save() -> None:
            self._save(batch)

        if not self._worker.submit(save):
            self._done(batch, [], failed_blocks=len(batch.keys))

    def _save(self, batch: Batch) -> set[bytes]:
        """Stores one batch, whatever happens gives its buffers back. Returns keys stored here, or by somebody else."""
        started = time.monotonic()
        stored: list[bytes] = []
        busy: list[bytes] = []
        counts: Counter[str] = Counter()
        try:
            busy = self._link.use(
                partial(self._store, batch, stored, counts),
                renew_s=self._options.control_deadline_s,
                engine_waited=False,
            )
        except CacheError as error:
            logger.debug("%d blocks are not saved: %s", len(batch.keys), error)
        finally:
            counts["failed_blocks"] = len(batch.keys) - sum(counts.values())
            self._done(batch, stored, **counts, save_seconds=time.monotonic() - started)
        return {*stored, *busy}

    def _store(self, batch: Batch, stored: list[bytes], counts: Counter[str], attachment: Attachment) -> list[bytes]:
        """Fills in the keys that are stored, and what became of all others; returns those that others are storing."""
        stored.clear()
        counts.clear()
        payloads: Sequence[memoryview] | Sequence[Pieces] | None = batch.payloads
        if payloads is None:
            assert self._slots is not None, "a batch was made without buffers"
            payloads = self._slots.views(batch.slots)
        reserved, committed = self._client.store(
            attachment, batch.keys, payloads, batch.traffic_class, shard=self._shard
        )
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
        return [key for key, state in zip(batch.keys, reserved, strict=True) if state == pb.BUSY]

    def _done(self, batch: Batch, stored: Sequence[bytes], **counts: float) -> None:
        self._known.discard(set(batch.keys).difference(stored))
        if batch.payloads is not None:
            self._known.add(stored)
        if self._slots is not None and batch.slots:
            self._slots.give(batch.slots)
        if stored:
            self._on_stored(stored)
        counts["stored_bytes"] = counts.get("stored_blocks", 0) * self._payload_bytes
        self._counters.add(**counts)
