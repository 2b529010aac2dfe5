"""The hit rate of LRU at every capacity, in one pass (Mattson et al., 1970).

With leaf-first touching a prefix cache is a stack: a block is a hit at a capacity if no more blocks than that were used
since it was. A request uses a whole path of the prefix tree, so the blocks of a path that were last used by the same
request lie side by side on the stack, and a path is a few such runs. Work per block is two look-ups in a dictionary;
positions are kept per request, in a Fenwick tree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Final

from cachesvc.errors import TraceError
from cachesvc.trace.formats import Request
from cachesvc.trace.sampling import EXACT, TAGS, Estimate, Sampled, estimate

_FIRST_SLOTS: Final = 1 << 12


@dataclass(slots=True)
class _Path:
    """What is left of a request on the stack: a slot of the tree, the depth of its first block, and its blocks."""

    slot: int
    start: int
    left: int


class Curve:
    """Ask all requests, then `hits` at any capacity. Memory is that of the distinct blocks of the trace."""

    def __init__(self) -> None:
        self.requests = 0
        self.input_tokens = 0
        self.blocks = 0
        self.scale = 0
        """How many blocks a sampled one stands for; 0: nothing is sampled."""
        self._last_use: dict[int, int] = {}
        self._paths: dict[int, _Path] = {}
        self._tree = _Fenwick(_FIRST_SLOTS)
        self._slots = 0
        self._total = 0
        self._steps: defaultdict[int, Counter[int]] = defaultdict(Counter)
        """By tag: how the number of blocks at a stack position differs from that at the position before."""
        self._references: Counter[int] = Counter()
        self._sums: dict[int, Callable[[int], int]] = {}

    @property
    def distinct_blocks(self) -> int:
        """Blocks ever asked for: no capacity beyond this helps."""
        return self._total

    def ask(self, request: Request | Sampled) -> None:
        self.requests += 1
        self.input_tokens += request.input_tokens
        if isinstance(request, Sampled):
            self.blocks += request.blocks
            self.scale = request.scale
            written = request.written
        else:
            self.blocks += len(request.keys)
            written = request.keys
        if written:
            self._walk(request.keys, written)

    def _walk(self, keys: list[int], written: list[int]) -> None:
        steps, depth, taken = self._steps[0], 0, 0
        for last, run in groupby(map(self._last_use.get, keys)):
            length = len(list(run))
            if last is None:
                if not self.scale and depth + length < len(keys):
                    raise TraceError("a block is known, but not its prefix: ids are not chained, so there is no curve")
            else:
                path = self._paths[last]
                above = self._total - self._tree.sum(path.slot) + taken
                if self.scale:
                    size = self._count(keys[depth : depth + length], above)
                else:
                    size = length
                    if path.start != depth:
                        raise TraceError("a block lies under two prefixes: ids are not chained, so there is no curve")
                    steps[above + 1] += 1
                    steps[above + size + 1] -= 1
                path.start = depth + length
                path.left -= size
                taken += size
                self._tree.add(path.slot, -size)
                self._total -= size
                if not path.left:
                    del self._paths[last]
            depth += length
        if self.scale:
            self._references.update(map(TAGS.__and__, keys))
        self._put(written)

    def _put(self, written: list[int]) -> None:
        if self._slots == self._tree.size:
            self._compact()
        size = sum(map(self._weight, written)) if self.scale else len(written)
        self._last_use.update(dict.fromkeys(written, self.requests))
        self._paths[self.requests] = _Path(self._slots, 0, size)
        self._tree.add(self._slots, size)
        self._total += size
        self._slots += 1

    def _weight(self, key: int) -> int:
        return 1 if key & TAGS == EXACT else self.scale

    def _count(self, keys: list[int], above: int) -> int:
        """Counts sampled keys that lie side by side below `above` blocks; the blocks they stand for."""
        position = above
        for key in keys:
            position += self._weight(key)
            steps = self._steps[key & TAGS]
            steps[position] += 1
            steps[position + 1] -= 1
        return position - above

    def _compact(self) -> None:
        """Numbers what is left of old requests anew, in the same order."""
        paths = sorted(self._paths.values(), key=lambda path: path.slot)
        size = self._tree.size if 2 * len(paths) <= self._tree.size else 2 * self._tree.size
        self._tree = _Fenwick(size)
        for slot, path in enumerate(paths):
            path.slot = slot
            self._tree.add(slot, path.left)
        self._slots = len(paths)

    # ---- the result ----------------------------------------------------------------------------------------------

    def hits(self, capacity: int) -> Estimate:
        """Blocks that LRU of `capacity` blocks would have hit; without sampling the error is 0."""
        if not self._sums:
            self._sums = {tag: _summed(steps) for tag, steps in self._steps.items()}
        found = Counter({tag: hits(capacity) for tag, hits in self._sums.items()})
        return estimate(found, self._references, self.blocks) if self.scale else Estimate(found[0], 0.0)


def _summed(steps: Counter[int]) -> Callable[[int], int]:
    """The sum over positions 1 to n of a function that is given by its steps."""
    starts = sorted(steps)
    levels = list(accumulate(steps[start] for start in starts))
    lengths = (after - start for start, after in pairwise(starts))
    before = [0, *accumulate(level * length for level, length in zip(levels, lengths, strict=False))]

    def up_to(position: int) -> int:
        index = bisect_right(starts, position) - 1
        return before[index] + levels[index] * (position + 1 - starts[index]) if index >= 0 else 0

    return up_to


class _Fenwick:
    """Sums over the first slots of a table of `size` numbers, a power of two."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._sums = [0] * (size + 1)

    def add(self, slot: int, amount: int) -> None:
        sums, index = self._sums, slot + 1
        while index <= self.size:
            sums[index] += amount
            index += index & -index

    def sum(self, slot: int) -> int:
        """Of the slots up to and with this one."""
        sums, index, total = self._sums, slot + 1, 0
        while index:
            total += sums[index]
            index &= index - 1
        return total
