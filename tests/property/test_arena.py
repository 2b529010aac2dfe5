"""The arena's slots against a plain model: a slot that somebody holds keeps its bytes, whatever else happens.

Every holder's bytes are checked after every step, so a slot that was given to another block too early is found at once.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachesvc.arena.arena import Arena, Slot, SlotState
from cachesvc.arena.memory import ArenaMemory
from cachesvc.policy import LRU, S3FIFO, Policy

SLAB = 8 * 4096
SIZES = [100, 4096, 9000]
KEYS = st.integers(0, 11).map(lambda n: bytes([n]) * 18)


class ArenaMachine(RuleBasedStateMachine):
    policy: type[Policy[bytes]] = LRU

    def __init__(self) -> None:
        super().__init__()
        self.memory = ArenaMemory(4 * SLAB)
        self.arena = Arena(self.memory, self.policy(), SLAB)
        self.writing: list[tuple[Slot, bytes]] = []
        self.loading: list[tuple[Slot, bytes]] = []
        self.pinned: list[tuple[Slot, bytes]] = []
        self.content: dict[bytes, bytes] = {}
        """Of visible blocks that are not on disk: these must never be lost."""
        self.counter = 0

    def teardown(self) -> None:
        self.memory.close()

    def fill(self, slot: Slot) -> bytes:
        self.counter += 1
        text = self.counter.to_bytes(4, "little") * (slot.payload_bytes // 4)
        data = text.ljust(slot.payload_bytes, b"\xff")
        self.arena.view(slot)[:] = data
        return data

    @rule(keys=st.lists(KEYS, max_size=4, unique=True), size=st.sampled_from(SIZES))
    def reserve(self, keys: list[bytes], size: int) -> None:
        slots = self.arena.reserve(keys, size)
        assert [slot.identity for slot in slots] == keys[: len(slots)]
        self.writing += [(slot, self.fill(slot)) for slot in slots]

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), commit=st.booleans())
    def end_writing(self, data: st.DataObject, commit: bool) -> None:
        slot, content = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        if not commit:
            self.arena.abandon(slot)
        elif self.arena.publish([slot], [1], verified=True) == [True]:
            self.content[slot.identity] = content

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.content)))
        (slot,) = self.arena.pin([key])
        assert slot is not None, "a block that is not on disk was lost"
        assert slot.state is SlotState.DIRTY
        assert bytes(self.arena.view(slot)) == self.content.pop(key)
        self.arena.flushed([slot])
        self.arena.unpin([slot])

    @rule(key=KEYS, size=st.sampled_from(SIZES))
    def load(self, key: bytes, size: int) -> None:
        slot = self.arena.load(key, size)
        if slot is not None:
            self.loading.append((slot, self.fill(slot)))

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), good=st.booleans())
    def end_loading(self, data: st.DataObject, good: bool) -> None:
        slot, _ = self.loading.pop(data.draw(st.integers(0, len(self.loading) - 1)))
        if good:
            self.arena.loaded(slot, 1)
        else:
            self.arena.load_failed(slot)

    @rule(keys=st.lists(KEYS, max_size=4, unique=True), used=st.booleans())
    def pin(self, keys: list[bytes], used: bool) -> None:
        found = self.arena.pin(keys)
        if used:
            self.arena.touch(found)
        for slot in found:
            if slot is None:
                continue
            if self.arena.ready(slot):
                self.pinned.append((slot, bytes(self.arena.view(slot))))
            else:
                self.arena.unpin([slot])

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot, _ = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.arena.unpin([slot])

    @rule(key=KEYS)
    def discard(self, key: bytes) -> None:
        self.arena.discard([key])
        self.content.pop(key, None)
        assert not self.arena.resident(key)

    @invariant()
    def every_holder_still_has_its_bytes(self) -> None:
        self.arena.check()
        for slot, content in (*self.writing, *self.loading, *self.pinned):
            assert bytes(self.arena.view(slot)) == content, f"slot at {slot.offset} was given away while held"
        for key, content in self.content.items():
            (slot,) = self.arena.pin([key])
            assert slot is not None and bytes(self.arena.view(slot)) == content
            self.arena.unpin([slot])


class S3FifoArenaMachine(ArenaMachine):
    policy = S3FIFO


TestArenaLru = ArenaMachine.TestCase
TestArenaLru.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestArenaS3Fifo = S3FifoArenaMachine.TestCase
TestArenaS3Fifo.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)


def test_the_head_of_a_prefix_leaves_after_its_tail() -> None:
    memory = ArenaMemory(SLAB)
    arena = Arena(memory, LRU(), SLAB)
    prefix = [bytes([i]) * 18 for i in range(8)]
    for key in prefix:
        slot = arena.load(key, 4096)
        assert slot is not None
        arena.loaded(slot, 1)
    held = arena.pin(prefix)
    arena.touch(held)
    arena.unpin([slot for slot in held if slot is not None])
    for number in range(3):
        slot = arena.load(bytes([100 + number]) * 18, 4096)
        assert slot is not None
        arena.loaded(slot, 1)
    assert [arena.resident(key) for key in prefix] == [True] * 5 + [False] * 3
    memory.close()


def test_memory_goes_to_another_size_when_it_is_needed_there() -> None:
    memory = ArenaMemory(2 * SLAB)
    arena = Arena(memory, LRU(), SLAB)
    for number in range(16):
        slot = arena.load(bytes([number]) * 18, 4096)
        assert slot is not None
        arena.loaded(slot, 1)
    large = arena.load(b"large" * 3 + b"xyz", SLAB)
    assert large is not None
    arena.check()
    assert len(arena) == 9
    memory.close()


def test_half_of_the_arena_is_kept_for_what_is_on_disk() -> None:
    memory = ArenaMemory(4 * SLAB)
    arena = Arena(memory, LRU(), SLAB)
    assert len(arena.reserve([bytes([n]) * 18 for n in range(20)], 4096)) == 16
    assert arena.reserve([b"one more".ljust(18)], 4096) == []
    memory.close()


def test_the_shared_memory_cannot_be_cut_by_a_client() -> None:
    import os

    memory = ArenaMemory(SLAB)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.writable, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(memory.readable, b"x")
    memory.close()
