"""The slab allocator against a plain model: no two slots ever overlap, and everything comes back."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachesvc.arena.slabs import Slabs, slot_bytes

SLAB = 16 * 4096


class SlabMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slabs = Slabs(5 * SLAB + 4096, SLAB)
        self.taken: dict[int, int] = {}

    @rule(pages=st.sampled_from([1, 3, 5, 16]), count=st.integers(0, 20))
    def allocate(self, pages: int, count: int) -> None:
        size = pages * 4096
        offsets = self.slabs.allocate(size, count)
        for offset in offsets:
            assert offset % 4096 == 0 and offset + size <= 5 * SLAB
            assert all(offset + size <= o or o + s <= offset for o, s in self.taken.items()), "slots overlap"
            self.taken[offset] = size
        if len(offsets) < count:
            whole = {o // SLAB for o in self.taken}
            assert len(whole) == 5, "a free slab was left while an allocation failed"
            room = {number: SLAB // s for number in whole for o, s in self.taken.items() if o // SLAB == number}
            mine = [number for number in whole if size in {s for o, s in self.taken.items() if o // SLAB == number}]
            assert all(sum(o // SLAB == number for o in self.taken) == room[number] for number in mine)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        del self.taken[offset]
        self.slabs.free(offset)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def neighbours(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        assert self.slabs.neighbours(offset) == {o for o in self.taken if o // SLAB == offset // SLAB}

    @invariant()
    def books_add_up(self) -> None:
        self.slabs.check()
        assert self.slabs.bytes_taken == sum(self.taken.values())
        assert self.slabs.bytes_free == (5 - len({o // SLAB for o in self.taken})) * SLAB


TestSlabs = SlabMachine.TestCase
TestSlabs.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_slots_are_whole_pages() -> None:
    assert [slot_bytes(n) for n in (1, 4096, 4097, 113_920)] == [4096, 4096, 8192, 114_688]
