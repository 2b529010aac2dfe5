"""Which block leaves a full tier: one code for the arena and for replay.

A policy orders keys; it knows nothing of sizes, pins or time. Prefix caches touch a prompt's blocks tail first, so that
the head of a prefix is always at least as recent as its tail and leaves after it; with that order LRU is a stack
algorithm (a larger cache holds everything a smaller one does).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from typing import Final, Generic, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Policy(Protocol[Key]):
    def insert(self, key: Key) -> None:
        """A new key, most recently used. Raises nothing for a known one: it is touched."""
        ...

    def insert_all(self, keys: Iterable[Key]) -> None:
        """`insert`, for many keys that are not known."""
        ...

    def touch(self, key: Key) -> None:
        """A use of a key; unknown keys are ignored."""
        ...

    def touch_all(self, keys: Iterable[Key]) -> None:
        """`touch`, for many known keys in this order."""
        ...

    def remove(self, key: Key) -> None:
        """Forgets a key that left for another reason; unknown keys are ignored."""
        ...

    def victims(self) -> Iterator[Key]:
        """Keys in the order in which they should leave. Nothing is removed; change nothing while iterating."""
        ...

    def evict(self, count: int) -> list[Key]:
        """Removes that many keys, one victim after the other, or all that there are; the keys that left."""
        ...

    def __len__(self) -> int: ...


class LRU(Generic[Key]):
    """Least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def insert_all(self, keys: Iterable[Key]) -> None:
        self._order.update(dict.fromkeys(keys))

    def touch(self, key: Key) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    def touch_all(self, keys: Iterable[Key]) -> None:
        deque(map(self._order.move_to_end, keys), maxlen=0)  # a loop in C: look-ups touch thousands

    def remove(self, key: Key) -> None:
        self._order.pop(key, None)

    def victims(self) -> Iterator[Key]:
        return iter(self._order)

    def evict(self, count: int) -> list[Key]:
        return [self._order.popitem(last=False)[0] for _ in range(min(count, len(self._order)))]

    def __len__(self) -> int:
        return len(self._order)


class FIFO(LRU[Key]):
    """First in, first out: uses change nothing."""

    def insert(self, key: Key) -> None:
        self._order[key] = None

    def touch(self, key: Key) -> None:
        pass

    def touch_all(self, keys: Iterable[Key]) -> None:
        pass


class S3FIFO(Generic[Key]):
    """S3-FIFO (Yang et al., SOSP 2023): a small probationary FIFO, a main FIFO, and a ghost list of the evicted.

    New keys enter the small queue, keys remembered as ghosts the main one. At eviction a key used since it entered
    moves from small to main, or goes round in main with one use less; the first unused one leaves. The small queue is
    drained while it holds more than a tenth of the keys. Ghosts are as many as there are keys in main.
    """

    SMALL_SHARE: Final = 0.1
    MAX_USES: Final = 3

    def __init__(self) -> None:
        self._small: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghosts: OrderedDict[Key, None] = OrderedDict()

    def insert(self, key: Key) -> None:
        if key in self._small or key in self._main:
            self.touch(key)
        elif key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def insert_all(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.insert(key)

    def touch(self, key: Key) -> None:
        for queue in (self._small, self._main):
            if key in queue:
                queue[key] = min(queue[key] + 1, self.MAX_USES)

    def touch_all(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.touch(key)

    def remove(self, key: Key) -> None:
        if self._small.pop(key, None) is not None:
            self._ghosts[key] = None
            while len(self._ghosts) > max(1, len(self._main)):
                self._ghosts.popitem(last=False)
        self._main.pop(key, None)

    def victims(self) -> Iterator[Key]:
        self._promote()
        queues = (self._small, self._main) if self._small_is_long() else (self._main, self._small)
        return chain.from_iterable(
            (key for key, uses in queue.items() if bool(uses) is used) for queue in queues for used in (False, True)
        )

    def evict(self, count: int) -> list[Key]:
        gone = []
        for _ in range(min(count, len(self))):
            gone.append(next(self.victims()))
            self.remove(gone[-1])
        return gone

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def _small_is_long(self) -> bool:
        return bool(self._small) and len(self._small) > self.SMALL_SHARE * len(self)

    def _promote(self) -> None:
        """Moves used keys on until the head of the queue to be drained is an unused one."""
        while self._small_is_long():
            key, uses = next(iter(self._small.items()))
            if not uses:
                return
            del self._small[key]
            self._main[key] = 0
        while self._main:
            key, uses = next(iter(self._main.items()))
            if not uses:
                return
            self._main[key] = uses - 1
            self._main.move_to_end(key)
