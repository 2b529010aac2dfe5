"""Bringing blocks of one prefix from disk into the arena, in prefix order, ahead of the reader that waits for them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from cachesvc.arena.arena import Arena, Slot
from cachesvc.catalog import Catalog
from cachesvc.disk.reading import Wanted
from cachesvc.disk.tier import DiskTier
from cachesvc.errors import BlockUnreadable
from cachesvc.index.table import split_id
from cachesvc.limits import MAX_QUEUED_PROMOTIONS, MAX_READ_BYTES, PROMOTION_THREADS
from cachesvc.rpc.cache_pb2 import MissReason

log = logging.getLogger("cachesvc.promoter")


class Hold:
    """The blocks of one read lease and shard, with a pin on each slot that is known. Made and ended by `Promoter`."""

    def __init__(self, identities: Sequence[bytes], payload_bytes: int) -> None:
        self.identities = identities
        self.payload_bytes = payload_bytes
        self.slots: list[Slot | None] = [None] * len(identities)
        self.ended = False
        self.failed_at = len(identities)
        """Index of the first block that cannot be brought into the arena, and why."""
        self.reason = MissReason.MISS_REASON_UNSPECIFIED


class Promoter:
    """Thread-safe. At `MAX_QUEUED_PROMOTIONS` a hold is not promoted: its reader is told that it failed to load."""

    def __init__(self, catalog: Catalog, arena: Arena, disk: DiskTier) -> None:
        self._catalog = catalog
        self._arena = arena
        self._disk = disk
        self._queue: deque[Hold] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"promoter-{i}", daemon=True) for i in range(PROMOTION_THREADS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def hold(self, identities: Sequence[bytes], payload_bytes: int) -> Hold:
        """Pins what is resident and starts to bring the rest."""
        hold = Hold(identities, payload_bytes)
        hold.slots = self._arena.pin(identities)
        if None in hold.slots:
            with self._changed:
                if len(self._queue) >= MAX_QUEUED_PROMOTIONS:
                    hold.failed_at, hold.reason = hold.slots.index(None), MissReason.LOAD_ERROR
                else:
                    self._queue.append(hold)
                    self._changed.notify_all()
        return hold

    def ready(self, hold: Hold, first: int, count: int, wait: float) -> tuple[list[Slot], MissReason.ValueType]:
        """Ready slots from `first` on without gaps, after waiting up to `wait` seconds for at least one.

        The reason is set when the block behind them will never be ready.
        """
        deadline = time.monotonic() + wait
        with self._changed:
            while True:
                found: list[Slot] = []
                reason = MissReason.MISS_REASON_UNSPECIFIED
                for index in range(first, first + count):
                    slot = hold.slots[index]
                    if hold.ended or index >= hold.failed_at or (slot is not None and self._arena.failed(slot)):
                        reason = hold.reason or MissReason.LOAD_ERROR
                        break
                    if slot is None or not self._arena.ready(slot):
                        break
                    found.append(slot)
                remaining = deadline - time.monotonic()
                if found or reason or remaining <= 0 or self._stopping:
                    return found, reason
                self._changed.wait(remaining)

    def end(self, hold: Hold) -> None:
        """Gives the pins back. Idempotent."""
        with self._changed:
            if hold.ended:
                return
            hold.ended = True
            slots = [slot for slot in hold.slots if slot is not None]
            self._changed.notify_all()
        self._arena.unpin(slots)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                hold = self._queue.popleft()
            index = 0
            while (index := self._next_missing(hold, index)) < len(hold.identities):
                if not self._bring(hold, index):
                    break

    def _next_missing(self, hold: Hold, index: int) -> int:
        if hold.ended:
            return len(hold.identities)
        return next((i for i in range(index, len(hold.slots)) if hold.slots[i] is None), len(hold.identities))

    def _bring(self, hold: Hold, start: int) -> bool:
        """Reads up to one request's size from `start` on. False when the prefix ends here."""
        indices: list[int] = []
        slots: list[Slot] = []
        wanted: list[Wanted] = []
        limit = max(1, MAX_READ_BYTES // hold.payload_bytes)
        failure = MissReason.MISS_REASON_UNSPECIFIED
        end = start
        stop = min(start + limit, len(hold.identities))
        entries = self._catalog.where_all(hold.identities[start:stop])
        for end in range(start, stop):
            if hold.slots[end] is not None:
                continue
            identity = hold.identities[end]
            entry = entries[end - start]
            slot = self._arena.load(identity, hold.payload_bytes) if entry is not None and entry.segment else None
            if slot is not None and entry is not None:
                indices.append(end)
                slots.append(slot)
                wanted.append(Wanted(*split_id(identity), entry))
            elif not self._take(hold, end):
                failure = MissReason.LOAD_ERROR if entry is not None else MissReason.EVICTED
                break
        for index in indices:
            self._take(hold, index)
        done = 0
        try:
            for slot, found in zip(slots, self._disk.read(wanted, [self._arena.view(s) for s in slots]), strict=True):
                self._arena.loaded(slot, found)
                done += 1
                self._notify()
        except Exception as error:  # whatever it is, no reader may wait for ever for slots that nobody fills
            if not isinstance(error, BlockUnreadable):
                log.exception("fault while a prefix was brought into the arena")
            corrupt = isinstance(error, BlockUnreadable) and error.corrupt
            failure = MissReason.CORRUPT if corrupt else MissReason.LOAD_ERROR
            end = indices[done]
            for slot in slots[done:]:
                self._arena.load_failed(slot)
        if failure:
            with self._changed:
                hold.failed_at, hold.reason = min(hold.failed_at, end), failure
        self._notify()
        return not failure

    def _take(self, hold: Hold, index: int) -> bool:
        """Pins a block that is resident (or on its way) for the hold."""
        (slot,) = self._arena.pin([hold.identities[index]])
        if slot is None:
            return False
        with self._changed:
            if not hold.ended:
                hold.slots[index] = slot
                return True
        self._arena.unpin([slot])
        return True

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
