"""``cachesvc record``: switches the recording of what is asked on or off."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer
from rich.filesize import decimal

from cachesvc.cli import options
from cachesvc.cli._daemon import switch_recording
from cachesvc.rpc import cache_pb2 as pb


class Change(StrEnum):
    ON = "on"
    OFF = "off"
    STATUS = "status"


_CHANGES = {
    Change.ON: pb.Recording.RECORDING_ON,
    Change.OFF: pb.Recording.RECORDING_OFF,
    Change.STATUS: pb.Recording.RECORDING_UNCHANGED,
}


def record(
    change: Annotated[Change, typer.Argument(help="on, off, or status")] = Change.STATUS,
    address: options.Address = None,
    as_json: options.Json = False,
) -> None:
    """Records what a running daemon is asked, without content, as a trace for `cachesvc replay`.

    It is off again after a restart, unless the daemon was started with --record.
    """
    reply = switch_recording(address, _CHANGES[change])
    if as_json:
        state = {"on": reply.on, "path": reply.path, "bytes": reply.bytes, "budget_bytes": reply.budget_bytes}
        print(json.dumps(state | {"lost_events": reply.lost_events}, indent=2))
        return
    lost = f"; {reply.lost_events:,} events were lost" if reply.lost_events else ""
    size = f"{decimal(reply.bytes)} of {decimal(reply.budget_bytes)}"
    print(f"recording is {'on' if reply.on else 'off'}: {reply.path}/*.jsonl, {size}{lost}")
