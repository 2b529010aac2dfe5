"""One store as `rivals.py` sees it: a worker process that takes orders."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

from environments import Environment

_WORKER = Path(__file__).with_name("worker.py")
_ORDER_SECONDS = 180.0
_STOP_SECONDS = 60.0


class SideFailed(Exception):
    """One line that says why this store is left out."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


class RemoteSide:
    """Starts its worker at once; the store itself with the order `start`."""

    def __init__(self, name: str, where: tuple[str, str], environment: Environment, directory: Path, memory: int):
        self.name = name
        self._log = directory / "worker.log"
        variables = dict(os.environ)
        for variable, folders in (("PATH", environment.path), ("LD_LIBRARY_PATH", environment.libraries)):
            present = [variables[variable]] if variables.get(variable) else []
            variables[variable] = ":".join([*map(str, folders), *present])
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [environment.python, str(_WORKER), *where, str(directory), str(memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=variables,
                start_new_session=True,  # a group of its own, with the servers that it starts
            )

    def order(self, do: str, **arguments: Any) -> Any:
        """What the worker answers. Raises `SideFailed`, also when it does not answer in time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise SideFailed(self.name, f"{do}: its process has ended: {self._last_words()}") from error
        if not select.select([self._process.stdout], [], [], _ORDER_SECONDS)[0]:
            raise SideFailed(self.name, f"{do}: no answer within {_ORDER_SECONDS:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise SideFailed(self.name, f"{do}: its process has ended: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise SideFailed(self.name, f"{do}: {answer['error']}")
        return answer["answer"]

    def close(self) -> None:
        """Ends the worker and whatever it has started."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # upon which it stops its store and ends
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][-300:] if lines else "it said nothing"
