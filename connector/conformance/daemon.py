"""A ``cachesvc serve`` process of the suite's own, ended by its process id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import grpc

from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc import cache_pb2_grpc as rpc

START_S: Final = 120.0
CALL_S: Final = 5.0


class Daemon:
    """On one store and one socket, through all its lives."""

    def __init__(self, directory: Path) -> None:
        self.store = directory / "store"
        self._socket = directory / "s"
        self._log = directory / "daemon.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix:{self._socket}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns once it answers. Raises `RuntimeError` when it does not come up."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "cachesvc", "serve", "--store", str(self.store)),
                    *("--socket", str(self._socket), "--listen", "", "--metrics", "", "--arena-bytes", "256MiB"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        while self.blocks() is None:
            if not self.running or time.monotonic() >= deadline:
                raise RuntimeError(f"the daemon does not start: {self._log.read_text(errors='replace')[-500:]}")
            time.sleep(0.05)

    def blocks(self) -> int | None:
        """How many are stored; None when it does not answer."""
        with grpc.insecure_channel(self.address) as channel:
            try:
                return int(rpc.CacheStub(channel).Report(pb.ReportRequest(), timeout=CALL_S).blocks)
            except grpc.RpcError:
                return None

    def settled_blocks(self, timeout_s: float) -> int:
        """How many are stored, once that has not changed for a second."""
        deadline = time.monotonic() + timeout_s
        seen, since = self.blocks(), time.monotonic()
        while time.monotonic() < min(deadline, since + 1.0):
            time.sleep(0.1)
            now = self.blocks()
            if now != seen:
                seen, since = now, time.monotonic()
        return seen or 0

    def stop(self) -> None:
        """In an orderly way: everything is on disk afterwards."""
        if self.running and self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(START_S)

    def kill(self) -> None:
        if self.running and self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(START_S)

    def freeze(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGCONT)

    def spoil(self) -> int:
        """Flips a bit in every 512 bytes of what is on disk, while it does not run. Returns how many files there
        were."""
        files = [path for path in self.store.rglob("*.seg") if path.is_file()]
        for path in files:
            data = bytearray(path.read_bytes())
            for offset in range(4096, len(data), 512):
                data[offset] ^= 0x10
            path.write_bytes(data)
        return len(files)
