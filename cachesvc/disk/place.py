"""Whether the store's directory is still the one that was locked; it can be deleted, or unmounted, underneath."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from cachesvc.errors import StoreLocked, StoreUnusable
from cachesvc.store_dir import lock_store

log = logging.getLogger("cachesvc.store")


class Place:
    def __init__(self, path: Path) -> None:
        """Takes the store's lock. Raises `StoreLocked`, `StoreUnusable`."""
        self._path = path
        self._lock_file = lock_store(path)
        self._device = os.fstat(self._lock_file).st_dev

    def is_ours(self) -> bool:
        try:
            found = os.stat(self._path / "LOCK")
        except FileNotFoundError:
            return False
        except OSError:
            return True  # the disk fails: that is for whoever reads or writes to say
        ours = os.fstat(self._lock_file)
        return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)

    def take_again(self) -> bool:
        """Makes and locks the directory anew. Only where it was: a disk that is not mounted is waited for."""
        try:
            existing = next(p for p in (self._path, *self._path.absolute().parents) if p.exists())
            if existing.stat().st_dev != self._device:
                return False
            lock_file = lock_store(self._path)
        except (OSError, StoreLocked, StoreUnusable) as error:
            log.debug("the store's directory cannot be taken again: %s", error)
            return False
        os.close(self._lock_file)
        self._lock_file = lock_file
        return True

    def close(self) -> None:
        os.close(self._lock_file)
