"""Kill loops: clients at work, the daemon killed, started again, and everything compared with the model."""

from __future__ import annotations

import json
import os
import queue
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from faulty.client import Reader
from faulty.daemon import Daemon, wait_for
from faulty.model import TTLS, Model, Prompt

MOMENTS: Final = ("any", "flush", "seal", "open", "expire", "rewrite", "start", "rebuild", "stop")
"""See `wait_for`. And: while blocks in use are written again; while it starts; while it rebuilds a deleted index; and
a clean stop, after which everything must be there."""
_SEEN: Final = ("rewritten_blocks", "expired_blocks", "evicted_blocks", "reclaimed_segments", "scrubbed_blocks")
_CLIENTS: Final = 3
_PROMPTS_EACH: Final = 24
_IDLE_SECONDS: Final = 60.0


class Clients:
    """The engines: processes that outlive the daemon."""

    def __init__(self, address: str, seed: int) -> None:
        bench = str(Path(__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": bench}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: queue.Queue[bytes] = queue.Queue()
        for number in range(_CLIENTS):
            # Neighbours share half of their prompts.
            first = number * _PROMPTS_EACH // 2
            arguments = [address, str(first), str(first + _PROMPTS_EACH), str(seed + number)]
            command = [sys.executable, "-m", "faulty.client", *arguments]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(process.stdout,), daemon=True).start()
        self.prompts = range((_CLIENTS + 1) * _PROMPTS_EACH // 2)

    def begin(self) -> None:
        for process in self._processes:
            assert process.stdin is not None, "it was opened with a pipe"
            process.stdin.write(b"work\n")
            process.stdin.flush()

    def end(self, tell: Callable[[dict[str, object]], None]) -> None:
        """Waits until all have noticed that the daemon is gone, and passes on what they were told."""
        deadline = time.monotonic() + _IDLE_SECONDS
        busy = len(self._processes)
        while busy:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"{busy} clients hang: they do not notice that the daemon is gone") from None
            if not line:
                raise RuntimeError("a client has ended: the connector raised into the engine")
            fact = json.loads(line)
            if "idle" in fact:
                busy -= 1
            else:
                tell(fact)

    def _listen(self, output: IO[bytes]) -> None:
        for line in output:
            self._lines.put(line)
        self._lines.put(b"")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class KillLoops:
    """`counts` are what is reported; `faults` says in words what was wrong."""

    def __init__(self, directory: Path, *, seed: int, strict: bool) -> None:
        """With `strict` nothing may be lost; without, the store is so small that files are evicted all the time."""
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.restart_seconds: list[float] = []
        self._directory = Path(tempfile.mkdtemp(prefix="faults-", dir=directory))
        self._strict = strict
        self._budget = (1 << 30) if strict else (12 << 20)
        self._random = random.Random(seed)
        self._daemon = Daemon(self._directory, store_bytes=self._budget, options={"scrub-rate": "1MiB"})
        self._clients = Clients(self._daemon.address, seed)
        self._model = Model(strict)

    def run(self) -> None:
        """One loop: start, compare, work, kill."""
        moment = self._random.choice(MOMENTS)
        self.counts["loops"] += 1
        if moment == "rebuild":
            shutil.rmtree(self._daemon.store / "index", ignore_errors=True)
            self._model.index_deleted()
        if moment in ("start", "rebuild"):
            self._daemon.spawn()
            time.sleep(self._random.uniform(0.1, 1.1) * statistics.median(self.restart_seconds[-9:] or [0.5]))
            self._daemon.kill()
            self._killed(moment)
        if not self._start():
            return
        self._compare()
        self._measure()
        if moment in ("start", "rebuild"):
            moment = "any"
        self._work(moment)

    def close(self) -> None:
        self._clients.close()
        self._daemon.close()
        if self.faults:
            print(f"what is left of it: {self._directory}", file=sys.stderr)
        else:
            shutil.rmtree(self._directory, ignore_errors=True)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        started = time.monotonic()
        self._daemon.spawn()
        if not self._daemon.ready():
            self._fault("failed_restarts", f"no restart: {self._daemon.log.read_text()[-2000:]}")
            self._daemon.kill()
            return False
        self.restart_seconds.append(time.monotonic() - started)
        return True

    def _compare(self) -> None:
        """Everything that is there, byte by byte, and everything that must be."""
        reader = Reader(self._daemon.address)
        try:
            if not reader.ready(30.0):
                self._fault("failed_restarts", "the connector does not attach after a restart")
                return
            for number in self._clients.prompts:
                now = self._daemon.now
                required = self._model.required(number, now)
                there, wrong = reader.read(Prompt(number))
                if there < required:
                    again, more = reader.read(Prompt(number))
                    self._fault(
                        "durable_blocks_lost",
                        f"prompt {number}: {there} (then {again}) blocks are there, {required} must be",
                        required - there,
                    )
                    wrong += more
                if wrong:
                    self._fault("wrong_blocks", f"prompt {number}: {wrong} blocks have wrong bytes", wrong)
                self._model.found(number, there, now)
                self.counts["blocks_compared"] += there
                self.counts["blocks_required"] += required
        finally:
            reader.close()

    def _measure(self) -> None:
        report = self._daemon.report()
        if report is None:
            return
        for name in ("recovered_segments", "index_rebuilds", "corrupt_blocks", "foreign_files"):
            self.counts[name] += report.events.get(name, 0)
        if report.events.get("foreign_files", 0):
            self._fault("faults_in_log", "a segment's header was not written whole")

    def _work(self, moment: str) -> None:
        began = self._daemon.now  # whatever is stored or used from here on is so no earlier
        self._clients.begin()
        if moment in ("expire", "rewrite"):
            time.sleep(self._random.uniform(0.2, 0.6))
            self._daemon.advance(self._random.uniform(0.2, 0.9) * min(TTLS.values()))
        elif self._random.random() < 0.3:
            self._daemon.advance(self._random.uniform(0.0, 0.2) * min(TTLS.values()))
        if moment == "stop":
            time.sleep(self._random.uniform(0.1, 0.5))
            self._note_events()
            if not self._daemon.stop():
                self._fault("failed_stops", "a clean stop did not end well")
            self._after(moment, began)
            self._model.stopped()
            return
        if self._random.random() < 0.2:
            self._note_events()
        came = wait_for(self._daemon, "open" if moment == "rewrite" else moment, self._random)
        self._daemon.kill()
        self._after(moment if came != "late" else came, began)

    def _after(self, moment: str, began: float) -> None:
        self._killed(moment)
        self._clients.end(lambda fact: self._take(fact, began))
        if self._daemon.bytes_on_disk() > self._budget:
            self._fault("budget_overruns", f"{self._daemon.bytes_on_disk()} bytes on disk, budget {self._budget}")

    def _killed(self, moment: str) -> None:
        self.counts[f"killed: {moment}"] += 1
        text = self._daemon.log.read_text(errors="replace")
        self._daemon.log.write_text("")
        if "Traceback" in text or "fault in" in text:
            self._fault("faults_in_log", text[text.find("Traceback") - 500 :][:3000])

    def _take(self, fact: dict[str, object], now: float) -> None:
        number = int(str(fact["prompt"]))
        if "wrong" in fact:
            self._fault("wrong_blocks", f"prompt {number}: wrong bytes under load", int(str(fact["wrong"])))
        elif "offered" in fact:
            self._model.offered(number, int(str(fact["first"])), int(str(fact["offered"])), now)
        else:
            blocks = fact["stored"]
            assert isinstance(blocks, list), fact
            durable = bool(fact["durable"])
            self._model.stored(number, blocks, now, durable=durable)
            self.counts["blocks_acknowledged_durable" if durable else "blocks_acknowledged"] += len(blocks)

    def _note_events(self) -> None:
        """What the daemon counted since its start, from time to time: not all of it is seen."""
        report = self._daemon.report()
        if report is not None:
            for name in _SEEN:
                self.counts[f"seen {name}"] += report.events.get(name, 0)

    def _fault(self, name: str, text: str, count: int = 1) -> None:
        self.counts[name] += count
        self.faults.append(f"loop {self.counts['loops']}: {text}")
        print(f"FAULT loop {self.counts['loops']}: {text}", file=sys.stderr, flush=True)
