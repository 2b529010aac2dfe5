"""One cache of a capacity, a policy and TTLs, asked request after request.

A request matches its longest stored prefix, then all its full blocks are used last first, the missing ones written, and
blocks over the capacity leave by the daemon's own policy code. Expired blocks leave before anything else. Output is not
written. Memory is that of the blocks held and of a bounded number of those that left.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat, takewhile
from typing import Final

from cachesvc.errors import TraceError
from cachesvc.limits import MAX_REPLAY_GHOSTS
from cachesvc.policy import FIFO, LRU, S3FIFO, Policy
from cachesvc.trace.formats import Request
from cachesvc.trace.sampling import EXACT, TAGS, Sampled

POLICIES: Final[Mapping[str, type[Policy[int]]]] = {"lru": LRU, "fifo": FIFO, "s3fifo": S3FIFO}
INFINITE: Final = "infinite"

NEVER_SEEN: Final = "never_seen"
EXPIRED: Final = "expired"
EVICTED: Final = "evicted"
PARTIAL_TAIL: Final = "partial_tail"
HIT: Final = "hit"
REASONS: Final = (NEVER_SEEN, EXPIRED, EVICTED, PARTIAL_TAIL)


@dataclass(frozen=True)
class TTL:
    """How long blocks live, in seconds by class, or `plain` for all classes; since last use, or since written."""

    text: str
    by_class: Mapping[str, float] = field(default_factory=dict)
    plain: float | None = None
    sliding: bool = True

    def of(self, traffic_class: str) -> float:
        """Raises `TraceError` for a class that has none."""
        ttl = self.by_class.get(traffic_class, self.plain)
        if ttl is None:
            raise TraceError(f"unknown class {traffic_class!r}: --ttl {self.text} says nothing of it")
        return ttl

    @property
    def differs(self) -> bool:
        """Whether classes have different ones."""
        return len({*self.by_class.values(), *([] if self.plain is None else [self.plain])}) > 1


@dataclass
class Counts:
    """What one traffic class asked and got. Hits and misses are in blocks, by tag when the trace is sampled."""

    requests: int = 0
    input_tokens: int = 0
    blocks: int = 0
    hits: Counter[int] = field(default_factory=Counter)
    misses: dict[str, Counter[int]] = field(default_factory=lambda: {reason: Counter() for reason in REASONS[:3]})
    local: Counter[str] = field(default_factory=Counter)
    """Tokens that the engine held itself, by what else they would have been: `HIT` or a reason."""


class Simulation:
    """`capacity` in blocks of `block` tokens, None for no limit (then there is no policy either)."""

    def __init__(self, policy: str, capacity: int | None, ttl: TTL | None, block: int) -> None:
        self.policy, self.capacity, self.ttl, self.block = policy, capacity, ttl, block
        self.counts: dict[str, Counts] = {}
        self._limit = capacity or 0
        self._now = 0
        self._held: set[int] = set()
        self._scale = 0
        """How many blocks a sampled one stands for; 0: nothing is sampled."""
        self._exact = 0
        """Blocks held that stand for themselves only, when sampled."""
        self._policy = None if capacity is None else POLICIES[policy]()
        self._expiry = None if ttl is None else _Expiry(ttl)
        self._ghosts = _Ghosts()
        # A block that leaves for one of its own request is written again in turn: then a fixed TTL begins anew, and the
        # longer TTL of another class that used it is forgotten.
        self._at_once = policy == "lru" and (ttl is None or (ttl.sliding and not ttl.differs))

    @property
    def forgotten(self) -> int:
        """Blocks that left so long ago that they count as never seen."""
        return self._ghosts.forgotten

    def ask(self, request: Request | Sampled) -> None:
        held, keys = self._held, request.keys
        # Time never goes back: writers of one trace may be a little out of order.
        now = self._now = max(self._now, round(request.at * 1e6))
        if self._expiry is not None:
            expired = self._expiry.due(now)
            if expired:
                self._drop(expired, EXPIRED)
                if self._policy is not None:
                    for key in expired:
                        self._policy.remove(key)
        hits = len(keys) if held.issuperset(keys) else len(list(takewhile(held.__contains__, keys)))
        missed = keys[hits:]
        counts = self.counts.get(request.traffic_class)
        if counts is None:
            counts = self.counts[request.traffic_class] = Counts()
        counts.requests += 1
        counts.input_tokens += request.input_tokens
        if isinstance(request, Sampled):
            counts.blocks += request.blocks
            counts.hits.update(map(TAGS.__and__, keys[:hits]))
            self._scale, written, missing = request.scale, request.written, request.written
        else:
            counts.blocks += len(keys)
            counts.hits[0] += hits
            written, missing = keys, missed
        reasons = self._reasons(missed) if missed else []
        if self._scale:
            for key, reason in zip(missed, reasons, strict=True):
                counts.misses[reason][key & TAGS] += 1
        else:
            for reason, blocks in Counter(reasons).items():
                counts.misses[reason][0] += blocks
        if isinstance(request, Request) and request.local_tokens:
            self._count_local(counts, request.local_tokens, hits, reasons)
        fresh = missing if held.isdisjoint(missing) else [key for key in missing if key not in held]
        if self._policy is None:
            held.update(fresh)
        elif self._at_once:
            self._use_lru(written, fresh)
        else:
            fresh = self._use(written)
        if self._expiry is not None:
            if self._policy is not None and not held.issuperset(written):
                written, fresh = ([key for key in some if key in held] for some in (written, fresh))
            self._expiry.use(request.traffic_class, written[::-1], fresh, now)

    def _reasons(self, missed: Sequence[int]) -> list[str]:
        """Why each block missed. One that is held behind a hole misses for the reason of the hole."""
        if not self._ghosts:
            return [NEVER_SEEN] * len(missed)
        reasons = self._ghosts.pop_all(missed)
        if not self._held.isdisjoint(missed):
            for index, key in enumerate(missed):
                if key in self._held:
                    reasons[index] = reasons[index - 1]
        return reasons

    def _count_local(self, counts: Counts, tokens: int, hits: int, reasons: Sequence[str]) -> None:
        """The first `tokens` are neither hits nor misses of ours, as in the daemon's accounting."""
        counts.local[HIT] += min(tokens, hits * self.block)
        left = tokens - hits * self.block
        for reason in (*reasons, PARTIAL_TAIL):
            if left <= 0:
                break
            part = left if reason == PARTIAL_TAIL else min(left, self.block)
            counts.local[reason] += part
            left -= part

    def _use_lru(self, written: Sequence[int], fresh: Sequence[int]) -> None:
        """All at once: what stays are the most recent ones, whenever the others are made to leave."""
        assert self._policy is not None
        self._held.update(fresh)
        self._policy.insert_all(reversed(fresh))
        known = len(written) - len(fresh)
        # Nearly always the fresh ones are the tail: then only what lies before them is still to be touched.
        self._policy.touch_all(reversed(written[:known] if written[known:] == fresh else written))
        if self._scale:
            self._exact += _exact(fresh)
        while (over := self._blocks - self._limit) > 0:
            self._drop(self._policy.evict(-(-over // (self._scale or 1))), EVICTED)

    def _use(self, written: Sequence[int]) -> list[int]:
        """One after the other, each new one after others have made room. Blocks that were written."""
        assert self._policy is not None
        held, policy, fresh = self._held, self._policy, []
        for key in reversed(written):
            if key in held:
                policy.touch(key)
                continue
            own = self._scale if self._scale and key & TAGS != EXACT else 1
            while held and self._blocks + own > self._limit:
                self._drop(policy.evict(1), EVICTED)
            policy.insert(key)
            held.add(key)
            fresh.append(key)
            if self._scale:
                self._exact += _exact((key,))
        return fresh

    @property
    def _blocks(self) -> int:
        """Blocks held; a sampled one stands for `scale` blocks, an exact one for itself."""
        return self._exact + self._scale * (len(self._held) - self._exact) if self._scale else len(self._held)

    def _drop(self, keys: Sequence[int], reason: str) -> None:
        self._held.difference_update(keys)
        self._ghosts.add(keys, reason)
        if self._scale:
            self._exact -= _exact(keys)
        if self._expiry is not None:
            self._expiry.remove(keys)


def _exact(keys: Iterable[int]) -> int:
    return sum(key & TAGS == EXACT for key in keys)


class _Expiry:
    """Blocks in the order in which they expire: one queue for each TTL, in microseconds so that no sum is rounded.

    A block that several classes use lives as long as the longest TTL of those says, as in the daemon.
    """

    def __init__(self, ttl: TTL) -> None:
        self._ttl = ttl
        self._queues: dict[int, OrderedDict[int, int]] = {}

    def due(self, now: int) -> list[int]:
        """Keys whose last use, or writing, is longer ago than their TTL."""
        due: list[int] = []
        for ttl, queue in self._queues.items():
            due += [key for key, _ in takewhile(lambda item: now - item[1] > ttl, queue.items())]  # noqa: B023
        return due

    def use(self, traffic_class: str, keys: Sequence[int], fresh: Sequence[int], now: int) -> None:
        ttl = round(self._ttl.of(traffic_class) * 1e6)
        own = self._queues.get(ttl)
        if own is None:
            own = self._queues[ttl] = OrderedDict()
        if not self._ttl.sliding:
            own.update(dict.fromkeys(fresh, now))
            return
        for other, queue in self._queues.items():
            if other != ttl and not queue.keys().isdisjoint(keys):
                shared = [key for key in keys if key in queue]
                if other > ttl:
                    _touch(queue, shared, now)
                    keys = [key for key in keys if key not in queue]
                else:
                    for key in shared:
                        del queue[key]
        _touch(own, keys, now)

    def remove(self, keys: Iterable[int]) -> None:
        for queue in self._queues.values():
            deque(map(queue.pop, keys, repeat(None)), maxlen=0)


def _touch(queue: OrderedDict[int, int], keys: Sequence[int], now: int) -> None:
    queue.update(dict.fromkeys(keys, now))
    deque(map(queue.move_to_end, keys), maxlen=0)


class _Ghosts:
    """Why blocks left: the last million at least, in two generations, of which the older is forgotten as a whole."""

    def __init__(self) -> None:
        self._young: dict[int, str] = {}
        self._old: dict[int, str] = {}
        self.forgotten = 0

    def __bool__(self) -> bool:
        return bool(self._young or self._old)

    def add(self, keys: Iterable[int], reason: str) -> None:
        self._young.update(dict.fromkeys(keys, reason))
        if len(self._young) >= MAX_REPLAY_GHOSTS:
            self.forgotten += len(self._old)
            self._old, self._young = self._young, {}

    def pop_all(self, keys: Sequence[int]) -> list[str]:
        """Why they left; never seen what is not remembered."""
        if not self._old:
            return list(map(self._young.pop, keys, repeat(NEVER_SEEN)))
        old = map(self._old.pop, keys, repeat(NEVER_SEEN))
        return [self._young.pop(key, why) for key, why in zip(keys, old, strict=True)]
