"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cachesvc.errors import ConfigError

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with settings", envvar="CACHESVC_CONFIG")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Address = Annotated[
    str | None,
    typer.Option(help="the daemon: unix:PATH or HOST:PORT; default: CACHESVC_ADDRESS, else the default socket"),
]

Store = Annotated[str | None, typer.Option(help="directory of the blocks")]
StoreBytes = Annotated[str | None, typer.Option(help="byte budget of the store, e.g. 200GB")]
SegmentBytes = Annotated[str | None, typer.Option(help="size at which a segment file is sealed")]
ArenaBytes = Annotated[str | None, typer.Option(help="shared memory for blocks, e.g. 8GB")]
ArenaPolicy = Annotated[str | None, typer.Option(help="which block leaves a full arena: lru or s3fifo")]
VerifyArena = Annotated[float | None, typer.Option(help="share of look-ups checked again in shared memory; 1: all")]
RewriteRate = Annotated[str | None, typer.Option(help="most bytes per second written again, of blocks in use")]
ScrubRate = Annotated[str | None, typer.Option(help="bytes per second read to find damage; 0: none")]
Socket = Annotated[str | None, typer.Option(help="Unix socket that clients use")]
Listen = Annotated[str | None, typer.Option(help="loopback HOST:PORT for TCP clients; '' for none")]
Metrics = Annotated[str | None, typer.Option(help="loopback HOST:PORT for Prometheus; '' for none")]
Workers = Annotated[int | None, typer.Option(help="calls served at once")]
Classes = Annotated[
    list[str] | None, typer.Option("--class", help="NAME=TTL, e.g. agent=3d; repeat it; replaces the default classes")
]
Record = Annotated[bool | None, typer.Option("--record/--no-record", help="record what is asked, for replay")]
RecordBytes = Annotated[str | None, typer.Option(help="bytes of recorded traces kept")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error")]
ClockOffsetFile = Annotated[str | None, typer.Option(help="for tests: a file with seconds to add to the clock")]


def given_flags(**flags: Any) -> dict[str, Any]:
    """The settings that were given, by the names of `cachesvc.config.Config`. Raises `ConfigError`."""
    given = {name: value for name, value in flags.items() if value is not None}
    if "classes" in given:
        pairs = [text.partition("=") for text in given["classes"]]
        wrong = [name for name, equals, ttl in pairs if not (name and equals and ttl)]
        if wrong:
            raise ConfigError(f"--class {wrong[0]!r} is not NAME=TTL, e.g. agent=3d")
        given["classes"] = {name: ttl for name, _, ttl in pairs}
    return given
