"""One accounting of every pass: hit tokens by tier, missed tokens by reason; they sum to the input.

A pass is opened by Match, which already knows its misses; what matched is *pending* until the engine says how much of
it was used (Release) or the lease ends. A pass that asks again is withdrawn first, so that it counts once. Always::

    input = local + pending + Σ hits + Σ misses

Counts of a row have names: ``passes, input, local, pending, hit.TIER, miss.REASON, new, loaded.TIER, stored_blocks,
stored_bytes, depth.N, age.N`` (tokens; passes and blocks are numbers, ``loaded`` is in bytes; N is a bucket of
`cachesvc.histograms`).
"""

from __future__ import annotations

import functools
import heapq
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cachesvc.clock import Clock, SystemClock
from cachesvc.histograms import DEPTHS, bucket
from cachesvc.limits import CLOSE_SECONDS, CLOSE_TIMED_OUT_SECONDS, MAX_ACCOUNTING_ROWS, MAX_REMEMBERED_PASSES
from cachesvc.rpc.cache_pb2 import MissReason, Tier

OTHER = "other"

HIT: Final = "hit."
MISS: Final = "miss."
LOADED: Final = "loaded."

UNCOUNTED: Final = 0
"""Number of a pass that is not counted."""


@functools.cache
def _tier(tier: int) -> str:
    return Tier.Name(Tier.ValueType(tier)).removeprefix("TIER_").lower()


@functools.cache
def _miss(reason: MissReason.ValueType) -> str:
    return MISS + MissReason.Name(reason).lower()


_PARTIAL_TAIL = _miss(MissReason.PARTIAL_TAIL)

Row = Counter[str]


class RowKey(NamedTuple):
    traffic_class: str
    model: str
    tenant: str = ""


@dataclass(slots=True)
class Pass:
    """One pass, and what it has added to its row."""

    key: RowKey
    block_tokens: int
    block_bytes: int
    last_bytes: int
    """Of checkpoints, which are loaded with the last matched block."""
    local: int
    number: int
    again: bool = False
    """Whether it had asked before."""
    counts: Row = field(default_factory=Counter)
    settled: bool = False
    closed: bool = False
    ages: list[tuple[int, int]] = field(default_factory=list)
    """Of the matched blocks, in order: bucket of the time since their last use, and how many there are of it."""


class Accounting:
    """Thread-safe.

    A pass is in `rows` from its beginning on. In `closed_rows`, whose counts never fall, it is once it was settled
    `CLOSE_SECONDS` ago, or timed out `CLOSE_TIMED_OUT_SECONDS` ago; if it asks again after that, it stays counted as it
    was.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._rows: dict[RowKey, Row] = {}
        self._closed: dict[RowKey, Row] = {}
        self._passes: OrderedDict[bytes, Pass] = OrderedDict()
        self._to_close: list[tuple[float, int, Pass]] = []
        self._opened = 0

    def open(
        self,
        pass_id: bytes,
        key: RowKey,
        *,
        block_tokens: int,
        block_bytes: int = 0,
        last_bytes: int = 0,
        input_tokens: int,
        local_tokens: int,
        asked_blocks: int,
        matched_blocks: int,
        reason: MissReason.ValueType,
        counted: bool = True,
    ) -> Pass:
        """Counts a pass; tokens behind the match miss for `reason`, those behind the last asked block as partial tail.

        Tokens that the engine held itself are neither hits nor misses of ours. One that is not `counted`, or that was
        counted and closed before, has the number `UNCOUNTED`, and nothing is counted for it.
        """
        matched = max(matched_blocks * block_tokens, local_tokens)
        asked = max(asked_blocks * block_tokens, matched)
        counts = Counter({"passes": 1, "input": input_tokens, "local": local_tokens, "pending": matched - local_tokens})
        if asked > matched:
            counts[_miss(reason)] = asked - matched
        if input_tokens > asked:
            counts[_PARTIAL_TAIL] = input_tokens - asked
        with self._lock:
            earlier = self._passes.get(pass_id) if pass_id and counted else None
            sizes = block_tokens, block_bytes, last_bytes, local_tokens
            if not counted or (earlier is not None and earlier.closed):
                return Pass(key, *sizes, UNCOUNTED, settled=True, closed=True)
            self._opened += 1
            opened = Pass(self._known(key), *sizes, self._opened, earlier is not None)
            if earlier is not None:
                counts["new"] += earlier.counts["new"]  # for it they were; this time they were not
                self._rows[earlier.key].subtract(earlier.counts)
                earlier.settled = earlier.closed = True
            if pass_id:
                self._passes[pass_id] = opened
                self._passes.move_to_end(pass_id)
                if len(self._passes) > MAX_REMEMBERED_PASSES:
                    self._passes.popitem(last=False)
            self._add(opened, counts)
        return opened

    def note_new(self, opened: Pass, tokens: int) -> None:
        """So many tokens of the pass were never there before."""
        with self._lock:
            if not opened.closed:
                self._add(opened, {"new": tokens})

    def settle(self, opened: Pass, tiers: bytes, loaded_blocks: int, reason: MissReason.ValueType) -> None:
        """Turns pending tokens into hits (`loaded_blocks` from the first on) and misses. Only the first call counts.

        `tiers` holds one byte per matched block. Blocks that begin before the engine's own cache ends count only with
        the tokens behind it.
        """
        with self._lock:
            if opened.settled:
                return
            opened.settled = True
            own, part = divmod(opened.local, opened.block_tokens)
            used = tiers[own:loaded_blocks]
            left = opened.counts["pending"]
            counts = Counter({"pending": -left})
            for tier in set(used):
                blocks, name = used.count(tier), _tier(tier)
                counts[HIT + name] = blocks * opened.block_tokens - (part if tier == used[0] else 0)
                counts[LOADED + name] = blocks * opened.block_bytes
                left -= counts[HIT + name]
            if used and loaded_blocks >= len(tiers):
                counts[LOADED + _tier(tiers[-1])] += opened.last_bytes
            hit = opened.counts["pending"] - left
            if left < 0:  # a recording without its beginning: the daemon knew of blocks that nobody knows of now
                missed = next((n for n in opened.counts if n.startswith(MISS) and n != _PARTIAL_TAIL), _PARTIAL_TAIL)
                counts[missed] = left
            elif left:
                counts[_miss(reason)] = left
            counts[f"depth.{bucket(DEPTHS, hit)}"] = 1
            position = 0
            for age, blocks in opened.ages:
                first, position = position, position + blocks
                tokens = (min(position, loaded_blocks) - max(first, own)) * opened.block_tokens
                if tokens > 0:
                    counts[f"age.{age}"] += tokens
            self._add(opened, counts)
            delay = CLOSE_TIMED_OUT_SECONDS if reason == MissReason.TIMED_OUT else CLOSE_SECONDS
            heapq.heappush(self._to_close, (self._clock.monotonic() + delay, opened.number, opened))

    def unreachable(self, key: RowKey, tokens: int) -> None:
        """Counts input of passes that could not ask the daemon."""
        self.add(key, {"input": tokens, _miss(MissReason.UNREACHABLE): tokens})

    def add(self, key: RowKey, counts: Mapping[str, int]) -> None:
        """Counts what belongs to no pass."""
        with self._lock:
            known = self._known(key)
            self._rows[known].update(counts)
            self._closed[known].update(counts)

    def close(self, *, all_settled: bool = False) -> None:
        """Closes the passes that were settled long enough ago, or all settled ones."""
        with self._lock:
            now = self._clock.monotonic()
            while self._to_close and (all_settled or self._to_close[0][0] <= now):
                *_, settled = heapq.heappop(self._to_close)
                if not settled.closed:
                    settled.closed = True
                    self._closed[settled.key].update(settled.counts)

    def rows(self) -> list[tuple[RowKey, Row]]:
        """Copies of all rows, by class, model and tenant."""
        with self._lock:
            return [(key, Counter(row)) for key, row in sorted(self._rows.items())]

    def closed_rows(self) -> list[tuple[RowKey, Row]]:
        """The same of closed passes alone."""
        with self._lock:
            return [(key, Counter(row)) for key, row in sorted(self._closed.items())]

    def _add(self, opened: Pass, counts: Mapping[str, int]) -> None:
        self._rows[opened.key].update(counts)
        opened.counts.update(counts)

    def _known(self, key: RowKey) -> RowKey:
        """The key of a row that there is: that of all others once there are too many."""
        if key not in self._rows and len(self._rows) >= MAX_ACCOUNTING_ROWS:
            key = RowKey(key.traffic_class, OTHER, OTHER)
        if key not in self._rows:
            self._rows[key], self._closed[key] = Counter(), Counter()
        return key


def by_prefix(counts: Iterable[tuple[str, int]], prefix: str) -> dict[str, int]:
    """Counts whose name begins so, without it and without zeros; ``HIT`` and ``MISS`` are such beginnings."""
    return {name.removeprefix(prefix): count for name, count in sorted(counts) if count and name.startswith(prefix)}
