"""The daemon's configuration: one schema for flags, environment variables (``CACHESVC_…``) and one TOML file.

A flag wins over the environment, the environment over the file, the file over the default. `load` also says where each
value came from.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import platformdirs
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from cachesvc.classes import CLASS_NAME, DEFAULT_TTLS
from cachesvc.errors import ConfigError
from cachesvc.limits import DEFAULT_RECORD_BYTES, DEFAULT_REWRITE_RATE, DEFAULT_SCRUB_RATE, MAX_PAYLOAD_BYTES, GiB, MiB
from cachesvc.record import PAGE
from cachesvc.rpc.address import MAX_SOCKET_PATH_BYTES, default_socket_path

log = logging.getLogger("cachesvc.config")

ARENA_SUFFIX: Final = ".arena"
"""What follows the socket's path in the path of the arena's socket."""

_SIZE_UNITS: Final = {"": 1, "b": 1} | {
    name: base**power
    for power, letter in enumerate("kmgt", 1)
    for name, base in ((letter + "b", 1000), (letter + "ib", 1024), (letter, 1024))
}
_FLAGS: Final = {"classes": "class"}
"""Flags that are not called like their setting."""

_TIME_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_MAX_QUANTITY: Final = 40
_QUANTITY: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_size(value: object) -> int:
    """Bytes from ``"20GB"``, ``"512MiB"`` or a number. Raises `ValueError`."""
    return int(_quantity(value, _SIZE_UNITS, "a size such as 20GB or 512MiB"))


def parse_duration(value: object) -> float:
    """Seconds from ``"3d"``, ``"12h"``, ``"30m"``, ``"45s"`` or a number. Raises `ValueError`."""
    return _quantity(value, _TIME_UNITS, "a duration such as 3d, 12h or 30m")


def _quantity(value: object, units: Mapping[str, float], what: str) -> float:
    match = _QUANTITY.fullmatch(str(value))
    if match is None or match[2].lower() not in units or len(match[0]) > _MAX_QUANTITY:
        raise ValueError(f"{str(value)[:40]!r} is not {what}")
    return float(match[1]) * units[match[2].lower()]


Size = Annotated[int, BeforeValidator(parse_size)]
Duration = Annotated[float, BeforeValidator(parse_duration)]


_PREFIX: Final = "CACHESVC_"
_OTHER_VARIABLES: Final = ("config", "address", "model_dir")  # of the command line, of clients, of the demonstration


class Config(BaseSettings):
    """Everything an operator can set. Sizes take units (``20GB``, ``512MiB``), durations too (``3d``, ``12h``)."""

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", frozen=True)

    store: Path = Field(
        default_factory=lambda: platformdirs.user_cache_path("cachesvc") / "store",
        description="directory of the blocks; made if missing",
    )
    store_bytes: Size = Field(
        0, ge=0, description="most bytes that the store may use; 0: a fifth of the free disk, 100 GiB at most"
    )
    segment_bytes: Size = Field(256 * MiB, ge=1, description="size at which a segment file is sealed")
    arena_bytes: Size = Field(
        0, ge=0, description="shared memory for blocks (the DRAM tier); 0: a quarter of the free memory, 64 GiB at most"
    )
    arena_policy: str = Field("lru", description="which block leaves a full arena: lru or s3fifo")
    verify_arena: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of look-ups whose blocks readers check again in shared memory, too; 1: all",
    )
    rewrite_rate: Size = Field(
        DEFAULT_REWRITE_RATE,
        ge=MiB,
        description="most bytes per second that housekeeping writes again, of blocks still in use when their file goes",
    )
    scrub_rate: Size = Field(DEFAULT_SCRUB_RATE, ge=0, description="bytes per second read only to find damage; 0: none")
    socket: Path = Field(default_factory=default_socket_path, description="Unix socket that clients use")
    listen: str = Field("127.0.0.1:7733", description="loopback host:port for TCP clients; empty: none")
    metrics: str = Field("127.0.0.1:7734", description="loopback host:port of the Prometheus endpoint; empty: none")
    workers: int = Field(16, ge=1, le=256, description="calls served at once")
    classes: dict[str, Duration] = Field(
        default_factory=lambda: dict(DEFAULT_TTLS), description="traffic classes and their TTL since last use"
    )
    record: bool = Field(False, description="record what is asked, without content, for `cachesvc replay`")
    record_bytes: Size = Field(
        DEFAULT_RECORD_BYTES, ge=MiB, description="bytes of recorded traces kept, below the store's directory"
    )
    log_level: str = Field("info", description="debug, info, warning or error")
    clock_offset_file: Path | None = Field(
        None, description="for tests: a file with seconds to add to the wall clock, read at each use"
    )

    @field_validator("classes")
    @classmethod
    def _check_classes(cls, value: dict[str, float]) -> dict[str, float]:
        if not value:
            raise ValueError("at least one traffic class is needed")
        for name, ttl in value.items():
            if not CLASS_NAME.fullmatch(name):
                raise ValueError(f"class name {name!r} must match {CLASS_NAME.pattern}")
            if ttl < 1:
                raise ValueError(f"TTL of class {name!r} is {ttl} s; it must be at least 1 s")
        return value

    @field_validator("listen", "metrics")
    @classmethod
    def _check_loopback(cls, value: str) -> str:
        if value:
            split_host_port(value)
        return value

    @field_validator("socket")
    @classmethod
    def _check_socket(cls, value: Path) -> Path:
        limit = MAX_SOCKET_PATH_BYTES - len(ARENA_SUFFIX)
        if len(os.fsencode(value.absolute())) > limit:
            raise ValueError(f"path of {len(os.fsencode(value.absolute()))} bytes; {limit} are possible")
        return value

    @field_validator("arena_policy")
    @classmethod
    def _check_policy(cls, value: str) -> str:
        if value not in ("lru", "s3fifo"):
            raise ValueError(f"{value!r} is not lru or s3fifo")
        return value

    @field_validator("log_level")
    @classmethod
    def _check_level(cls, value: str) -> str:
        if value not in ("debug", "info", "warning", "error"):
            raise ValueError(f"{value!r} is not debug, info, warning or error")
        return value


def split_host_port(text: str) -> tuple[str, int]:
    """Host and port of a loopback address. Raises `ValueError`."""
    host, _, port = text.rpartition(":")
    bare = host.strip("[]")
    try:
        loopback = bare == "localhost" or ipaddress.ip_address(bare).is_loopback
        number = int(port)
    except ValueError:
        loopback, number = False, -1
    if not loopback or not 0 <= number < 65_536:
        raise ValueError(f"{text!r} is not a loopback host:port such as 127.0.0.1:7733")
    return bare, number


def budget_of(config: Config) -> int:
    """The byte budget in force. For the automatic one the store's own files count as free. Raises `ConfigError`."""
    if config.store_bytes:
        return config.store_bytes
    try:
        existing = next(p for p in (config.store, *config.store.absolute().parents) if p.exists())
        own = sum(file.stat().st_size for file in config.store.rglob("*") if file.is_file())
        return max(64 * MiB, min(100 * GiB, (shutil.disk_usage(existing).free + own) // 5))
    except OSError as error:
        raise ConfigError(f"cannot measure the disk of {config.store}: {error.strerror}; set store_bytes") from error


def arena_of(config: Config) -> tuple[int, int]:
    """Bytes of the arena and of one of its slabs, which bounds the payload size."""
    size = config.arena_bytes or max(256 * MiB, min(64 * GiB, os.sysconf("SC_AVPHYS_PAGES") * PAGE // 4))
    slab = min(MAX_PAYLOAD_BYTES, max(MiB, size // 8)) // PAGE * PAGE
    unit = 2 * MiB if size >= 64 * MiB else PAGE  # whole huge pages, should the system have some
    return max(size, slab) // unit * unit, slab


@dataclass(frozen=True)
class Loaded:
    config: Config
    sources: dict[str, str]
    """By setting: ``default``, ``file PATH``, ``environment NAME`` or ``flag --NAME``."""


def load(flags: Mapping[str, Any], file: Path | None = None) -> Loaded:
    """The effective configuration. `flags` holds only what was given. Raises `ConfigError` with one line."""
    from_file = _read_toml(file) if file is not None else {}
    try:
        from_environment = EnvSettingsSource(Config)()
    except ValueError as error:
        raise ConfigError(f'environment: {error}; CACHESVC_CLASSES is JSON, such as {{"agent": "3d"}}') from error
    for name in sorted(os.environ):
        known = {*Config.model_fields, *_OTHER_VARIABLES}
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX).lower() not in known:
            # Not an error: orchestrators put variables of their own beside ours.
            log.warning("environment variable %s names no setting of the daemon", name)
    merged: dict[str, Any] = {**from_file, **from_environment, **flags}
    sources = dict.fromkeys(Config.model_fields, "default")
    sources |= dict.fromkeys(from_file, f"file {file}")
    sources |= {name: f"environment CACHESVC_{name.upper()}" for name in from_environment}
    sources |= {name: f"flag --{_FLAGS.get(name, name.replace('_', '-'))}" for name in flags}
    try:
        return Loaded(_Given.model_validate(merged).build(), sources)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(problem, sources) for problem in error.errors())) from error


class _Given(BaseModel):
    """Validates merged values without reading the environment a second time."""

    model_config = ConfigDict(extra="allow")

    def build(self) -> Config:
        return Config.model_validate(dict(self.model_extra or {}))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _explain(problem: Any, sources: Mapping[str, str]) -> str:
    name = str(problem["loc"][0]) if problem["loc"] else "configuration"
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {name!r} ({sources.get(name, 'given')}); known: {', '.join(Config.model_fields)}"
    return f"{name} ({sources.get(name, 'given')}): {problem['msg'].removeprefix('Value error, ')}"
