"""vLLM with and without the connector, side by side on a real model: first tokens after a hit, and what it costs.

usage: .venv-vllm/bin/python bench/vllm_ttft.py [--quick] [--json]        (`make test-vllm` makes the environment)

Three engine processes share the machine, and wait while another one is timed: one without a connector, one that
computes and saves, one that has computed nothing itself and loads. Two more do the same by a connector of vLLM's own.
Everything in float32 unless told otherwise: what is computed behind a hit is a batch of another shape than a whole
prompt, and bfloat16's rounding alone may then turn a greedy token over.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from vllm_engines import Engine

from cachesvc.benchmark.harness import Baseline, Result, Run
from cachesvc.benchmark.process import DaemonProcess
from cachesvc.benchmark.table import rich_table

ROOT = Path(__file__).parents[1]
BLOCK = 128
PROMPT_TOKENS = 2000
ANSWER_TOKENS = 64
REQUESTS = 50


class Words:
    """Prompts of real words from this repository's documents, no two with the same beginning."""

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        text = "\n".join(path.read_text() for path in sorted(ROOT.rglob("*.md")) if ".venv" not in str(path))
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokens = self._tokenizer.encode(text).ids
        self._number = 0

    def prompt(self, tokens: int) -> list[int]:
        self._number += 1
        start = self._tokenizer.encode(f"Document {self._number} of {time.time_ns()}:\n").ids
        at = 997 * self._number % (len(self._tokens) - tokens)
        return (start + self._tokens[at : at + tokens])[:tokens]


def measure(run: Run, model: Path, dtype: str, *, quick: bool) -> None:
    words = Words(model)
    count = 3 if quick else 10
    with tempfile.TemporaryDirectory() as logs, DaemonProcess(1 << 30) as daemon:
        at = Path(logs)
        with (
            # Its own cache: see `first_tokens`.
            Engine(model, None, at / "none", enable_prefix_caching=True, dtype=dtype) as none,
            Engine(model, daemon.address, at / "saves", dtype=dtype) as saves,
            Engine(model, daemon.address, at / "loads", environment={"PYTHONHASHSEED": "7"}, dtype=dtype) as loads,
        ):
            for engine in (none, saves, loads):
                engine.wait_ready()
                engine.run(words.prompt(PROMPT_TOKENS), max_tokens=2)
            first_tokens(run, words, none, saves, loads, prompts=count)
            example_connector(run, words, model, dtype, at, saves, loads, prompts=count)
            throughput(run, "nothing to hit", 0.97, words, none, loads, rounds=1 if quick else 3)
            os.kill(daemon.pid, signal.SIGSTOP)
            try:
                loads.run(words.prompt(PROMPT_TOKENS), max_tokens=2)  # opens the breaker
                throughput(run, "daemon stopped", 0.95, words, none, loads, rounds=1 if quick else 3)
            finally:
                os.kill(daemon.pid, signal.SIGCONT)


def first_tokens(run: Run, words: Words, none: Engine, saves: Engine, loads: Engine, *, prompts: int) -> None:
    """Greedy tokens are compared with a cold run, and with a hit in vLLM's own cache."""
    params = {"prompt_tokens": PROMPT_TOKENS, "answer_tokens": ANSWER_TOKENS, "prompts": prompts}
    without, after, hits, same, same_as_own = [], [], [], 0, 0
    for _ in range(prompts):
        prompt = words.prompt(PROMPT_TOKENS)
        saves.run(prompt, max_tokens=1)
        time.sleep(0.5)  # what it saves travels in the background
        cold = none.run(prompt, max_tokens=ANSWER_TOKENS)[0]
        hit = loads.run(prompt, max_tokens=ANSWER_TOKENS)[0]
        without.append(cold["ttft"])
        after.append(hit["ttft"])
        hits.append(hit["params"]["cachesvc"]["hit_tokens"] / (PROMPT_TOKENS // BLOCK * BLOCK))
        own = none.run(prompt, max_tokens=ANSWER_TOKENS)[0]
        same += cold["tokens"] == hit["tokens"]
        same_as_own += own["tokens"] == hit["tokens"]
    faster = [one / other for one, other in zip(without, after, strict=True)]
    run.results += [
        Result("TTFT after a hit", params, statistics.median(after), _spread(after), "s"),
        Result("TTFT without cache", params, statistics.median(without), _spread(without), "s"),
        Result("TTFT without cache ÷ after a hit", params, statistics.median(faster), _spread(faster), "", target=5.0),
        Result("full blocks from the cache", params, statistics.median(hits), _spread(hits), "", target=0.95),
        Result("prompts with the same greedy tokens", params, same, (same, same), "", target=prompts),
        Result(
            "… as after a hit in vLLM's own cache", params, same_as_own, (same_as_own, same_as_own), "", target=prompts
        ),
    ]


def example_connector(
    run: Run, words: Words, model: Path, dtype: str, at: Path, saves: Engine, loads: Engine, *, prompts: int
) -> None:
    """A hit of ours beside one of vLLM's `ExampleConnector`, which keeps a prompt's KV in files, in turns."""
    config = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(at / "example")},
    }
    ours, theirs = [], []
    try:
        with (
            Engine(model, None, at / "example saves", dtype=dtype, kv_transfer_config=config) as their_saves,
            Engine(model, None, at / "example loads", dtype=dtype, kv_transfer_config=config) as their_loads,
        ):
            for engine in (their_saves, their_loads):
                engine.wait_ready()
                engine.run(words.prompt(PROMPT_TOKENS), max_tokens=2)
            for _ in range(prompts):
                prompt = words.prompt(PROMPT_TOKENS)
                saves.run(prompt, max_tokens=1)
                their_saves.run(prompt, max_tokens=1)
                time.sleep(0.5)
                ours.append(loads.run(prompt, max_tokens=2)[0]["ttft"])
                theirs.append(their_loads.run(prompt, max_tokens=2)[0]["ttft"])
    except AssertionError as error:
        run.skipped["ExampleConnector"] = str(error).splitlines()[-1][-200:]
        return
    run.results.append(
        Result(
            "TTFT after a hit, beside ExampleConnector's",
            {"prompt_tokens": PROMPT_TOKENS, "prompts": prompts},
            statistics.median(ours),
            _spread(ours),
            "s",
            Baseline("ExampleConnector", statistics.median(theirs)),
            1.0,
            at_most=True,
        )
    )


def throughput(run: Run, name: str, target: float, words: Words, none: Engine, with_: Engine, *, rounds: int) -> None:
    """Tokens per second of 50 requests at once, prompts and answers together."""
    sizes = {"requests": REQUESTS, "prompt_tokens": 300, "answer_tokens": 16, "rounds": rounds}
    speeds: dict[str, list[float]] = {"none": [], "with": []}
    failed = 0
    for number in range(rounds):
        prompts = [words.prompt(300) for _ in range(REQUESTS)]
        sides: list[tuple[str, Engine]] = [("none", none), ("with", with_)]
        for side, engine in sides if number % 2 else reversed(sides):
            started = time.perf_counter()
            answers = engine.run(*prompts, max_tokens=16)
            speeds[side].append(REQUESTS * 316 / (time.perf_counter() - started))
            failed += sum(answer["reason"] != "length" for answer in answers)
    run.results.append(
        Result(
            f"throughput, {name}",
            sizes | {"failed": failed},
            statistics.median(speeds["with"]),
            _spread(speeds["with"]),
            "tokens/s",
            Baseline("no connector", statistics.median(speeds["none"])),
            target,
        )
    )


def _spread(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer prompts and rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--model", type=Path, help="a checkpoint; by default SmolLM2, converted once")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    arguments = parser.parse_args()
    model = arguments.model
    if model is None:
        from cachesvc.engine.convert import ensure_model

        model = ensure_model()
    run = Run("vllm_ttft", {"model": model.name, "dtype": arguments.dtype, "quick": arguments.quick})
    measure(run, model, arguments.dtype, quick=arguments.quick)
    result: dict[str, Any] = run.to_json()
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(rich_table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
