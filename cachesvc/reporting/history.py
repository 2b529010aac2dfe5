"""What daemons have counted over time, asked of them and put together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from cachesvc.accounting import HIT, LOADED, MISS, RowKey, by_prefix
from cachesvc.ceiling import RELATIVE_ERROR
from cachesvc.cli._daemon import connected, fetch_report, unreachable
from cachesvc.rollups import MINUTE, Counts
from cachesvc.rpc import cache_pb2 as pb

_TIMEOUT_SECONDS: Final = 300.0
_WIDTHS: Final = (MINUTE, 300, 900, 3_600, 3 * 3_600, 6 * 3_600, 86_400)


@dataclass
class History:
    """Counts by start of bucket (seconds since the epoch), of all daemons together."""

    buckets: dict[int, Counts]
    width: int
    """Of a bucket, seconds."""
    ttls: dict[str, float] = field(default_factory=dict)
    """By traffic class, seconds."""
    daemons: int = 1

    @property
    def total(self) -> Counts:
        counts = Counts()
        for bucket in self.buckets.values():
            counts.add(bucket)
        return counts


def fetch_history(addresses: Sequence[str | None], since: float, until: float, width: int) -> History:
    """Raises `ConfigError` for a malformed address and `DaemonUnreachable`."""
    ttls: dict[str, float] = {}
    merged: dict[int, Counts] = {}
    stores: list[dict[int, dict[str, int]]] = []
    boots: set[bytes] = set()
    for address in dict.fromkeys(addresses):
        about = fetch_report(address)
        if about.boot_id in boots:
            continue  # one daemon, by another of its addresses
        boots.add(about.boot_id)
        found = _ask(address, since, until, width)
        ttls |= {row.traffic_class: row.ttl_seconds for row in about.classes}
        stores.append({start: counts.store for start, counts in found.items()})
        for start, counts in found.items():
            merged.setdefault(start, Counts()).add(counts)
    last: list[dict[str, int]] = [{} for _ in stores]
    for start in sorted(merged):
        # A daemon that was idle in a bucket still has what it had.
        last = [store.get(start, before) for store, before in zip(stores, last, strict=True)]
        merged[start].store = dict(sum((Counter(store) for store in last), Counter()))
    return History(dict(sorted(merged.items())), width, ttls, len(stores))


def fitting_width(seconds: float, buckets: int) -> int:
    """Width of a bucket with which that time has at most so many, a day at most."""
    return next((width for width in _WIDTHS if seconds <= width * buckets), _WIDTHS[-1])


def grouped(buckets: Mapping[int, Counts], by: Sequence[str]) -> dict[tuple[str, ...], Counter[str]]:
    """Rows summed by some of `traffic_class, model, tenant, hour`."""
    groups: dict[tuple[str, ...], Counter[str]] = {}
    for start, counts in buckets.items():
        for key, row in counts.rows.items():
            label = tuple(_label(name, key, start) for name in by)
            groups.setdefault(label, Counter()).update(row)
    return dict(sorted(groups.items()))


def summary(row: Mapping[str, int]) -> dict[str, Any]:
    """One row of counts as a report shows it. Rates are by tokens, of all input tokens."""
    hits, misses = by_prefix(row.items(), HIT), by_prefix(row.items(), MISS)
    asked = row.get("input", 0)
    reachable = asked - misses.get("partial_tail", 0) - misses.get("unreachable", 0)
    # An estimate: what was hit was possible, whatever it says.
    held = sum(hits.values()) + row.get("local", 0)
    ceiling = min(max(held, reachable - row.get("new", 0)), asked)
    return {
        "passes": row.get("passes", 0),
        "input_tokens": asked,
        "hit_tokens": sum(hits.values()),
        "hit_rate": _share(sum(hits.values()), asked),
        "ceiling_tokens": ceiling,
        "ceiling_rate": _share(ceiling, asked),
        "ceiling_rate_error": _share(RELATIVE_ERROR * row.get("new", 0), asked),
        "local_tokens": row.get("local", 0),
        "pending_tokens": row.get("pending", 0),
        "hit_tokens_by_tier": hits,
        "miss_tokens_by_reason": misses,
        "loaded_bytes": sum(by_prefix(row.items(), LOADED).values()),
        "stored_blocks": row.get("stored_blocks", 0),
        "stored_bytes": row.get("stored_bytes", 0),
    }


def sum_rows(rows: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row)
    return total


def _ask(address: str | None, since: float, until: float, width: int) -> dict[int, Counts]:
    request = pb.HistoryRequest(since=since, until=0 if until == math.inf else until, bucket_seconds=width)
    with connected(address) as (stub, target):
        try:
            return {int(bucket.start): _counts(bucket) for bucket in stub.History(request, timeout=_TIMEOUT_SECONDS)}
        except grpc.RpcError as error:
            raise unreachable(target, error) from error


def _counts(bucket: pb.HistoryBucket) -> Counts:
    rows = {RowKey(r.traffic_class, r.model, r.tenant): Counter(dict(r.counts)) for r in bucket.rows}
    return Counts(rows, Counter(dict(bucket.counts)), dict(bucket.store))


def _label(name: str, key: RowKey, start: int) -> str:
    return f"{start // 3_600 * 3_600}" if name == "hour" else str(getattr(key, name))


def _share(part: float, whole: int) -> float:
    return part / whole if whole else 0.0
