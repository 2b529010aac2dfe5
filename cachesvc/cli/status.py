"""``cachesvc status``: the state of a running daemon and its store."""

from __future__ import annotations

import json

from google.protobuf.json_format import MessageToDict
from rich.filesize import decimal
from rich.table import Table

from cachesvc.cli import options
from cachesvc.cli._console import wide_console
from cachesvc.cli._daemon import fetch_report


def status(address: options.Address = None, as_json: options.Json = False) -> None:
    """Prints health, store size, blocks by class, leases and counters of a running daemon."""
    reply = fetch_report(address)
    if as_json:
        state = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        for name in ("lookups", "boot_id"):
            del state[name]
        for container in (state, state["events"], *state["classes"]):
            container.update({k: int(v) for k, v in container.items() if isinstance(v, str) and v.isdigit()})
        print(json.dumps(state | {"boot_id": reply.boot_id.hex()}, indent=2))
        return
    console = wide_console()
    table = Table(show_header=False, title=f"cachesvc {reply.version}: {reply.health}")
    for name, value in (
        ("up", f"{reply.uptime_seconds:,.0f} s, boot {reply.boot_id.hex()[:8]}"),
        ("store", reply.store_path),
        (
            "used",
            f"{decimal(reply.store_bytes)} of {decimal(reply.store_budget_bytes)}, {decimal(reply.dead_bytes)} dead; "
            f"write amplification {reply.write_amplification:.2f}",
        ),
        ("blocks", f"{reply.blocks:,} in {reply.segments:,} segments"),
        (
            "arena",
            f"{decimal(reply.arena_used_bytes)} of {decimal(reply.arena_bytes)}, "
            f"{decimal(reply.arena_dirty_bytes)} not yet on disk",
        ),
        ("leases", f"{reply.read_leases:,} read, {reply.write_leases:,} write; staged {decimal(reply.staged_bytes)}"),
        ("attachments", f"{reply.attachments:,}"),
        ("counters", ", ".join(f"{name} {count:,}" for name, count in sorted(reply.events.items())) or "-"),
    ):
        table.add_row(name, value)
    console.print(table)
    classes = Table("class", "TTL", "blocks", "payload")
    for row in reply.classes:
        classes.add_row(
            row.traffic_class, f"{row.ttl_seconds / 86_400:g} d", f"{row.blocks:,}", decimal(row.payload_bytes)
        )
    console.print(classes)
