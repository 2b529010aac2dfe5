"""A `cachesvc serve` process of our own, for the demonstration. We end it, and only it, by its process id."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from cachesvc.engine.errors import DemoError

_STOP_TIMEOUT_S: Final = 60.0

_ARENA_BYTES: Final = "1GiB"
"""Holds the whole conversation; the default, a share of the free memory, would take longer to make resident."""


class DaemonProcess:
    """Starts and stops one daemon on `store`; its socket and its log lie in `directory`."""

    def __init__(self, store: Path, directory: Path) -> None:
        self._store = store
        self._socket = directory / "daemon.sock"
        self._log = directory / "daemon.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix:{self._socket}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the process; does not wait until it answers."""
        options = ["--store", str(self._store), "--socket", str(self._socket), "--listen", "", "--metrics", ""]
        options += ["--arena-bytes", _ARENA_BYTES]
        # Prompts that one worker hands to another need a class of their own; see `handoff`.
        options += ["--class", "agent=3d", "--class", "chat=7d", "--class", "handoff=10m"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cachesvc.cli.main", "serve", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        """SIGTERM, and a wait for the orderly end. Raises `DemoError` when it does not come or is not orderly."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise DemoError(f"the daemon did not stop within {_STOP_TIMEOUT_S:.0f} s of SIGTERM") from error
        if code != 0:
            raise DemoError(f"the daemon ended with exit code {code}: {self.last_words()}")

    def kill(self) -> None:
        """SIGKILL: the end that no process can prepare for."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Makes sure that nothing of ours is left running."""
        if self.running:
            with contextlib.suppress(DemoError):
                self.stop()

    def last_words(self) -> str:
        """The last line of the log, for an error message."""
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        lines = [line for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"
