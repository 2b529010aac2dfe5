"""Mooncake Store: its master, and one client with a segment of its own."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sides.base import Buffers, Side, free_port
from sides.confine import confine_to_loopback

_LOCAL_BUFFER = 64 << 20


class Mooncake(Side):
    """Payloads go through its transfer engine, as they do between an engine and a store that outlives it."""

    memcpy = "0"

    def start(self) -> None:
        confine_to_loopback()
        os.environ["MC_STORE_MEMCPY"] = self.memcpy
        from mooncake.store import MooncakeDistributedStore

        port, metrics = free_port(), free_port()
        master = str(Path(sys.executable).parent / "mooncake_master")
        self.serve(
            [
                *(master, f"-rpc_port={port}", "-rpc_address=127.0.0.1"),
                *("-metrics_host=127.0.0.1", f"-metrics_port={metrics}", "-enable_metric_reporting=false"),
            ]
        )
        self.connected(socket.AF_INET, ("127.0.0.1", port)).close()
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(
            "127.0.0.1", "P2PHANDSHAKE", self.memory, _LOCAL_BUFFER, "tcp", "", f"127.0.0.1:{port}"
        )
        if code:
            raise RuntimeError(f"setup answers {code}")
        self._registered: list[tuple[int, int]] = []

    def allocate(self, size: int, count: int) -> tuple[Buffers, Buffers]:
        for address, _ in self._registered:
            self._store.unregister_buffer(address)
        source, target = super().allocate(size, count)
        self._registered = []
        for views in (source, target):
            first, last = _address(views[0]), _address(views[-1])
            self._registered.append((first, last + size - first))
            if code := self._store.register_buffer(*self._registered[-1]):
                raise RuntimeError(f"register_buffer answers {code}")
        return source, target

    def put(self, keys: Sequence[bytes], source: Buffers) -> None:
        codes = self._store.batch_put_from(_names(keys), [_address(v) for v in source], [len(v) for v in source])
        if any(codes):
            raise RuntimeError(f"batch_put_from answers {next(filter(None, codes))}")

    def get(self, keys: Sequence[bytes], target: Buffers) -> None:
        sizes = [len(view) for view in target]
        found = self._store.batch_get_into(_names(keys), [_address(v) for v in target], sizes)
        if list(found) != sizes:
            raise RuntimeError(f"batch_get_into answers {sorted(set(found))[:3]}")

    def exists(self, keys: Sequence[bytes]) -> int:
        return list(self._store.batch_is_exist(_names(keys))).count(1)

    def forget(self, keys: Sequence[bytes]) -> None:
        self._store.batch_remove(_names(keys), True)

    def stop(self) -> None:
        if hasattr(self, "_store"):
            self._store.close()
        super().stop()


class MooncakeMemcpy(Mooncake):
    """The segment lies in the client's own memory, and ends with it: a put or get is a copy within one process."""

    memcpy = "1"


def _names(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
