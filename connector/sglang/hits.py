"""How far a prefix reaches that lies in several pools, each with a policy of its own (SGLang's ``batch_exists_v2``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransferResult


class Pages(Protocol):
    """What a pool is asked, as `PageStore` answers it."""

    def leading(self, hashes: list[str]) -> int: ...
    def present(self, hashes: Sequence[str]) -> list[bool]: ...


@dataclass
class Hits:
    """Filled in pool by pool. `restorable`: prefix lengths, in pages, at which every pool so far has what it needs."""

    pages: dict[str, int] = field(default_factory=dict)
    restorable: list[int] = field(default_factory=list)

    def result(self) -> PoolTransferResult:
        return PoolTransferResult(self.restorable[-1] if self.restorable else 0, self.pages, self.restorable)


def find_hits(
    hashes: list[str], kv: Pages | None, transfers: Sequence[Any], pool_of: Callable[[Any], Pages | None]
) -> PoolTransferResult:
    """`kv` None: there are no KV pages of their own, the other pools alone decide."""
    kv_pages = len(hashes) if kv is None else kv.leading(hashes)
    hits = Hits({PoolName.KV: kv_pages} if kv_pages else {}, list(range(1, kv_pages + 1)))
    for transfer in transfers:
        pool = pool_of(transfer.name)
        if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
            _groups(hits, transfer, pool)
        elif hits.restorable:
            lengths = [] if pool is None else _lengths(transfer, pool, hashes[:kv_pages])
            if lengths:
                hits.pages[transfer.name] = lengths[-1]
            wanted = set(lengths)
            hits.restorable = [length for length in hits.restorable if length in wanted]
    return hits.result()


def _lengths(transfer: Any, pool: Pages, hashes: list[str]) -> list[int]:
    """Prefix lengths for which the pool has what its policy asks, ascending."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return list(range(1, pool.leading(hashes) + 1))
    window = max(1, len(transfer.keys or ()))
    there = pool.present(hashes)
    return [end for end in range(1, len(hashes) + 1) if all(there[max(0, end - window) : end])]


def _groups(hits: Hits, transfer: Any, pool: Pages | None) -> None:
    """Whole groups from the first on, reported in pages that they cover. They never shorten the hit."""
    keys, size = list(transfer.keys or ()), transfer.group_pages
    if pool is None or size <= 0 or transfer.block_pages <= 0:
        return
    covered = pool.leading(keys) // size * transfer.block_pages
    if covered:
        hits.pages[transfer.name] = covered
