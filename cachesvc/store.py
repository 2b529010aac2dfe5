"""The tiers behind one `Store`: the arena (DRAM) over segment files on disk, found through one catalog.

A committed block is visible at once, from the arena; the flusher brings it to disk. What is matched and lies only on
disk is promoted into the arena for clients that map it, or read past it for those that do not.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from cachesvc.arena.arena import Arena, Slot
from cachesvc.arena.memory import ArenaMemory
from cachesvc.catalog import Catalog
from cachesvc.classes import TrafficClass, TrafficClasses
from cachesvc.clock import Clock
from cachesvc.disk.reading import Wanted
from cachesvc.disk.tier import DiskTier
from cachesvc.errors import BlockUnreadable, WriteRefused
from cachesvc.flusher import Flusher
from cachesvc.index.prefix import Prefix
from cachesvc.index.table import Entry, split_id
from cachesvc.limits import DEFAULT_REWRITE_RATE, DEFAULT_SCRUB_RATE
from cachesvc.policy import LRU, S3FIFO, Policy
from cachesvc.promoter import Hold, Promoter
from cachesvc.record import checksum
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.segments.format import Shape
from cachesvc.segments.segment import page_aligned

log = logging.getLogger("cachesvc.store")


class Store:
    def __init__(
        self,
        path: Path,
        *,
        budget: int,
        segment_bytes: int,
        arena_bytes: int,
        slab_bytes: int,
        arena_policy: str,
        classes: TrafficClasses,
        clock: Clock,
        rewrite_rate: int = DEFAULT_REWRITE_RATE,
        scrub_rate: int = DEFAULT_SCRUB_RATE,
        background: bool = True,
    ) -> None:
        """Raises `StoreLocked`, `StoreUnusable` or `ConfigError`.

        Without `background` no thread of its own runs: for simulations, which call `drain` instead.
        """
        self.events: Counter[str] = Counter()
        self.catalog = Catalog(clock, self.events)
        self._clock = clock
        self.disk = DiskTier(
            path,
            self.catalog,
            budget=budget,
            segment_bytes=segment_bytes,
            classes=classes,
            clock=clock,
            events=self.events,
            rewrite_rate=rewrite_rate,
            scrub_rate=scrub_rate,
        )
        policy: Policy[bytes] = S3FIFO() if arena_policy == "s3fifo" else LRU()
        self.arena = Arena(ArenaMemory(arena_bytes), policy, slab_bytes)
        self.catalog.on_drop = self.arena.discard
        self._flusher = Flusher(self.catalog, self.arena, self.disk)
        self._promoter = Promoter(self.catalog, self.arena, self.disk)
        if background:
            self.arena.memory.start_prefault()
            self._flusher.start()
            self._promoter.start()

    # ---- read ----------------------------------------------------------------------------------------------------

    def hold(self, identities: Sequence[bytes], payload_bytes: int) -> Hold:
        """Pins blocks in the arena, and starts to bring there what is not."""
        return self._promoter.hold(identities, payload_bytes)

    def touch(
        self,
        identities: Sequence[Sequence[bytes]],
        traffic_class: TrafficClass,
        hold: Hold | None,
        found: Sequence[Prefix] = (),
    ) -> None:
        """Marks matched blocks as used, where they lie; may follow the answer."""
        self.catalog.touch(identities, traffic_class, found)
        if hold is not None:
            self.arena.touch(hold.slots)

    def ready(self, hold: Hold, first: int, count: int, wait: float) -> tuple[list[Slot], MissReason.ValueType]:
        """See `Promoter.ready`."""
        return self._promoter.ready(hold, first, count, wait)

    def end(self, hold: Hold) -> None:
        self._promoter.end(hold)

    def read(
        self, identities: Sequence[bytes], entries: Sequence[Entry], blocks: int
    ) -> Iterator[list[tuple[memoryview, int]]]:
        """Payloads and checksums in order, about `blocks` at once, from wherever they lie.

        Views are valid until the next are asked for. Raises `BlockUnreadable` at the first block that cannot be served,
        after those before it.
        """
        for start in range(0, len(identities), blocks):
            part = slice(start, start + blocks)
            slots = self.arena.pin(identities[part])
            self.arena.touch(slots)
            payloads: list[tuple[memoryview, int]] = []
            try:
                try:
                    payloads.extend(self._read(identities[part], entries[part], slots))
                except BlockUnreadable:
                    if payloads:
                        yield payloads
                    raise
                yield payloads
            finally:
                self.arena.unpin(slot for slot in slots if slot is not None)

    def recheck(self, identities: Sequence[bytes]) -> None:
        """Checks blocks in the arena again, of which a reader says that one is damaged: such a one is not served."""
        slots = [slot for slot in self.arena.pin(identities) if slot is not None]
        try:
            for slot in slots:
                if not (self.arena.ready(slot) and slot.checksum and checksum(self.arena.view(slot)) != slot.checksum):
                    continue
                self.events["arena_corrupt_blocks"] += 1
                log.error("block %s in the arena has changed since it was checked", slot.identity.hex())
                entry = self.catalog.where(slot.identity)
                if entry is not None and entry.segment is None:
                    self.catalog.drop(slot.identity, entry, MissReason.CORRUPT)
                self.arena.discard([slot.identity])  # what is on disk is read from there
        finally:
            self.arena.unpin(slots)

    # ---- write ---------------------------------------------------------------------------------------------------

    def reserve(self, identities: Sequence[bytes], payload_bytes: int) -> list[Slot]:
        """Slots to write the first of these blocks into, as many as there is room for; none while the disk fails."""
        return self.arena.reserve(identities, payload_bytes) if self.disk.accepts_writes() else []

    def commit(
        self,
        slots: Sequence[Slot],
        checksums: Sequence[int],
        shape: Shape,
        traffic_class: TrafficClass,
        *,
        verified: bool,
        durable: bool,
    ) -> set[bytes]:
        """Makes written slots visible, in prefix order; with `durable` they are on disk when this returns.

        Returns those that were found damaged on their way to the disk, which only `durable` waits for.

        A checksum of 0 is not known: the flusher computes it. `verified` says that the bytes were found to have theirs.
        Raises `WriteRefused`, with all of them dropped, when `durable` is asked and the disk refuses.
        """
        now = self._clock.now()
        identities = [slot.identity for slot in slots]
        published = self.arena.publish(slots, checksums, verified=verified)
        self.catalog.add(
            {
                identity: Entry(shape, None, 0, total, now, now, traffic_class, now)
                for identity, total, shown in zip(identities, checksums, published, strict=True)
                if shown
            }
        )
        if False in published:
            for identity, shown in zip(identities, published, strict=True):
                if not shown and self.catalog.where(identity) is None:
                    self.arena.discard([identity])  # a promotion that a drop has overtaken: of no use to anybody
        if durable:
            try:
                self._flusher.flush(identities, durable=True)
            except WriteRefused:
                for identity in identities:
                    lost = self.catalog.where(identity)
                    if lost is not None and lost.segment is None:
                        self.catalog.drop(identity, lost, MissReason.EVICTED)
                raise
            return {i for i in identities if (entry := self.catalog.where(i)) is None or entry.segment is None}
        self._flusher.add(identities, shape.payload_bytes)
        return set()

    # ---- housekeeping --------------------------------------------------------------------------------------------

    def maintain(self) -> float:
        """One round of housekeeping. Returns the seconds until the next is wanted."""
        return self.disk.maintain()

    def drain(self) -> None:
        """Brings to disk what waits for it, in the caller's thread, as far as the disk takes it."""
        self._flusher.drain()

    def close(self) -> None:
        """Brings everything to disk and closes it."""
        self._promoter.close()
        self._flusher.close()
        self.disk.close()
        self.arena.memory.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _read(
        self, identities: Sequence[bytes], entries: Sequence[Entry], slots: Sequence[Slot | None]
    ) -> Iterator[tuple[memoryview, int]]:
        index = 0
        while index < len(identities):
            slot = slots[index]
            if slot is not None and self.arena.ready(slot):
                yield self.arena.view(slot), self._checksum(slot)
                index += 1
                continue
            end = index + 1
            while end < len(identities) and slots[end] is None:
                end += 1
            wanted = [self._on_disk(identities[i], entries[i]) for i in range(index, end)]
            payloads = page_aligned(wanted[0].entry.shape.payload_bytes, len(wanted))
            yield from zip(payloads, self.disk.read(wanted, payloads), strict=True)
            index = end

    def _on_disk(self, identity: bytes, entry: Entry) -> Wanted:
        """A matched block that is not resident: on disk since then if it was not before."""
        if entry.segment is None:
            now = self.catalog.where(identity)
            if now is None or now.segment is None:
                raise BlockUnreadable(f"block {identity.hex()} is gone", corrupt=False)
            entry = now
        return Wanted(*split_id(identity), entry)

    def _checksum(self, slot: Slot) -> int:
        """The checksum of a ready slot; bytes that were never checked are checked now."""
        if not slot.verified:
            found = checksum(self.arena.view(slot))
            if slot.checksum not in (0, found):
                entry = self.catalog.where(slot.identity)
                if entry is not None:
                    self.catalog.drop(slot.identity, entry, MissReason.CORRUPT)
                raise BlockUnreadable("block in the arena is not what its writer committed", corrupt=True)
            slot.set_verified(found)
        return slot.checksum
