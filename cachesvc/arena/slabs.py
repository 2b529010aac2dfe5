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
        self.bytes_taken = 0

    def allocate(self, size: int, count: int) -> list[int]:
        """Offsets of up to `count` free slots of `size` bytes (whole pages), as many as there are, neighbours first.

        Raises `ValueError`.
        """
        if size <= 0 or size % PAGE or size > self.slab_bytes:
            raise ValueError(f"no slot has {size} bytes; whole pages up to {self.slab_bytes} are possible")
        found: list[int] = []
        candidates = self._open.setdefault(size, set())
        while len(found) < count and (candidates or self._free_slabs):
            if not candidates:
                number = self._free_slabs.pop()
                base = number * self.slab_bytes
                slots = self.slab_bytes // size
                self._slabs[number] = _Slab(size, [base + i * size for i in range(slots - 1, -1, -1)])
                candidates.add(number)
            number = next(iter(candidates))
            slab = self._slabs[number]
            part = slab.free[: -1 - count + len(found) : -1]
            del slab.free[-len(part) :]
            slab.taken.update(part)
            found += part
            if not slab.free:
                candidates.discard(number)
        self.bytes_taken += size * len(found)
        return found

    def free(self, offset: int) -> None:
        """Gives a slot back. Raises `ValueError` for one that is not taken."""
        number = offset // self.slab_bytes
        slab = self._slabs.get(number)
        if slab is None or offset not in slab.taken:
            raise ValueError(f"slot at {offset} is not taken")
        slab.taken.remove(offset)
        self.bytes_taken -= slab.slot
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
    def bytes_free(self) -> int:
        """Bytes of slabs that serve no size now."""
        return len(self._free_slabs) * self.slab_bytes

    def check(self) -> None:
        """Raises `AssertionError` when the books do not add up."""
        assert len(self._free_slabs) + len(self._slabs) == self.count
        assert self.bytes_taken == sum(slab.slot * len(slab.taken) for slab in self._slabs.values())
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
