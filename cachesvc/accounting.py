"""One accounting of every pass: hit tokens by tier, missed tokens by reason; they sum to the input.

A pass is opened by Match, which already knows its misses; what matched is *pending* until the engine says how much of
it was used (Release) or the lease ends. A pass that asks again is withdrawn first, so that it counts once. Always::

    input = local + pending + Σ hits + Σ misses
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from cachesvc.limits import MAX_ACCOUNTING_ROWS, MAX_REMEMBERED_PASSES
from cachesvc.rpc.cache_pb2 import MissReason, Tier

OTHER = "other"


@functools.cache
def tier_name(tier: Tier.ValueType) -> str:
    return Tier.Name(tier).removeprefix("TIER_").lower()


@functools.cache
def reason_name(reason: MissReason.ValueType) -> str:
    return MissReason.Name(reason).lower()


_PARTIAL_TAIL = reason_name(MissReason.PARTIAL_TAIL)


@dataclass
class Row:
    """Totals of one traffic class and model, in tokens unless the name says otherwise."""

    passes: int = 0
    input: int = 0
    local: int = 0
    pending: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    loaded_bytes: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0


@dataclass(slots=True)
class Pass:
    """What one pass added to its row."""

    row: Row
    block_tokens: int
    input: int
    local: int
    pending: int = 0
    settled: bool = False
    hits: dict[str, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)


class Accounting:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str], Row] = {}
        self._passes: OrderedDict[bytes, Pass] = OrderedDict()

    def row(self, traffic_class: str, model: str) -> Row:
        with self._lock:
            return self._row(traffic_class, model)

    def open(
        self,
        pass_id: bytes,
        traffic_class: str,
        model: str,
        *,
        block_tokens: int,
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
            return Pass(self._row(traffic_class, model), block_tokens, input_tokens, local_tokens, settled=True)
        matched = max(matched_blocks * block_tokens, local_tokens)
        asked = max(asked_blocks * block_tokens, matched)
        misses = {}
        if asked > matched:
            misses[reason_name(reason)] = asked - matched
        if input_tokens > asked:
            misses[_PARTIAL_TAIL] = input_tokens - asked
        with self._lock:
            opened = Pass(
                self._row(traffic_class, model),
                block_tokens,
                input_tokens,
                local_tokens,
                pending=matched - local_tokens,
                misses=misses,
            )
            if pass_id:
                earlier = self._passes.pop(pass_id, None)
                if earlier is not None:
                    self._apply(earlier, -1)
                    earlier.settled = True
                self._passes[pass_id] = opened
                if len(self._passes) > MAX_REMEMBERED_PASSES:
                    self._passes.popitem(last=False)
            self._apply(opened, +1)
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
            row = opened.row
            own, part = divmod(opened.local, opened.block_tokens)
            used = tiers[own:loaded_blocks]
            left = opened.pending
            for tier in set(used):
                tokens = used.count(tier) * opened.block_tokens - (part if tier == used[0] else 0)
                name = tier_name(Tier.ValueType(tier))
                opened.hits[name] = tokens
                row.hits[name] += tokens
                left -= tokens
            if left:
                name = reason_name(reason)
                opened.misses[name] = opened.misses.get(name, 0) + left
                row.misses[name] += left
            row.pending -= opened.pending
            opened.pending = 0

    def unreachable(self, traffic_class: str, model: str, tokens: int) -> None:
        """Counts input of passes that could not ask the daemon."""
        with self._lock:
            row = self._row(traffic_class, model)
            row.input += tokens
            row.misses[reason_name(MissReason.UNREACHABLE)] += tokens

    def add(self, row: Row, *, loaded_bytes: int = 0, stored_blocks: int = 0, stored_bytes: int = 0) -> None:
        with self._lock:
            row.loaded_bytes += loaded_bytes
            row.stored_blocks += stored_blocks
            row.stored_bytes += stored_bytes

    def rows(self) -> list[tuple[str, str, Row]]:
        """Copies of all rows, by class and model."""
        with self._lock:
            return [
                (c, m, Row(**{**vars(row), "hits": Counter(row.hits), "misses": Counter(row.misses)}))
                for (c, m), row in sorted(self._rows.items())
            ]

    def _row(self, traffic_class: str, model: str) -> Row:
        key = (traffic_class, model)
        if key not in self._rows and len(self._rows) >= MAX_ACCOUNTING_ROWS:
            key = (traffic_class, OTHER)
        return self._rows.setdefault(key, Row())

    @staticmethod
    def _apply(counted: Pass, sign: int) -> None:
        row = counted.row
        row.passes += sign
        row.input += sign * counted.input
        row.local += sign * counted.local
        row.pending += sign * counted.pending
        for name, tokens in counted.hits.items():
            row.hits[name] += sign * tokens
        for name, tokens in counted.misses.items():
            row.misses[name] += sign * tokens
