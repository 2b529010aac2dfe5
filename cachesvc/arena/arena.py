"""Blocks in the arena: who holds a slot, what state it is in, and which one makes room.

=========  ==================================================  ==========================================
state      meaning                                             leaves by
=========  ==================================================  ==========================================
WRITING    a writer fills it; nobody else knows it             `publish` → DIRTY, `abandon` → free
LOADING    a promotion reads it from a lower tier              `loaded` → CLEAN, `discard` → free
DIRTY      visible, not yet in a lower tier: never evicted     `flushed` → CLEAN, `discard` → free
CLEAN      visible, also in a lower tier                       eviction or `discard` → free
=========  ==================================================  ==========================================

A slot with pins (read leases, the flusher, a promotion) is never freed: it is only detached from its block, and freed
with its last pin. So nobody ever reads a slot that has become another block's.
"""

from __future__ import annotations

import enum
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from cachesvc.arena.memory import ArenaMemory
from cachesvc.arena.slabs import Slabs, slot_bytes
from cachesvc.policy import Policy

# How far down the policy's order room is sought before a request is refused: pinned and dirty blocks are passed over.
_SEARCH: Final = 1024
_ROUNDS: Final = 16


class SlotState(enum.Enum):
    WRITING = enum.auto()
    LOADING = enum.auto()
    DIRTY = enum.auto()
    CLEAN = enum.auto()


READY: Final = (SlotState.CLEAN, SlotState.DIRTY)
"""States in which a slot's bytes may be read."""

_FIXED64: Final = struct.Struct("<Q")
NO_SLOT: Final = 2**64 - 1
"""Position of a block that is in no slot, or in one whose bytes may not be read yet."""
_NOWHERE: Final = _FIXED64.pack(NO_SLOT)
_CHECKED: Final = bytes(8)


def pack_positions(positions: Sequence[int]) -> bytes:
    """As they travel: fixed64 each."""
    return struct.pack(f"<{len(positions)}Q", *positions)


@dataclass(slots=True, eq=False)
class Slot:
    """One slot in use. `checksum` is 0 while unknown; `verified` says that the bytes were found to have it.

    `position` and `unchecked` are the offset and the checksum that a reader must still check, as they travel (fixed64):
    look-ups answer with thousands of them.
    """

    identity: bytes
    offset: int
    payload_bytes: int
    state: SlotState
    pins: int = 0
    checksum: int = 0
    verified: bool = False
    detached: bool = False
    filled: int = 0
    """Bytes put into it so far, where they come in parts."""
    position: bytes = _NOWHERE
    unchecked: bytes = _CHECKED

    def set_ready(self, state: SlotState, checksum: int, *, verified: bool) -> None:
        self.state, self.checksum, self.verified = state, checksum, verified
        self.position = _FIXED64.pack(self.offset)
        if not verified:
            self.unchecked = _FIXED64.pack(checksum)

    @property
    def to_check(self) -> bytes:
        """The checksum, as it travels, for a reader that is to check the bytes whoever did so before."""
        return _FIXED64.pack(self.checksum)

    def set_verified(self, checksum: int) -> None:
        """The bytes were found to have this checksum."""
        self.checksum, self.verified, self.unchecked = checksum, True, _CHECKED


class Arena:
    """Thread-safe. At the end of its memory, `reserve` and `load` give nothing; nothing ever waits."""

    def __init__(self, memory: ArenaMemory, policy: Policy[bytes], slab_bytes: int) -> None:
        self.memory = memory
        self.max_payload_bytes = slab_bytes
        self._slabs = Slabs(memory.size, slab_bytes)
        self._policy = policy
        self._lock = threading.Lock()
        self._resident: dict[bytes, Slot] = {}
        self._at: dict[int, Slot] = {}
        self._unflushed = 0

    # ---- writing -------------------------------------------------------------------------------------------------

    def reserve(self, identities: Sequence[bytes], payload_bytes: int) -> list[Slot]:
        """Slots to write blocks into, for the first of them, as many as there is room for.

        Half of the arena at most is given to blocks that are not yet on disk.
        """
        size = slot_bytes(payload_bytes)
        with self._lock:
            count = min(len(identities), (self.memory.size // 2 - self._unflushed) // size)
            slots = self._take(identities[: max(0, count)], payload_bytes, SlotState.WRITING)
            self._unflushed += size * len(slots)
            return slots

    def abandon(self, slot: Slot) -> None:
        """The writer gives up; it must not touch the slot any more."""
        with self._lock:
            self._expect(slot, SlotState.WRITING)
            self._free(slot)

    def publish(self, slots: Sequence[Slot], checksums: Sequence[int], *, verified: bool) -> list[bool]:
        """Makes written blocks visible. False for one that is there already: its slot is freed."""
        shown = []
        resident = self._resident
        positions = pack_positions([slot.offset for slot in slots])
        unchecked = pack_positions(checksums) if not verified else b""
        dirty, at = SlotState.DIRTY, 0
        new_ones: list[bytes] = []
        with self._lock:
            for slot, checksum in zip(slots, checksums, strict=True):
                assert slot.state is SlotState.WRITING, f"slot at {slot.offset} is {slot.state.name}, not WRITING"
                identity = slot.identity
                new = identity not in resident
                if new:
                    slot.state, slot.checksum, slot.verified = dirty, checksum, verified
                    slot.position = positions[at : at + 8]
                    if not verified:
                        slot.unchecked = unchecked[at : at + 8]
                    resident[identity] = slot
                    new_ones.append(identity)
                else:
                    self._free(slot)
                shown.append(new)
                at += 8
            self._policy.insert_all(reversed(new_ones))  # tail first, as with every use
        return shown

    def flushed(self, slots: Iterable[Slot]) -> None:
        """The blocks are in a lower tier now."""
        with self._lock:
            for slot in slots:
                if slot.state is SlotState.DIRTY:
                    slot.state = SlotState.CLEAN
                    self._unflushed -= slot_bytes(slot.payload_bytes)

    # ---- promotion -----------------------------------------------------------------------------------------------

    def load(self, identity: bytes, payload_bytes: int) -> Slot | None:
        """A slot, pinned, to read a block of a lower tier into; None when it is here, on its way, or without room."""
        with self._lock:
            if identity in self._resident:
                return None
            for slot in self._take([identity], payload_bytes, SlotState.LOADING):
                slot.pins = 1
                self._resident[identity] = slot
                self._policy.insert(identity)
                return slot
            return None

    def loaded(self, slot: Slot, checksum: int) -> None:
        """The slot holds the verified block; `load`'s pin is given back."""
        with self._lock:
            self._expect(slot, SlotState.LOADING)
            slot.set_ready(SlotState.CLEAN, checksum, verified=True)
            self._unpin(slot)

    def load_failed(self, slot: Slot) -> None:
        """The slot could not be filled; `load`'s pin is given back and the slot is nobody's."""
        with self._lock:
            self._expect(slot, SlotState.LOADING)
            if not slot.detached:
                self._detach(slot)
            self._unpin(slot)

    # ---- reading -------------------------------------------------------------------------------------------------

    def pin(self, identities: Sequence[bytes]) -> list[Slot | None]:
        """The slots of resident or loading blocks, each pinned until `unpin`. `touch` is to follow for what is used."""
        with self._lock:
            found = list(map(self._resident.get, identities))
            if None in found:
                for slot in found:
                    if slot is not None:
                        slot.pins += 1
            else:
                for slot in found:
                    slot.pins += 1  # type: ignore[union-attr]  # as just seen
            return found

    def touch(self, slots: Sequence[Slot | None]) -> None:
        """Marks blocks of one prefix as used: tail first, so that the head is the most recent."""
        with self._lock:
            self._policy.touch_all([s.identity for s in reversed(slots) if s is not None and not s.detached])

    def unpin(self, slots: Iterable[Slot]) -> None:
        with self._lock:
            for slot in slots:
                slot.pins = pins = slot.pins - 1
                if pins <= 0 and (pins or slot.detached):
                    self._unpinned(slot)

    def resident(self, identity: bytes) -> bool:
        """Whether a block lies in the arena, ready to be read."""
        slot = self._resident.get(identity)
        return slot is not None and self.ready(slot)

    def ready(self, slot: Slot) -> bool:
        """Whether a pinned slot's bytes may be read. False for one on its way; see `failed`."""
        return slot.state in READY

    def failed(self, slot: Slot) -> bool:
        """Whether a pinned slot that was on its way will never be ready."""
        return slot.state is SlotState.LOADING and slot.detached

    def view(self, slot: Slot) -> memoryview:
        """The payload's bytes."""
        return self.memory.view[slot.offset : slot.offset + slot.payload_bytes]

    def discard(self, identities: Iterable[bytes]) -> None:
        """Drops blocks, whatever their state."""
        with self._lock:
            for slot in map(self._resident.get, identities):
                if slot is not None:
                    self._detach(slot)
                    if not slot.pins:
                        self._free(slot)

    # ---- reports -------------------------------------------------------------------------------------------------

    @property
    def bytes_used(self) -> int:
        with self._lock:
            return self._slabs.bytes_taken

    @property
    def bytes_unflushed(self) -> int:
        """Of blocks being written and of visible ones that are not yet in a lower tier."""
        return self._unflushed

    def __len__(self) -> int:
        return len(self._resident)

    def check(self) -> None:
        """Raises `AssertionError` when the books do not add up."""
        with self._lock:
            self._slabs.check()
            assert all(slot.offset == offset for offset, slot in self._at.items())
            assert sum(slot_bytes(s.payload_bytes) for s in self._at.values()) == self._slabs.bytes_taken
            assert len(self._policy) == len(self._resident)
            for identity, slot in self._resident.items():
                assert slot.identity == identity and not slot.detached and self._at[slot.offset] is slot
                assert slot.state is not SlotState.WRITING
            unflushed = (SlotState.WRITING, SlotState.DIRTY)
            assert self._unflushed == sum(
                slot_bytes(s.payload_bytes) for s in self._at.values() if s.state in unflushed
            )
            for slot in self._at.values():
                assert slot.pins or slot.state is SlotState.WRITING or not slot.detached

    # ---- inside, under the lock ----------------------------------------------------------------------------------

    def _take(self, identities: Sequence[bytes], payload_bytes: int, state: SlotState) -> list[Slot]:
        """Slots for the first of the blocks, as many as can be had."""
        size = slot_bytes(payload_bytes)
        if size > self.max_payload_bytes:
            return []
        offsets = self._slabs.allocate(size, len(identities))
        while len(offsets) < len(identities) and self._make_room(size, len(identities) - len(offsets)):
            offsets += self._slabs.allocate(size, len(identities) - len(offsets))
        slots = [Slot(identity, offset, payload_bytes, state) for identity, offset in zip(identities, offsets)]  # noqa: B905
        self._at.update(zip(offsets, slots, strict=True))
        return slots

    def _make_room(self, size: int, count: int) -> bool:
        """Evicts the first blocks of that size that may leave, or else empties the first slab that can be emptied.

        False when nothing could be gained.
        """
        for _ in range(_ROUNDS):
            gained, held = self._search(size, count)
            if gained or not held:
                return gained
            # What somebody is reading is in use: it goes to the end of the order, out of the way of the next search.
            self._policy.touch_all(held)
        return False

    def _search(self, size: int, count: int) -> tuple[bool, list[bytes]]:
        """Whether room was made, and the pinned blocks that were met."""
        held: list[bytes] = []
        same: list[Slot] = []
        first: list[Slot] = []
        for identity in islice(self._policy.victims(), _SEARCH):
            slot = self._resident[identity]
            if not self._evictable(slot):
                if slot.pins:
                    held.append(identity)
                continue
            if slot_bytes(slot.payload_bytes) == size:
                same.append(slot)
                if len(same) == count:
                    break
            else:
                first.append(slot)
        for slot in same:
            self._evict(slot)
        if same:
            return True, held
        seen: set[int] = set()
        for slot in first:
            if self._slabs.number(slot.offset) in seen:
                continue
            seen.add(self._slabs.number(slot.offset))
            slab = [self._at[offset] for offset in self._slabs.neighbours(slot.offset)]
            if all(map(self._evictable, slab)):
                for neighbour in slab:
                    self._evict(neighbour)
                return True, held
        return False, held

    @staticmethod
    def _evictable(slot: Slot) -> bool:
        return slot.state is SlotState.CLEAN and not slot.pins

    def _evict(self, slot: Slot) -> None:
        self._detach(slot)
        self._free(slot)

    def _detach(self, slot: Slot) -> None:
        slot.detached = True
        del self._resident[slot.identity]
        self._policy.remove(slot.identity)

    def _unpin(self, slot: Slot) -> None:
        slot.pins -= 1
        if slot.pins <= 0:
            self._unpinned(slot)

    def _unpinned(self, slot: Slot) -> None:
        assert not slot.pins, f"slot at {slot.offset} was unpinned more often than pinned"
        if slot.detached:
            self._free(slot)

    def _free(self, slot: Slot) -> None:
        assert not slot.pins and self._at.pop(slot.offset) is slot
        if slot.state in (SlotState.WRITING, SlotState.DIRTY):
            self._unflushed -= slot_bytes(slot.payload_bytes)
        self._slabs.free(slot.offset)

    @staticmethod
    def _expect(slot: Slot, state: SlotState) -> None:
        assert slot.state is state, f"slot at {slot.offset} is {slot.state.name}, not {state.name}"
