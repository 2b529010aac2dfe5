"""vLLM in a process of its own, driven by benchmarks and tests."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
START_S = 300.0
ANSWER_S = 120.0


def transfer_config(address: str, **extra: Any) -> dict[str, Any]:
    """The flag of ``docs/vllm.md``."""
    return {
        "kv_connector": "CacheConnector",
        "kv_connector_module_path": "cachesvc.connector.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, **extra},
    }


class Engine:
    """One engine process. Without an `address` it has no connector. Ended when the context ends."""

    def __init__(
        self,
        model: Path,
        address: str | None,
        log: Path,
        *,
        connector: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        """`connector`: options of ours; `options`: arguments of ``vllm.LLM``."""
        options = {
            "model": str(model),
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            **options,
        }
        if address is not None:
            options["kv_transfer_config"] = transfer_config(address, **(connector or {}))
        self.log = log
        read, write = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("vllm_commands.py")), str(write), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[write],
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                text=True,
            )
        os.close(write)
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(read,), daemon=True).start()
        self._waiting = True

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as answers:
            for line in answers:
                self._answers.put(line)
        self._answers.put("")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends as a script would; what is queued is saved."""
        assert self._process.stdin is not None
        if self._process.poll() is None:
            self._process.stdin.close()
            try:
                self._process.wait(60.0)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait_ready(self) -> None:
        if self._waiting:
            self._answer(START_S)
            self._waiting = False

    def send(self, **command: Any) -> None:
        """For a command whose answer is taken later, by `receive`."""
        self.wait_ready()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        return self._answer(ANSWER_S)

    def run(self, *prompts: list[int], **command: Any) -> list[dict[str, Any]]:
        """Computes prompts together; one answer for each."""
        self.send(prompts=list(prompts), **command)
        answers: list[dict[str, Any]] = self.receive()
        return answers

    def _answer(self, timeout: float) -> Any:
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            line = ""
        if not line:
            self.kill()
            raise AssertionError(f"the engine gave no answer:\n{self.log.read_text()[-6000:]}")
        return json.loads(line)
