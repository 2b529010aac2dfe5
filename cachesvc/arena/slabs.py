"""Dividing the arena into slots. Pure bookkeeping: offsets in, offsets out.

The memory is cut into slabs of one size; a slab serves slots of one size (a payload padded to 4 KiB) as long as any of
its slots is taken, and goes back to the free slabs with its last one. So one workload's payload size cannot hold memory
that it no longer uses, and there is no fragmentation to mend.

======  ==========================  =======================
slab    from → to                   by
======  ==========================  =======================
free    → serving slots of a size   `allocate`
serving → free                      `free` of its last slot
======  ==========================  =======================
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cachesvc.record import PAGE


def slot_bytes(payload_bytes: int) -> int:
    """Size of the slot of a payload: whole pages."""
    return -(-payload_bytes // PAGE) * PAGE


@dataclass
class _Slab:
    slot: int
    free: list[int]
    taken: set[int] = field(default_factory=set)


class Slabs:
    """Not thread-safe: the arena's lock covers it. `total` and `slab` are bytes; what is left over stays unused."""

    def __init__(self, total: int, slab: int) -> None:
        if slab <= 0 or slab % PAGE or total < slab:
            raise ValueError(f"an arena of {total} bytes cannot be cut into slabs of {slab}, a multiple of {PAGE}")
        self.slab_bytes = slab
        self.count = total // slab
        self._free_slabs = list(range(self.count - 1, -1, -1))
        self._slabs: dict[int, _Slab] = {}
        self._open: dict[int, set[int]] = {}
        """Slabs with a free slot, by slot size."""

    def allocate(self, size: int) -> int | None:
        """Offset of a free slot of `size` bytes (whole pages), or None when there is none. Raises `ValueError`."""
        if size <= 0 or size % PAGE or size > self.slab_bytes:
            raise ValueError(f"no slot has {size} bytes; whole pages up to {self.slab_bytes} are possible")
        candidates = self._open.setdefault(size, set())
        if not candidates:
            if not self._free_slabs:
                return None
            number = self._free_slabs.pop()
            base = number * self.slab_bytes
            slots = self.slab_bytes // size
            self._slabs[number] = _Slab(size, [base + i * size for i in range(slots - 1, -1, -1)])
            candidates.add(number)
        number = next(iter(candidates))
        slab = self._slabs[number]
        offset = slab.free.pop()
        slab.taken.add(offset)
        if not slab.free:
            candidates.discard(number)
        return offset

    def free(self, offset: int) -> None:
        """Gives a slot back. Raises `ValueError` for one that is not taken."""
        number = offset // self.slab_bytes
        slab = self._slabs.get(number)
        if slab is None or offset not in slab.taken:
            raise ValueError(f"slot at {offset} is not taken")
        slab.taken.remove(offset)
        slab.free.append(offset)
        self._open[slab.slot].add(number)
        if not slab.taken:
            self._open[slab.slot].discard(number)
            del self._slabs[number]
            self._free_slabs.append(number)

    def number(self, offset: int) -> int:
        """Of the slab in which `offset` lies."""
        return offset // self.slab_bytes

    def neighbours(self, offset: int) -> frozenset[int]:
        """All taken slots of the slab in which `offset` lies: what must go for the slab to become free."""
        return frozenset(self._slabs[offset // self.slab_bytes].taken)

    @property
    def bytes_taken(self) -> int:
        return sum(slab.slot * len(slab.taken) for slab in self._slabs.values())

    @property
    def bytes_free(self) -> int:
        """Bytes of slabs that serve no size now."""
        return len(self._free_slabs) * self.slab_bytes

    def check(self) -> None:
        """Raises `AssertionError` when the books do not add up."""
        assert len(self._free_slabs) + len(self._slabs) == self.count
        assert set(self._free_slabs).isdisjoint(self._slabs)
        for number, slab in self._slabs.items():
            base = number * self.slab_bytes
            every = set(slab.free) | slab.taken
            assert slab.taken, f"slab {number} serves nobody and is not free"
            assert len(slab.free) + len(slab.taken) == len(every) == self.slab_bytes // slab.slot
            assert all(
                base <= o and o + slab.slot <= base + self.slab_bytes and (o - base) % slab.slot == 0 for o in every
            )
            assert (number in self._open[slab.slot]) == bool(slab.free)
        for size, numbers in self._open.items():
            assert all(self._slabs[number].slot == size for number in numbers)
