"""What the daemon tells of itself: the reply to `Report`, the counts by minute, and whether it records."""

from __future__ import annotations

import math
from collections.abc import Iterator

from cachesvc import __version__
from cachesvc.accounting import HIT, LOADED, MISS, Accounting, Row, RowKey, by_prefix
from cachesvc.classes import TrafficClasses
from cachesvc.errors import InvalidCall
from cachesvc.limits import MAX_HISTORY_BUCKETS
from cachesvc.observer import Observer
from cachesvc.rollups import MINUTE
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.store import Store


def add_store(reply: pb.ReportReply, store: Store, classes: TrafficClasses) -> None:
    """What is stored, and in what state disk and arena are."""
    reply.MergeFrom(
        pb.ReportReply(
            version=__version__,
            store_bytes=store.disk.bytes_used,
            store_budget_bytes=store.disk.budget,
            segments=store.disk.segments,
            blocks=len(store.catalog),
            health=store.disk.health,
            store_path=str(store.disk.path),
            arena_bytes=store.arena.memory.size,
            arena_used_bytes=store.arena.bytes_used,
            arena_dirty_bytes=store.arena.bytes_unflushed,
            dead_bytes=store.disk.dead_bytes,
            write_amplification=store.disk.write_amplification,
        )
    )
    census = store.catalog.census()
    for traffic_class in classes:
        count, size = census.get(traffic_class.name, (0, 0))
        reply.classes.add(
            traffic_class=traffic_class.name, ttl_seconds=int(traffic_class.ttl), blocks=count, payload_bytes=size
        )


def add_lookups(reply: pb.ReportReply, accounting: Accounting) -> None:
    """What was asked, found and missed, by class, model and tenant."""
    reply.lookups.extend(_lookup_row(key, row) for key, row in accounting.rows())


def history(observer: Observer, request: pb.HistoryRequest) -> Iterator[pb.HistoryBucket]:
    """Raises `InvalidCall`."""
    width = request.bucket_seconds
    if width % MINUTE:
        raise InvalidCall(f"bucket_seconds {width} is not a multiple of {MINUTE}")
    until = request.until or math.inf
    if not 0 <= request.since <= until:
        raise InvalidCall(f"since {request.since} and until {request.until} are no span of time")
    buckets = observer.history(request.since, until, width)
    if len(buckets) > MAX_HISTORY_BUCKETS:
        raise InvalidCall(f"{len(buckets)} buckets; the limit is {MAX_HISTORY_BUCKETS}: ask for wider ones")
    for start, counts in buckets.items():
        rows = [
            pb.HistoryRow(traffic_class=key.traffic_class, model=key.model, tenant=key.tenant, counts=row)
            for key, row in counts.rows.items()
        ]
        yield pb.HistoryBucket(start=start, rows=rows, counts=counts.other, store=counts.store)


def record(observer: Observer, request: pb.RecordRequest, boot_id: bytes) -> pb.RecordReply:
    """Raises `InvalidCall`."""
    if request.change not in pb.Recording.values():
        raise InvalidCall(f"change is {request.change}, which is no Recording")
    recorder = observer.recorder
    try:
        if request.change != pb.Recording.RECORDING_UNCHANGED:
            observer.record(on=request.change == pb.Recording.RECORDING_ON)
    except OSError as error:
        raise InvalidCall(f"cannot record into {recorder.path}: {error.strerror}") from error
    return pb.RecordReply(
        boot_id=boot_id,
        on=observer.recording,
        path=str(recorder.path),
        bytes=recorder.size,
        budget_bytes=recorder.budget,
        lost_events=recorder.lost,
    )


def _lookup_row(key: RowKey, row: Row) -> pb.LookupRow:
    return pb.LookupRow(
        traffic_class=key.traffic_class,
        model=key.model,
        tenant=key.tenant,
        passes=row["passes"],
        input_tokens=row["input"],
        local_tokens=row["local"],
        pending_tokens=row["pending"],
        hit_tokens=by_prefix(row.items(), HIT),
        miss_tokens=by_prefix(row.items(), MISS),
        new_tokens=row["new"],
        loaded_bytes=sum(by_prefix(row.items(), LOADED).values()),
        stored_blocks=row["stored_blocks"],
        stored_bytes=row["stored_bytes"],
    )
