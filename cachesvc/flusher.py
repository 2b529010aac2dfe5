"""Draining committed blocks from the arena to the disk, in the background, batched by class and in prefix order.

The queue is bounded by the arena: only half of it may hold blocks that are not on disk. While the disk refuses writes,
blocks wait here and stay visible; new reservations are refused meanwhile.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import groupby, repeat
from typing import Final

from cachesvc.arena.arena import Arena, Slot, SlotState
from cachesvc.catalog import Catalog
from cachesvc.disk.files import NewBlock
from cachesvc.disk.tier import DiskTier
from cachesvc.errors import WriteRefused
from cachesvc.index.table import Entry, split_id
from cachesvc.limits import MAX_READ_BYTES, WRITE_RETRY_SECONDS
from cachesvc.record import checksum
from cachesvc.rpc.cache_pb2 import MissReason

log = logging.getLogger("cachesvc.flusher")

# How long (seconds) a block waits for others to be written with it, unless this share of the arena waits already.
_GATHER_SECONDS: Final = 0.25
_ENOUGH_SHARE: Final = 8


class Flusher:
    def __init__(self, catalog: Catalog, arena: Arena, disk: DiskTier) -> None:
        self._catalog = catalog
        self._arena = arena
        self._disk = disk
        self._queue: deque[tuple[bytes, int]] = deque()
        """Blocks and their payload sizes."""
        self._queued_bytes = 0
        self._wake = threading.Condition()
        self._enough = arena.memory.size // _ENOUGH_SHARE
        self._begin = math.inf
        """When the queue is to be written, until it is empty."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="flusher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, identities: Sequence[bytes], payload_bytes: int) -> None:
        """Queues published blocks, in prefix order, each of that size."""
        with self._wake:
            self._queue.extend(zip(identities, repeat(payload_bytes)))  # repeat has no end
            self._queued_bytes += payload_bytes * len(identities)
            self._wake.notify()

    def flush(self, identities: Sequence[bytes], *, durable: bool) -> None:
        """Brings blocks to disk now, in the caller's thread. Raises `WriteRefused`."""
        slots = [slot for slot in self._arena.pin(identities) if slot is not None]
        try:
            known = [(slot, entry) for slot in slots if (entry := self._verified(slot)) is not None]
            for (shape, traffic_class), group in groupby(
                known, key=lambda item: (item[1].shape, item[1].traffic_class)
            ):
                members = list(group)
                self._disk.append(shape, traffic_class, [self._block(*item) for item in members], durable=durable)
                self._arena.flushed([slot for slot, _ in members])
        finally:
            self._arena.unpin(slots)

    def drain(self) -> None:
        """Writes what is queued now, in the caller's thread, as far as the disk takes it."""
        with self._wake:
            batch = list(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
        left = self._flush_what_can_be([identity for identity, _ in batch])
        sizes = dict(batch)
        for identity in left:
            self.add([identity], sizes[identity])

    def close(self) -> None:
        """Writes what is queued, as far as the disk takes it, and ends the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        else:
            self.drain()

    def _verified(self, slot: Slot) -> Entry | None:
        """The entry of a block that is still to be written, with its checksum known; a damaged block is dropped."""
        entry = self._catalog.where(slot.identity)
        if entry is None or slot.state is not SlotState.DIRTY:
            return entry if slot.state is not SlotState.LOADING else None
        if not slot.verified:
            found = checksum(self._arena.view(slot))
            if slot.checksum not in (0, found):
                log.warning("block %s in the arena is not what its writer committed: dropped", slot.identity.hex())
                self._catalog.drop(slot.identity, entry, MissReason.CORRUPT)
                return None
            entry.checksum = found
            slot.set_verified(found)
        return entry

    def _block(self, slot: Slot, entry: Entry) -> NewBlock:
        key, shard = split_id(slot.identity)
        return NewBlock(key, shard, self._arena.view(slot), slot.checksum, entry.created, entry.used)

    def _run(self) -> None:
        while batch := self._gather():
            left = self._flush_what_can_be([identity for identity, _ in batch])
            if left:
                sizes = dict(batch)
                with self._wake:
                    if self._stopping:
                        log.warning(
                            "%d blocks are lost: the disk refuses them at shutdown", len(left) + len(self._queue)
                        )
                        return
                    self._queue.extendleft((identity, sizes[identity]) for identity in reversed(left))
                    self._queued_bytes += sum(sizes[identity] for identity in left)
                    self._wake.wait(WRITE_RETRY_SECONDS)

    def _gather(self) -> list[tuple[bytes, int]]:
        """The next blocks to be written together; empty at the end.

        A writer that has just begun is let finish first: its blocks then lie together, and it has the machine alone.
        """
        with self._wake:
            while not self._queue and not self._stopping:
                self._begin = math.inf
                self._wake.wait()
            self._begin = min(self._begin, time.monotonic() + _GATHER_SECONDS)
            while self._queued_bytes < self._enough and not self._stopping:
                remaining = self._begin - time.monotonic()
                if remaining <= 0:
                    break
                self._wake.wait(remaining)
            batch: list[tuple[bytes, int]] = []
            size = 0
            while self._queue and size < MAX_READ_BYTES:
                batch.append(self._queue.popleft())
                size += batch[-1][1]
            self._queued_bytes -= size
            return batch

    def _flush_what_can_be(self, batch: list[bytes]) -> list[bytes]:
        """What the disk refuses now, to be tried again. A block that cannot be written for another reason is lost."""
        try:
            self.flush(batch, durable=False)
        except WriteRefused:
            return batch
        except Exception:  # a fault of ours must not end the thread, nor keep the other blocks from the disk
            log.exception("fault while %d blocks were written", len(batch))
            if len(batch) > 1:
                return [left for identity in batch for left in self._flush_what_can_be([identity])]
            entry = self._catalog.where(batch[0])
            if entry is not None:
                self._catalog.drop(batch[0], entry, MissReason.EVICTED)
        return []
