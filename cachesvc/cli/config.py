"""``cachesvc config``: the effective configuration and where each value came from."""

from __future__ import annotations

import json

from rich.table import Column, Table

from cachesvc.cli import options
from cachesvc.cli._console import wide_console
from cachesvc.config import Config, arena_of, budget_of, load


def config(
    config: options.ConfigFile = None,
    store: options.Store = None,
    store_bytes: options.StoreBytes = None,
    segment_bytes: options.SegmentBytes = None,
    arena_bytes: options.ArenaBytes = None,
    arena_policy: options.ArenaPolicy = None,
    socket: options.Socket = None,
    listen: options.Listen = None,
    metrics: options.Metrics = None,
    workers: options.Workers = None,
    classes: options.Classes = None,
    record: options.Record = None,
    record_bytes: options.RecordBytes = None,
    log_level: options.LogLevel = None,
    clock_offset_file: options.ClockOffsetFile = None,
    as_json: options.Json = False,
) -> None:
    """Prints the configuration that `serve` would use with the same options, and where each value came from."""
    flags = options.given_flags(
        store=store,
        store_bytes=store_bytes,
        segment_bytes=segment_bytes,
        arena_bytes=arena_bytes,
        arena_policy=arena_policy,
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
    loaded = load(flags, config)
    values = loaded.config.model_dump(mode="json")
    if not loaded.config.store_bytes:
        values["store_bytes"] = budget_of(loaded.config)
    values["arena_bytes"] = arena_of(loaded.config)[0]
    if as_json:
        rows = {name: {"value": values[name], "source": loaded.sources[name]} for name in values}
        print(json.dumps(rows, indent=2))
        return
    table = Table("setting", Column("value", overflow="fold"), Column("from", overflow="fold"), "what it is")
    for name, value in values.items():
        text = ", ".join(f"{k} {v:g} s" for k, v in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(name, text, loaded.sources[name], Config.model_fields[name].description or "")
    wide_console().print(table)
