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
import secrets
from pathlib import Path
from typing import Any, Final

from cachesvc.errors import StoreLocked, StoreUnusable
from cachesvc.segments.writer import sync_directory

log = logging.getLogger("cachesvc.store")

FORMAT: Final = 1


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


def next_epoch(path: Path) -> tuple[str, int]:
    """The store's daemon id and a number that no earlier start of it had. Raises `OSError`, `StoreUnusable`."""
    target = path / "STORE.json"
    state: dict[str, Any] = {"format": FORMAT, "daemon": secrets.token_hex(4), "epoch": 0}
    try:
        found = json.loads(target.read_text())
        state |= {"format": int(found["format"]), "daemon": str(found["daemon"]), "epoch": int(found["epoch"])}
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, KeyError):
        log.warning("%s is damaged and is written anew", target)
    if state["format"] != FORMAT:
        raise StoreUnusable(f"store {path} has format {state['format']}; this build reads {FORMAT}")
    state["epoch"] += 1
    try:
        write_atomically(target, json.dumps(state).encode())
    except OSError as error:
        # A full disk must not keep the stored blocks from being served; names stay unique by a random daemon id.
        log.warning("cannot write %s: %s", target, error.strerror)
        state["daemon"] = secrets.token_hex(4)
    return state["daemon"], state["epoch"]


def write_atomically(target: Path, content: bytes, *, mode: int = 0o666) -> None:
    scratch = target.with_suffix(".tmp")
    scratch.unlink(missing_ok=True)
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(target)
    sync_directory(target.parent)
