"""Prefill and decode apart: what handing a prompt over costs. And what batching and asynchronous scheduling gain.

A prompt of 4,000 tokens, new each time, goes to one process that computes and answers it, and to a front with a worker
for prompts and one for answers, in turns. All of them stand idle but the one that is asked. The model is
SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
import torch

from cachesvc.benchmark.harness import Baseline, Result, Run, Side, interleaved
from cachesvc.connector.prefix_cache import NullPrefixCache
from cachesvc.engine.convert import ensure_model
from cachesvc.engine.daemon_process import DaemonProcess
from cachesvc.engine.demo_split import WorkerProcess
from cachesvc.engine.engine import Engine, EngineConfig
from cachesvc.engine.models.base import Model
from cachesvc.engine.models.loading import load_model
from cachesvc.engine.request import SamplingParams

READY_S: Final = 60.0


@dataclass(frozen=True)
class Timing:
    """Of one streamed answer, seconds from the request on."""

    first: float
    second: float
    tokens: list[str]


def tokens_of(seed: int, count: int, vocabulary: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(1000, vocabulary - 1000, (count,), generator=generator)]


def ask(url: str, model: str, prompt: list[int], new: int) -> Timing:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": new, "stream": True}
    began, times, texts = time.perf_counter(), [], []
    with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter() - began)
                texts.append(json.loads(line[6:])["choices"][0]["text"])
    return Timing(times[0], times[1], texts)


def handing_over(run: Run, path: Path, vocabulary: int, length: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        daemon = DaemonProcess(Path(directory) / "store", Path(directory))
        stack.callback(daemon.close)
        daemon.start()
        wait_for(daemon)

        def start(role: str, *options: str) -> WorkerProcess:
            worker = WorkerProcess(role, path, "--cache", daemon.address, *options)
            stack.callback(worker.stop)
            return worker

        prefill, decode = start("prefill"), start("decode")
        front = start("front", "--prefill", prefill.url, "--decode", decode.url)
        sides = {"apart": front, "one process": start("both")}
        timings: dict[str, list[Timing]] = {name: [] for name in sides}
        same = 0
        for number in range(repeats + 1):
            # Another prompt for each side, so that neither hits what the other has stored.
            for side, (name, process) in enumerate(sides.items()):
                timing = ask(process.url, path.name, tokens_of(2 * number + side, length, vocabulary), 8)
                if number:  # The first round makes buffers and page tables warm.
                    timings[name].append(timing)
        for number in range(20):
            prompt = tokens_of(1000 + number, 40 + 10 * number, vocabulary)
            texts = {name: ask(process.url, path.name, prompt, 8).tokens for name, process in sides.items()}
            same += texts["apart"] == texts["one process"]
    params = {"model": path.name, "tokens": length}
    for what in ("first", "second"):
        values = {name: [getattr(timing, what) for timing in of] for name, of in timings.items()}
        middle = {name: statistics.median(of) for name, of in values.items()}
        spread = (min(values["apart"]), max(values["apart"]))
        base = Baseline("one process", middle["one process"])
        run.results.append(
            Result(f"time to {what} token, apart", params, middle["apart"], spread, "s", base, target=1.1, at_most=True)
        )
    run.results.append(Result("prompts with the same answer", {"prompts": 20}, same, (same, same), "", target=20))


def wait_for(daemon: DaemonProcess) -> None:
    deadline = time.monotonic() + READY_S
    socket = Path(daemon.address.removeprefix("unix:"))
    while not socket.exists():
        if not daemon.running or time.monotonic() > deadline:
            raise SystemExit(f"the daemon did not start: {daemon.last_words()}")
        time.sleep(0.05)


def batching(run: Run, model: Model[Any], new: int, repeats: int) -> None:
    """16 requests at once, and one after the other."""
    prompts = [tokens_of(number, 64, model.config.vocab_size) for number in range(16)]
    params = SamplingParams(max_new_tokens=new, stop_token_ids=())
    config = EngineConfig(num_pages=512, max_running=16)

    def at_once() -> None:
        with Engine(model, NullPrefixCache(), config) as engine:
            engine.generate(prompts, params)

    def in_turn() -> None:
        with Engine(model, NullPrefixCache(), config) as engine:
            for prompt in prompts:
                engine.generate([prompt], params)

    times = interleaved([Side("16 at once", at_once), Side("one at a time", in_turn)], repeats)
    rate, spread = times["16 at once"].rate(16 * new)
    base = Baseline("one at a time", times["one at a time"].rate(16 * new)[0])
    what = {"requests": 16, "prompt": 64, "new": new}
    run.results.append(Result("decoded tokens", what, rate, spread, "tokens/s", base, target=3.0))


def scheduling(run: Run, models: Sequence[tuple[str, Model[Any]]], new: int, repeats: int) -> None:
    """The same work with the next step prepared while the device is at this one, and after it."""
    for name, model in models:
        prompts = [tokens_of(number, 64, model.config.vocab_size) for number in range(8)]

        def decode(ahead: bool, model: Model[Any] = model, prompts: list[list[int]] = prompts) -> None:
            config = EngineConfig(num_pages=512, max_running=8, async_scheduling=ahead)
            with Engine(model, NullPrefixCache(), config) as engine:
                engine.generate(prompts, SamplingParams(max_new_tokens=new, stop_token_ids=()))

        sides = [Side("asynchronous", lambda d=decode: d(True)), Side("step by step", lambda d=decode: d(False))]
        times = interleaved(sides, repeats)
        rate, spread = times["asynchronous"].rate(8 * new)
        base = Baseline("step by step", times["step by step"].rate(8 * new)[0])
        what = {"model": name, "requests": 8, "new": new, "threads": torch.get_num_threads()}
        run.results.append(Result("asynchronous scheduling", what, rate, spread, "tokens/s", base))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a shorter prompt and fewer repeats")
    parser.add_argument("--json", action="store_true", help="accepted for uniformity: JSON is all that is printed")
    parser.add_argument("--repeats", type=int, help="default 5, quick 3")
    parser.add_argument("--only", choices=("handover", "batching", "scheduling"), action="append")
    parser.add_argument("--threads", type=int, help="of torch, where it runs in this process")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    quick, wanted = arguments.quick, arguments.only or ["handover", "batching", "scheduling"]
    repeats = arguments.repeats or (3 if quick else 5)
    path = ensure_model()
    run = Run("bench/engine_pd.py", {"quick": quick, "only": wanted, "repeats": repeats})
    if "handover" in wanted:
        vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]
        handing_over(run, path, vocabulary, 1000 if quick else 4000, repeats)
    if wanted != ["handover"]:
        model = load_model(path)
        if "batching" in wanted:
            batching(run, model, 8 if quick else 24, repeats)
        if "scheduling" in wanted:
            scheduling(run, [(path.name, model)], 8 if quick else 24, repeats)
    result = run.to_json()
    print(json.dumps(result, indent=1))
    return 1 if any(row["pass"] is False for row in result["results"]) else 0


if __name__ == "__main__":
    sys.exit(main())
