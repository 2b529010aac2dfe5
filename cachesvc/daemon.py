"""The daemon's life: open, serve, keep house, shut down cleanly."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from cachesvc import __version__
from cachesvc.classes import TrafficClasses
from cachesvc.clock import Clock, OffsetFileClock, SystemClock
from cachesvc.config import Config, budget_of
from cachesvc.limits import HOUSEKEEPING_SECONDS
from cachesvc.metrics import serve_metrics
from cachesvc.server.grpc import GrpcServer
from cachesvc.service import Service
from cachesvc.store import Store

log = logging.getLogger("cachesvc")

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
    clock: Clock = OffsetFileClock(config.clock_offset_file) if config.clock_offset_file else SystemClock()
    classes = TrafficClasses(config.classes)
    store = Store(
        config.store,
        budget=budget_of(config),
        segment_bytes=config.segment_bytes,
        classes=classes,
        clock=clock,
    )
    try:
        service = Service(store, classes, clock, staging_bytes=config.staging_bytes)
        server = GrpcServer(service, socket=config.socket, listen=config.listen, workers=config.workers)
        try:
            if config.metrics:
                serve_metrics(service, config.metrics)
            server.start()
            log.info(
                "cachesvc %s (process %d) serves on unix:%s%s; store %s, budget %.1f GB; classes %s",
                __version__,
                os.getpid(),
                server.socket,
                f" and {config.listen.rpartition(':')[0]}:{server.port}" if config.listen else "",
                config.store,
                store.budget / 1e9,
                ", ".join(f"{c.name} {c.ttl / 86_400:g} d" for c in classes),
            )
            while not stop.wait(HOUSEKEEPING_SECONDS):
                for task in (service.maintain, store.maintain):
                    _survive(task)
        finally:
            server.stop(SHUTDOWN_GRACE)
    finally:
        store.close()
    log.info("store is closed cleanly")


def _survive(task: Callable[[], None]) -> None:
    try:
        task()
    except Exception:
        log.exception("fault in housekeeping")
