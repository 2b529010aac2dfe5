"""The daemon's life: open, serve, keep house, shut down cleanly."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TypeVar

from cachesvc import __version__
from cachesvc.classes import TrafficClasses
from cachesvc.clock import Clock, OffsetFileClock, SystemClock
from cachesvc.clock_guard import GuardedClock
from cachesvc.config import ARENA_SUFFIX, Config, arena_of, budget_of, split_host_port
from cachesvc.limits import HOUSEKEEPING_SECONDS
from cachesvc.metrics import serve_metrics
from cachesvc.server.bulk import BulkServer
from cachesvc.server.grpc import GrpcServer
from cachesvc.server.local import LocalServer
from cachesvc.service import Service
from cachesvc.store import Store

log = logging.getLogger("cachesvc")

T = TypeVar("T")

# Seconds that running calls get at shutdown before they are cut off.
SHUTDOWN_GRACE = 5.0


def serve(config: Config) -> None:
    """Runs until SIGTERM or SIGINT. Raises `StoreLocked`, `StoreUnusable`, `AddressInUse` or `ConfigError`."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        log.info("%s: shutting down", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    _calm_collector()
    guarded = GuardedClock(SystemClock(), config.store / "CLOCK")
    clock: Clock = OffsetFileClock(config.clock_offset_file, guarded) if config.clock_offset_file else guarded
    classes = TrafficClasses(config.classes)
    arena_bytes, slab_bytes = arena_of(config)
    store = Store(
        config.store,
        budget=budget_of(config),
        segment_bytes=config.segment_bytes,
        arena_bytes=arena_bytes,
        slab_bytes=slab_bytes,
        arena_policy=config.arena_policy,
        classes=classes,
        clock=clock,
        rewrite_rate=config.rewrite_rate,
        scrub_rate=config.scrub_rate,
    )
    try:
        arena_socket = config.socket.absolute().with_name(config.socket.name + ARENA_SUFFIX)
        service = Service(
            store,
            classes,
            clock,
            arena_socket=str(arena_socket),
            record_bytes=config.record_bytes,
            record=config.record,
            verify_arena=config.verify_arena,
        )
        server = GrpcServer(service, socket=config.socket, listen=config.listen, workers=config.workers)
        local = LocalServer(service, arena_socket)
        bulk = BulkServer(service, split_host_port(config.listen)[0]) if config.listen else None
        try:
            if config.metrics:
                serve_metrics(service, config.metrics)
            local.start()
            if bulk is not None:
                bulk.start()
            server.start()
            log.info(
                "cachesvc %s (process %d) serves on unix:%s%s; arena %.1f GB; store %s, budget %.1f GB; classes %s",
                __version__,
                os.getpid(),
                server.socket,
                f" and {config.listen.rpartition(':')[0]}:{server.port}" if config.listen else "",
                arena_bytes / 1e9,
                config.store,
                store.disk.budget / 1e9,
                ", ".join(f"{c.name} {c.ttl / 86_400:g} d" for c in classes),
            )
            _keep_house(stop, store.maintain, (service.maintain, guarded.save))
        finally:
            local.stop()
            if bulk is not None:
                bulk.stop()
            server.stop(SHUTDOWN_GRACE)
            service.close()
    finally:
        guarded.save(always=True)
        store.close()
    log.info("store is closed cleanly")


def _calm_collector() -> None:
    """Makes full garbage collections rare: they walk every entry and slot, which are many and form no cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 1000)


def _keep_house(stop: threading.Event, store: Callable[[], float], others: Sequence[Callable[[], None]]) -> None:
    """Until told to stop: the store as often as it asks for, the others once in a while."""
    wait, due = HOUSEKEEPING_SECONDS, 0.0
    while not stop.wait(wait):
        wait = _survive(store) or HOUSEKEEPING_SECONDS
        if time.monotonic() >= due:
            due = time.monotonic() + HOUSEKEEPING_SECONDS
            for task in others:
                _survive(task)


def _survive(task: Callable[[], T]) -> T | None:
    try:
        return task()
    except Exception:
        log.exception("fault in housekeeping")
        return None
