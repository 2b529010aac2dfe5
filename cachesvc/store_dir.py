"""The store's directory: one daemon at a time, a number for each start, files replaced whole.

::

    LOCK  STORE.json  index/  <namespace digest>/namespace.json
    <namespace digest>/<class>/<end of expiry slice>/<daemon>-<epoch>-<number>.seg
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
from pathlib import Path
from typing import Final, NamedTuple

from cachesvc.errors import StoreLocked, StoreUnusable
from cachesvc.segments.format import OWN_NAME, SUFFIX
from cachesvc.segments.writer import sync_directory

log = logging.getLogger("cachesvc.store")

FORMAT: Final = 1
_DAEMON: Final = re.compile(r"[0-9a-f]{8}")


def lock_store(path: Path) -> int:
    """Takes the store's lock for as long as the process lives. Raises `StoreLocked`, `StoreUnusable`."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnusable(f"store {path}: {error.strerror}; give a directory this user may write to") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreLocked(f"store {path} is in use by process {holder}; stop it or give another --store") from error
    # The number is for people: a full disk must not keep the store from opening.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


class StoreState(NamedTuple):
    """What `STORE.json` says."""

    format: int
    daemon: str
    epoch: int

    def format_fault(self) -> str | None:
        """What a person is to be told of a format that is not this build's."""
        if self.format == FORMAT:
            return None
        return (
            f"has format {self.format}; this build reads {FORMAT}: use the build that wrote it, or delete STORE.json "
            "if no other build has used the store"
        )


def read_state(path: Path) -> StoreState:
    """Raises `OSError`, and `ValueError` when it is damaged."""
    try:
        found = json.loads((path / "STORE.json").read_bytes())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("no object")
    version, daemon, epoch = (found.get(name) for name in StoreState._fields)
    # As exact as it is written: names of files are made of it.
    if type(version) is not int or type(epoch) is not int or not isinstance(daemon, str):
        raise ValueError("a field is missing, or of another type")
    if not _DAEMON.fullmatch(daemon) or not 0 <= epoch < 1 << 63:
        raise ValueError("no daemon id, or no epoch")
    return StoreState(version, daemon, epoch)


def last_epoch(path: Path, daemon: str) -> int:
    """The highest epoch in the names of that daemon's segment files; 0 without any."""
    names = (file.name for file in path.glob(f"*/*/*/{daemon}-*{SUFFIX}"))
    return max((int(name.split("-")[1]) for name in names if OWN_NAME.fullmatch(name)), default=0)


def next_epoch(path: Path) -> tuple[str, int]:
    """The store's daemon id and a number that no earlier start of it had. Raises `OSError`, `StoreUnusable`."""
    target = path / "STORE.json"
    state = StoreState(FORMAT, secrets.token_hex(4), 0)
    try:
        state = read_state(path)
    except FileNotFoundError:
        pass
    except ValueError:
        log.warning("%s is damaged and is written anew", target)
    if fault := state.format_fault():
        raise StoreUnusable(f"store {path} {fault}")
    # An older STORE.json that came back counts fewer starts than there were: a name must not come again.
    state = state._replace(epoch=max(state.epoch, last_epoch(path, state.daemon)) + 1)
    try:
        write_atomically(target, json.dumps(state._asdict()).encode())
    except OSError as error:
        # A full disk must not keep the stored blocks from being served; names stay unique by a random daemon id.
        log.warning("cannot write %s: %s", target, error.strerror)
        state = state._replace(daemon=secrets.token_hex(4))
    return state.daemon, state.epoch


def write_atomically(target: Path, content: bytes, *, mode: int = 0o666) -> None:
    scratch = target.with_suffix(".tmp")
    scratch.unlink(missing_ok=True)
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(target)
    sync_directory(target.parent)
