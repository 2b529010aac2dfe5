"""The daemon that is killed, on a store, a clock and a log of its own; and the moments at which it is."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from cachesvc.cli._daemon import fetch_report
from cachesvc.errors import DaemonUnreachable
from cachesvc.rpc import cache_pb2 as pb
from faulty.model import TTLS

START_SECONDS: Final = 60.0
STOP_SECONDS: Final = 60.0
SEGMENT_BYTES: Final = 256 << 10


class Daemon:
    def __init__(self, directory: Path, *, store_bytes: int, options: Mapping[str, str]) -> None:
        self.store = directory / "store"
        self.log = directory / "daemon.log"
        self.address = f"unix:{directory / 's'}"
        self._offset = directory / "offset"
        self._moved = 0.0
        self._pid = 0
        bench = str(Path(__file__).parents[1])
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "faulty.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": bench},
        )
        self._move(0.0)
        self._command = [
            *("serve", "--store", str(self.store), "--socket", str(directory / "s")),
            *("--listen", "", "--metrics", "", "--arena-bytes", "32MiB", "--clock-offset-file", str(self._offset)),
            *("--store-bytes", str(store_bytes), "--segment-bytes", str(SEGMENT_BYTES), "--rewrite-rate", "4MiB"),
        ]
        for name, ttl in TTLS.items():
            self._command += ["--class", f"{name}={ttl:.0f}s"]
        for name, value in options.items():
            self._command += [f"--{name}", value]

    @property
    def now(self) -> float:
        """The daemon's time."""
        return time.time() + self._moved

    def advance(self, seconds: float) -> None:
        """Moves the daemon's clock, also while it runs."""
        self._move(self._moved + seconds)

    def spawn(self) -> None:
        self._pid = self._ask("spawn", str(self.log), *self._command) or 0

    def ready(self) -> bool:
        """Waits until it answers. False when it ended, or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.alive:
            if self.report() is not None:
                return True
            time.sleep(0.02)
        return False

    def report(self) -> pb.ReportReply | None:
        try:
            return fetch_report(self.address)
        except DaemonUnreachable:
            return None

    @property
    def alive(self) -> bool:
        return self._pid != 0 and self._ask("poll") is None

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)
        self._ask("wait")

    def stop(self) -> bool:
        """SIGTERM. Whether it ended as it should."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while self.alive:
            if time.monotonic() > deadline:
                self.kill()
                return False
            time.sleep(0.01)
        return self._ask("poll") == 0

    def close(self) -> None:
        if self.alive:
            self.kill()
        self._zygote.kill()
        self._zygote.wait()

    def _signal(self, number: int) -> None:
        if self.alive:
            os.kill(self._pid, number)

    def _ask(self, *command: str) -> int | None:
        assert self._zygote.stdin is not None and self._zygote.stdout is not None, "they were opened as pipes"
        print(json.dumps(command), file=self._zygote.stdin, flush=True)
        answer: int | None = json.loads(self._zygote.stdout.readline())
        return answer

    def files(self) -> dict[str, int]:
        """The segment files and their sizes, as they are at this moment."""
        return dict(_sizes(str(self.store), 4))

    def bytes_on_disk(self) -> int:
        """Bytes of segments and index, as the file system counts lengths."""
        return sum(self.files().values()) + sum(size for _, size in _sizes(str(self.store / "index"), 1, suffix=""))

    def _move(self, offset: float) -> None:
        scratch = self._offset.with_suffix(".new")
        scratch.write_text(str(offset))
        scratch.replace(self._offset)
        self._moved = offset


def _sizes(path: str, depth: int, suffix: str = ".seg") -> Iterator[tuple[str, int]]:
    try:
        entries = list(os.scandir(path))
    except OSError:
        return  # gone meanwhile
    for entry in entries:
        try:
            if depth > 1 and entry.is_dir():
                yield from _sizes(entry.path, depth - 1, suffix)
            elif depth == 1 and entry.name.endswith(suffix):
                yield entry.path, entry.stat().st_size
        except OSError:
            continue


def wait_for(daemon: Daemon, moment: str, source: random.Random) -> str:
    """Returns at the moment at which the daemon is to be killed: the one asked for, or ``"late"`` if it does not come.

    ``flush``: a segment file has just grown; ``seal``: one has its last record; ``open``: there is a new one;
    ``expire``: one has gone; ``any``: some time.
    """
    if moment == "any":
        time.sleep(source.uniform(0.05, 0.8))
        return moment
    deadline = time.monotonic() + 2.5
    skip = source.randrange(4) if moment in ("flush", "open") else 0
    before = daemon.files()
    while time.monotonic() < deadline and daemon.alive:
        now = daemon.files()
        grown = [path for path, size in now.items() if size > before.get(path, size)]
        came = {
            "flush": bool(grown),
            "seal": any(now[path] > SEGMENT_BYTES - (40 << 10) for path in grown),
            "open": bool(now.keys() - before.keys()),
            "expire": bool(before.keys() - now.keys()),
        }[moment]
        before = now
        if came and not skip:
            time.sleep(source.choice((0.0, 0.0, 0.001, 0.005, 0.02)))
            return moment
        skip -= came
        time.sleep(0.001)
    return "late"
