"""Files that fail, and a power supply that does too: a layer over the real ones that the store does not notice.

What is on disk for sure is what was synced: the content of a file when `fdatasync` or `fsync` was called on it, and the
names in a directory when that was. After a loss of power each 4 KiB page that was written since may be there or not,
each name that was made since may be gone, and each that was removed since may be back.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = 4096


class FaultFiles:
    """Patches `os` while it lives. `broken` is the error that writes and syncs below `root` fail with, or 0."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.broken = 0
        self.short = False
        """Whether a failing write has written a part of its bytes."""
        self._synced: dict[int, bytes] = {}
        self._names: dict[str, dict[str, int]] = {}
        for name in ("pwritev", "fdatasync", "fsync"):
            patch.setattr(os, name, self._layer(getattr(os, name), name))

    def lose_power(self, target: Path, source: random.Random) -> None:
        """Makes at `target` what is left of the store after a loss of power at this moment. The index comes along."""
        self._restore(self.root, target, source)
        if (self.root / "index").exists():
            shutil.copytree(self.root / "index", target / "index")

    def moved(self, root: Path) -> None:
        """Another store is looked at from here on: all of it is on disk."""
        self.root = root
        self._synced, self._names = {}, {}
        for directory, folders, files in os.walk(root):
            if Path(directory).name == "index":
                folders.clear()
                continue
            self._names[directory] = {name: os.stat(os.path.join(directory, name)).st_ino for name in folders + files}
            for name in files:
                path = Path(directory, name)
                self._synced[path.stat().st_ino] = path.read_bytes()

    def _layer(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(descriptor: int, *arguments: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if not path.startswith(str(self.root)):
                return original(descriptor, *arguments)
            if self.broken:
                if name == "pwritev" and self.short:
                    vector, offset = arguments
                    first = memoryview(vector[0]).cast("B")
                    original(descriptor, [first[: len(first) // 2]], offset)
                raise OSError(self.broken, os.strerror(self.broken))
            result = original(descriptor, *arguments)
            if name != "pwritev":
                self._note(path, os.fstat(descriptor))
            return result

        return call

    def _note(self, path: str, status: os.stat_result) -> None:
        """It was synced."""
        if os.path.isdir(path):
            self._names[path] = {entry.name: entry.inode() for entry in os.scandir(path)}
        elif not path.endswith("(deleted)"):
            self._synced[status.st_ino] = Path(path).read_bytes()

    def _restore(self, directory: Path, target: Path, source: random.Random) -> None:
        target.mkdir()
        now = {entry.name: entry.inode() for entry in os.scandir(directory)} if directory.exists() else {}
        sure = self._names.get(str(directory), {})
        for name in sorted({*now, *sure} - {"index"}):
            lost = now.get(name) != sure.get(name) and source.random() < 0.5  # what was done with the name last
            inode = (sure if lost else now).get(name)
            if inode is None:
                continue
            path = directory / name
            if path.is_dir() or (not path.exists() and str(path) in self._names):
                self._restore(path, target / name, source)
            else:
                current = path.read_bytes() if now.get(name) == inode else self._synced.get(inode, b"")
                (target / name).write_bytes(self._mixed(self._synced.get(inode, b""), current, source))

    @staticmethod
    def _mixed(synced: bytes, current: bytes, source: random.Random) -> bytes:
        """Pages of either, and any length between the two."""
        if synced == current:
            return current
        size = max(len(synced), len(current))
        if len(current) != len(synced):
            size = source.choice((len(synced), len(current), source.randint(*sorted((len(synced), len(current))))))
        pages = []
        for start in range(0, size, PAGE):
            old, new = synced[start : start + PAGE], current[start : start + PAGE]
            pages.append((new if old == new or source.random() < 0.5 else old).ljust(PAGE, b"\0"))
        return b"".join(pages)[:size]


ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS)
