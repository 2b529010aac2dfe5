"""Readers that hold the oldest blocks do not keep the rest of the arena from being used."""

from __future__ import annotations

from cachesvc.arena.arena import Arena
from cachesvc.arena.memory import ArenaMemory
from cachesvc.policy import LRU


def test_many_pinned_blocks_at_the_cold_end_are_passed_over() -> None:
    memory = ArenaMemory(4096 * 4096)
    arena = Arena(memory, LRU(), 1 << 20)
    held = []
    for first, end in ((0, 1500), (1500, 2800), (2800, 4096)):
        identities = [number.to_bytes(16) for number in range(first, end)]
        slots = arena.reserve(identities, 4096)
        assert len(slots) == len(identities)
        arena.publish(slots, [1] * len(slots), verified=True)
        arena.flushed(slots)
        if first == 0:
            held = arena.pin(identities)
    assert len(arena.reserve([b"n" * 16], 4096)) == 1
    assert all(slot is not None and not slot.detached for slot in held)
    arena.check()
    memory.close()
