"""A share of the blocks instead of all (SHARDS, Waldspurger et al., FAST 2015), for traces that are too large.

Blocks are chosen by a hash of their key, so a block is either always there or never. One hot block can be several per
cent of all references; chosen or not, it would spoil the estimate. So the first block of every prompt, and every block
that was asked for often, is *exact*: always there, and counted as itself. Each other block that is chosen stands for
`scale` of its kind.

The hits of the others are estimated by a ratio (hits to references of the chosen ones, times all references, which are
counted exactly). The error is that of the ratio over random groups of the chosen blocks: twice its standard error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import Final, NamedTuple

from cachesvc.limits import MAX_HOT_CANDIDATES
from cachesvc.trace.formats import Request

GROUPS: Final = 16
TAGS: Final = 2 * GROUPS - 1
"""The low bits of a sampled key: its group, above `EXACT`."""
EXACT: Final = 1
_TAG_BITS: Final = TAGS.bit_length()

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1

_HOT_REFERENCES: Final = 1_000
_HOT_SHARE: Final = 1e-4
"""A block is hot from so many references on, and from this share of all on."""
_MAX_HOT: Final = 8_192


class Sampled(NamedTuple):
    """A request of which only some keys are left, each with its tag.

    `blocks` is how many full blocks it had; `written` holds `keys` and those that have just become exact, which were
    not held until now and must not break the match.
    """

    at: float
    traffic_class: str
    input_tokens: int
    keys: list[int]
    written: list[int]
    blocks: int
    scale: int


class Sampler:
    """Keeps one of `scale` blocks, and the hot ones."""

    def __init__(self, scale: int) -> None:
        self.scale = scale
        self._below = (1 << 64) // scale
        self._hot: set[int] = set()
        self._candidates: Counter[int] = Counter()
        self._references = 0

    def sample(self, requests: Iterable[Request]) -> Iterator[Sampled]:
        for request in requests:
            yield self._sampled(request)

    def _sampled(self, request: Request) -> Sampled:
        keys = request.keys
        promoted = self._promote(keys[1:])
        hot = self._hot
        # One pass in C over all keys: most are dropped here.
        chosen = map(self._below.__gt__, map(_MASK.__and__, map(_GOLDEN.__mul__, keys)))
        if hot and not hot.isdisjoint(keys):
            chosen = map(bool.__or__, chosen, map(hot.__contains__, keys))
        kept = list(compress(keys, chosen))
        root = keys[:1]
        if root and kept[:1] != root:
            kept = root + kept
        exact = hot.union(root)
        written = [_tagged(key, key in exact) for key in kept]
        matched = [_tagged(key, key in exact) for key in kept if key not in promoted] if promoted else written
        return Sampled(request.at, request.traffic_class, request.input_tokens, matched, written, len(keys), self.scale)

    def _promote(self, keys: Sequence[int]) -> set[int]:
        """Counts references (Misra-Gries); the keys that have become hot."""
        self._references += len(keys)
        counts = self._candidates
        counts.update(keys)
        if len(self._hot) >= _MAX_HOT:
            return set()
        enough = max(_HOT_REFERENCES, _HOT_SHARE * self._references)
        promoted = set()
        if len(counts) > MAX_HOT_CANDIDATES:
            floor = sorted(counts.values())[len(counts) // 2]
            self._candidates = Counter({key: n - floor for key, n in counts.items() if n > floor})
        elif any(map(enough.__le__, map(counts.__getitem__, keys))):
            promoted = {key for key in keys if counts[key] >= enough} - self._hot
            self._hot |= promoted
        return promoted


def _tagged(key: int, exact: bool) -> int:
    return key << _TAG_BITS | (EXACT if exact else hash((key,)) % GROUPS << 1)


class Estimate(NamedTuple):
    """Blocks, and how far they may be off (twice the standard error)."""

    blocks: float
    error: float


def estimate(of: Counter[int], references: Counter[int], blocks: int) -> Estimate:
    """How many of `blocks` references are of a kind, from the counts by tag of that kind and of all sampled ones."""
    exact = of[EXACT]
    others = blocks - references[EXACT]
    seen = [references[group << 1] for group in range(GROUPS)]
    found = [of[group << 1] for group in range(GROUPS)]
    total = sum(seen)
    if others <= 0:
        return Estimate(exact, 0.0)
    if not total:
        return Estimate(exact, others)
    ratio = sum(found) / total
    squares = sum((f - ratio * s) ** 2 for f, s in zip(found, seen, strict=True))
    return Estimate(exact + ratio * others, 2 * others / total * math.sqrt(GROUPS / (GROUPS - 1) * squares))
