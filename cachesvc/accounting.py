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
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cachesvc.histograms import DEPTHS, bucket
from cachesvc.limits import MAX_ACCOUNTING_ROWS, MAX_REMEMBERED_PASSES
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

    row: Row
    block_tokens: int
    block_bytes: int
    local: int
    counts: dict[str, int]
    number: int
    again: bool
    """Whether it had asked before."""
    settled: bool = False
    ages: list[tuple[int, int]] = field(default_factory=list)
    """Of the matched blocks, in order: bucket of the time since their last use, and how many there are of it."""

    def add(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            self.row[name] += count
            self.counts[name] = self.counts.get(name, 0) + count

    def withdraw(self) -> None:
        for name, count in self.counts.items():
            self.row[name] -= count
        self.settled = True


class Accounting:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[RowKey, Row] = {}
        self._passes: OrderedDict[bytes, Pass] = OrderedDict()
        self._opened = 0

    def row(self, key: RowKey) -> Row:
        with self._lock:
            return self._row(key)

    def open(
        self,
        pass_id: bytes,
        key: RowKey,
        *,
        block_tokens: int,
        block_bytes: int = 0,
        input_tokens: int,
        local_tokens: int,
        asked_blocks: int,
        matched_blocks: int,
        reason: MissReason.ValueType,
        counted: bool = True,
    ) -> Pass:
        """Counts a pass; tokens behind the match miss for `reason`, those behind the last asked block as partial tail.

        Tokens that the engine held itself are neither hits nor misses of ours. One that is not `counted` is settled
        from the beginning.
        """
        if not counted:
            return Pass(Row(), block_tokens, block_bytes, local_tokens, {}, UNCOUNTED, again=False, settled=True)
        matched = max(matched_blocks * block_tokens, local_tokens)
        asked = max(asked_blocks * block_tokens, matched)
        counts = {"passes": 1, "input": input_tokens, "local": local_tokens, "pending": matched - local_tokens}
        if asked > matched:
            counts[_miss(reason)] = asked - matched
        if input_tokens > asked:
            counts[_PARTIAL_TAIL] = input_tokens - asked
        with self._lock:
            self._opened += 1
            earlier = self._passes.pop(pass_id, None) if pass_id else None
            opened = Pass(
                self._row(key), block_tokens, block_bytes, local_tokens, {}, self._opened, earlier is not None
            )
            if earlier is not None:
                earlier.withdraw()
            if pass_id:
                self._passes[pass_id] = opened
                if len(self._passes) > MAX_REMEMBERED_PASSES:
                    self._passes.popitem(last=False)
            opened.add(counts)
        return opened

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
            counts = {"pending": -left}
            for tier in set(used):
                blocks, name = used.count(tier), _tier(tier)
                counts[HIT + name] = blocks * opened.block_tokens - (part if tier == used[0] else 0)
                counts[LOADED + name] = blocks * opened.block_bytes
                left -= counts[HIT + name]
            if left:
                counts[_miss(reason)] = left
            hit = -counts["pending"] - left
            counts[f"depth.{bucket(DEPTHS, hit)}"] = 1
            position = 0
            for age, blocks in opened.ages:
                first, position = position, position + blocks
                tokens = (min(position, loaded_blocks) - max(first, own)) * opened.block_tokens
                if tokens > 0:
                    name = f"age.{age}"
                    counts[name] = counts.get(name, 0) + tokens
            opened.add(counts)

    def unreachable(self, key: RowKey, tokens: int) -> None:
        """Counts input of passes that could not ask the daemon."""
        self.add(self.row(key), {"input": tokens, _miss(MissReason.UNREACHABLE): tokens})

    def add(self, row: Row, counts: Mapping[str, int]) -> None:
        """Counts what belongs to no pass, or stays when its pass is withdrawn."""
        with self._lock:
            for name, count in counts.items():
                row[name] += count

    def rows(self) -> list[tuple[RowKey, Row]]:
        """Copies of all rows, by class, model and tenant."""
        with self._lock:
            return [(key, Counter(row)) for key, row in sorted(self._rows.items())]

    def _row(self, key: RowKey) -> Row:
        if key not in self._rows and len(self._rows) >= MAX_ACCOUNTING_ROWS:
            key = RowKey(key.traffic_class, OTHER, OTHER)
        return self._rows.setdefault(key, Counter())


def by_prefix(counts: Iterable[tuple[str, int]], prefix: str) -> dict[str, int]:
    """Counts whose name begins so, without it and without zeros; ``HIT`` and ``MISS`` are such beginnings."""
    return {name.removeprefix(prefix): count for name, count in sorted(counts) if count and name.startswith(prefix)}
