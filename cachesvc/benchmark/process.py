"""A `cachesvc serve` process of our own to measure, on a temporary socket and store. Ended by its process id."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from cachesvc.cli._daemon import fetch_report
from cachesvc.errors import CacheError, DaemonUnreachable
from cachesvc.limits import GiB, MiB

_START_SECONDS: Final = 120.0
_STOP_SECONDS: Final = 60.0


class BenchError(CacheError):
    """The benchmark cannot be carried out; one line that says why."""


class DaemonProcess:
    """Runs while the context lives. Raises `BenchError` when the daemon does not come up."""

    def __init__(self, arena_bytes: int, store: Path | None = None, options: Sequence[str] = ()) -> None:
        """The store is made in the directory `store`, by default where temporary files go, and removed at the end.

        `options` of the command line win over those that are given otherwise.
        """
        self._options = options
        self._directory = Path(tempfile.mkdtemp(prefix="cachesvc-bench-"))
        self._store = Path(tempfile.mkdtemp(prefix="cachesvc-bench-", dir=store)) if store else self._directory
        self._process: subprocess.Popen[bytes] | None = None
        self.arena_bytes = arena_bytes
        self.address = f"unix:{self._directory / 'daemon.sock'}"
        self.tcp_address = f"127.0.0.1:{free_port()}"

    def __enter__(self) -> DaemonProcess:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the daemon does not run"
        return self._process.pid

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for directory in {self._directory, self._store}:
            shutil.rmtree(directory, ignore_errors=True)

    def _start(self) -> None:
        log = self._directory / "daemon.log"
        socket_path = self.address.removeprefix("unix:")
        options = ["--socket", socket_path, "--listen", self.tcp_address, "--metrics", ""]
        options += ["--store", str(self._store / "store"), "--store-bytes", str(4 * self.arena_bytes)]
        options += ["--arena-bytes", str(self.arena_bytes), *self._options]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cachesvc", "serve", *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={name: value for name, value in os.environ.items() if not name.startswith("CACHESVC_")},
            )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                fetch_report(self.address)
                return
            except DaemonUnreachable as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    lines = log.read_text(errors="replace").splitlines() or ["it said nothing"]
                    raise BenchError(f"the daemon to be measured does not come up: {lines[-1]}") from error
            time.sleep(0.05)


def default_arena_bytes(*, quick: bool) -> int:
    """An arena that holds what is measured: 4 GiB, or 1 GiB for a quick run, and a third of the free memory at most."""
    wanted = GiB if quick else 4 * GiB
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(64 * MiB, min(wanted, free // 3))


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
