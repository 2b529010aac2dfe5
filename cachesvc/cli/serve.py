"""``cachesvc serve``: runs the daemon in the foreground."""

from __future__ import annotations

import logging
import sys

from cachesvc import daemon
from cachesvc.cli import options
from cachesvc.config import load


def serve(
    config: options.ConfigFile = None,
    store: options.Store = None,
    store_bytes: options.StoreBytes = None,
    segment_bytes: options.SegmentBytes = None,
    arena_bytes: options.ArenaBytes = None,
    arena_policy: options.ArenaPolicy = None,
    verify_arena: options.VerifyArena = None,
    rewrite_rate: options.RewriteRate = None,
    scrub_rate: options.ScrubRate = None,
    socket: options.Socket = None,
    listen: options.Listen = None,
    metrics: options.Metrics = None,
    workers: options.Workers = None,
    classes: options.Classes = None,
    record: options.Record = None,
    record_bytes: options.RecordBytes = None,
    log_level: options.LogLevel = None,
    clock_offset_file: options.ClockOffsetFile = None,
) -> None:
    """Runs the cache daemon until SIGTERM. Without options: default socket, default store, agent 3 d and chat 7 d."""
    flags = options.given_flags(
        store=store,
        store_bytes=store_bytes,
        segment_bytes=segment_bytes,
        arena_bytes=arena_bytes,
        arena_policy=arena_policy,
        verify_arena=verify_arena,
        rewrite_rate=rewrite_rate,
        scrub_rate=scrub_rate,
        socket=socket,
        listen=listen,
        metrics=metrics,
        workers=workers,
        classes=classes,
        record=record,
        record_bytes=record_bytes,
        log_level=log_level,
        clock_offset_file=clock_offset_file,
    )
    loaded = load(flags, config).config
    logging.basicConfig(
        stream=sys.stderr, level=loaded.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    daemon.serve(loaded)
