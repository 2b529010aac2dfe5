"""What the cache gains an engine on a GPU: time to the first token, throughput, and what saving costs others.

A model of Llama-3-8B's shape with random weights, in our engine, over a daemon of our own. Prompts of 32,000 tokens of
which 96 % are in the daemon's arena. Cold, warm, and the ceilings come from one run.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from gpu_arena import Arena, gpu_name
from gpu_model import V41_TOKEN_BYTES, HitCache, compress, confine, llama_8b, random_model

from cachesvc.benchmark.harness import Baseline, Result, Run, Side, interleaved
from cachesvc.benchmark.process import DaemonProcess
from cachesvc.cli._daemon import fetch_report
from cachesvc.connector.base import BasePrefixCache
from cachesvc.connector.device import CudaDevice, DeviceStaging
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.prefix_cache import NullPrefixCache, PrefixCache
from cachesvc.engine.cache import block_layout
from cachesvc.engine.engine import Engine, EngineConfig
from cachesvc.engine.models.llama import FlatBatch, SequenceSpan
from cachesvc.engine.request import SamplingParams
from cachesvc.keys import BLOCK_TOKENS, Namespace

PROMPT_BLOCKS = 250
HIT_BLOCKS = 240
PAGE = 16
OPTIONS = CacheOptions(
    match_budget_s=0.1,
    save_queue_bytes=5 << 30,
    save_batch_bytes=256 << 20,
    load_batch_bytes=16 << 30,
    load_deadline_s=30.0,
    save_deadline_s=30.0,
)
ONE_TOKEN = SamplingParams(max_new_tokens=1)


class Bench:
    def __init__(self, *, quick: bool) -> None:
        self.quick = quick
        self.device = CudaDevice()
        self.model = random_model(llama_8b(), self.device.torch_device)
        self.staging = DeviceStaging(self.device)
        self.run = Run("bench/gpu_gain.py", {"prompt tokens": PROMPT_BLOCKS * BLOCK_TOKENS}, gpu=gpu_name())
        self._random = random.Random(1)

    def tokens(self, count: int) -> list[int]:
        return self._random.choices(range(128_000), k=count)

    def engine(self, cache: BasePrefixCache, prompts: int, batch: int, staging: DeviceStaging | None = None) -> Engine:
        pages = prompts * (PROMPT_BLOCKS + 1) * BLOCK_TOKENS // PAGE
        return Engine(self.model, cache, EngineConfig(pages, PAGE, batch, prompts), staging=staging)

    def cache(self, address: str, name: str, payload_bytes: int) -> PrefixCache:
        namespace = Namespace(name, "random", "bfloat16", layout={"bench": name})
        cache = PrefixCache(namespace, payload_bytes, address=address, options=OPTIONS, staging=self.staging)
        if not cache.ready(10.0):
            sys.exit("gpu_gain: the daemon does not answer")
        return cache

    # ---- time to the first token -----------------------------------------------------------------------------------

    def ttft(self, store: Path | None) -> None:
        payload = block_layout(self.model.config, self.model.dtype).payload_bytes
        prefix = self.tokens(HIT_BLOCKS * BLOCK_TOKENS)
        rest = (PROMPT_BLOCKS - HIT_BLOCKS) * BLOCK_TOKENS
        rounds = 3 if self.quick else 7
        moved = payload * HIT_BLOCKS
        pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(1 << 30, dtype=torch.uint8, device=self.device.torch_device)
        with DaemonProcess(14 << 30, store) as daemon:
            cache = self.cache(daemon.address, "llama", payload)
            cold = self.engine(NullPrefixCache(), 1, 8192)
            warm = self.engine(cache, 1, 8192, self.staging)
            suffix = self.engine(HitCache(len(prefix)), 1, 8192)
            try:
                first = self.first_token(warm, prefix + self.tokens(rest))  # cold: fills the cache
                if not cache.flush(60.0):
                    sys.exit("gpu_gain: the blocks are not saved in a minute")
                self.wait_flushed(daemon.address)
                same: list[bool] = []

                def one_warm() -> float:
                    prompt = prefix + self.tokens(rest)
                    out = self.output(warm, prompt)
                    if out.hit_tokens != len(prefix):
                        sys.exit(f"gpu_gain: {out.hit_tokens} tokens were hit instead of {len(prefix)}: {cache.stats}")
                    same.append(self.output(cold, prompt).tokens == out.tokens)
                    cache.flush(60.0)
                    return seconds(out.ttft_s)

                def copied() -> None:
                    there.copy_(pinned, non_blocking=True)
                    torch.cuda.synchronize()

                sides = [
                    Side("cold", lambda: self.first_token(cold, prefix + self.tokens(rest))),
                    Side("warm", one_warm),
                    Side("suffix", lambda: self.first_token(suffix, prefix + self.tokens(rest))),
                    Side("pinned", copied),
                ]
                times = interleaved(sides, rounds)
            finally:
                for engine in (cold, warm, suffix):
                    engine.close()
                cache.close()
        middle = {name: statistics.median(taken.seconds) for name, taken in times.items()}
        bytes_s = moved / (len(pinned) / middle["pinned"])
        bound = max(("the suffix alone", middle["suffix"]), ("the bytes at the ceiling", bytes_s), key=lambda b: b[1])
        params = {"hit": f"{HIT_BLOCKS} of {PROMPT_BLOCKS} blocks", "KV": "16 MiB a block"}
        for name, label in (("cold", "TTFT cold"), ("suffix", "TTFT, the suffix alone"), ("warm", "TTFT warm")):
            baseline = Baseline(bound[0], bound[1]) if name == "warm" else None
            taken = times[name].seconds
            self.add(
                label, params, middle[name], (min(taken), max(taken)), "s", baseline, 1.15 if baseline else None, True
            )
        self.add("the bytes at the ceiling", params, bytes_s, (bytes_s, bytes_s), "s")
        self.add("TTFT cold, saving", params, first, (first, first), "s")
        gain = Baseline("cold ÷ the suffix alone", middle["cold"] / middle["suffix"])
        value = middle["cold"] / middle["warm"]
        self.add("TTFT cold ÷ warm", params, value, (value, value), "times", gain)
        self.add("same first token as cold", params, sum(same), (sum(same), sum(same)), f"of {len(same)}")

    def first_token(self, engine: Engine, prompt: Sequence[int]) -> float:
        return seconds(self.output(engine, prompt).ttft_s)

    def output(self, engine: Engine, prompt: Sequence[int]):  # type: ignore[no-untyped-def]
        return engine.generate([prompt], ONE_TOKEN)[0]

    def wait_flushed(self, address: str) -> None:
        deadline = time.monotonic() + 90.0
        while fetch_report(address).arena_dirty_bytes:
            if time.monotonic() > deadline:
                self.run.skipped["flushed"] = "the daemon still writes to disk while the rest is measured"
                return
            time.sleep(0.1)

    # ---- throughput ------------------------------------------------------------------------------------------------

    def throughput(self, store: Path | None, *, confined: bool) -> None:
        """Prompts per second, cold and warm, with a KV of V4.1's size and this model's computing."""
        payload = V41_TOKEN_BYTES * BLOCK_TOKENS
        rest = (PROMPT_BLOCKS - HIT_BLOCKS) * BLOCK_TOKENS
        batch, running = 7 * rest, 14
        cold_prompts, warm_prompts = (2, 28) if self.quick else (4, 98)
        prefixes = [self.tokens(HIT_BLOCKS * BLOCK_TOKENS) for _ in range(cold_prompts)]
        release_memory()
        with DaemonProcess(4 << 30, store) as daemon:
            cache = self.cache(daemon.address, f"v41 {confined}", payload)
            engine = self.engine(cache, running, batch, self.staging)
            compress(engine, self.staging)
            if confined:
                confine(engine)
            try:
                for _ in range(2):  # warm: compilers, libraries, memory
                    self.many(engine, [self.tokens(batch) for _ in range(2)])
                colds = [self.many(engine, [self.tokens(PROMPT_BLOCKS * BLOCK_TOKENS) for _ in range(2)])]
                colds += [self.many(engine, [prefix + self.tokens(rest) for prefix in prefixes])]
                colds += [self.many(engine, [self.tokens(PROMPT_BLOCKS * BLOCK_TOKENS) for _ in range(2)])]
                cold = statistics.median(colds)
                cache.flush(60.0)
                self.wait_flushed(daemon.address)
                prompts = [prefixes[n % cold_prompts] + self.tokens(rest) for n in range(warm_prompts)]
                self.many(engine, prompts[:8])
                rates = [self.many(engine, [p[:-rest] + self.tokens(rest) for p in prompts]) for _ in range(3)]
                print(cache.stats, file=sys.stderr)
            finally:
                engine.close()
                cache.close()
        del engine
        release_memory()
        engine = self.engine(HitCache(HIT_BLOCKS * BLOCK_TOKENS), running, batch)
        if confined:
            confine(engine)
        bare = statistics.median([self.many(engine, prompts) for _ in range(3)])
        engine.close()
        del engine
        tokens = PROMPT_BLOCKS * BLOCK_TOKENS
        params = {
            "hit": f"{HIT_BLOCKS} of {PROMPT_BLOCKS} blocks",
            "KV": f"{V41_TOKEN_BYTES} B a token",
            "attention": "window" if confined else "whole context",
        }
        warm = statistics.median(rates)
        self.add("throughput cold", params, cold * tokens, (min(colds) * tokens, max(colds) * tokens), "tokens/s")
        self.add("throughput warm", params, warm * tokens, (min(rates) * tokens, max(rates) * tokens), "tokens/s")
        spread = (min(rates) / cold, max(rates) / cold)
        by_tokens = Baseline("1 ÷ (1 - hit rate)", 1 / (1 - HIT_BLOCKS / PROMPT_BLOCKS))
        self.add("gain", params, warm / cold, spread, "times", by_tokens, 0.95)
        free = Baseline("the same with loads that cost nothing", bare / cold)
        self.add("gain", params, warm / cold, spread, "times", free, 0.95)

    def many(self, engine: Engine, prompts: Sequence[Sequence[int]]) -> float:
        """Prompts per second."""
        for prompt in prompts:
            engine.add_request(prompt, ONE_TOKEN)
        torch.cuda.synchronize()
        started = time.perf_counter()
        while engine.has_requests:
            engine.step()
        return len(prompts) / (time.perf_counter() - started)

    # ---- interference ----------------------------------------------------------------------------------------------

    def interference(self) -> None:
        """A step of prefill, and one of decoding, while blocks of 16 MiB are saved at the link's full rate."""
        engine = self.engine(NullPrefixCache(), 3, 8192)
        pool = engine._pool
        transfers = self.staging.transfers(pool.as_paged())
        payload = block_layout(self.model.config, self.model.dtype).payload_bytes
        arena = Arena(4 << 30)
        count = 64
        pages = [list(range(count * BLOCK_TOKENS // PAGE))]
        targets = arena.slots(payload, 2 * count, neighbours=True)
        buffers = self.staging.slots(payload, 2 * count)
        stop, saving, saved = threading.Event(), threading.Event(), [0, 0]

        def save(number: int) -> None:
            """One of two that take turns, as the engine's thread and those that save do."""
            views = buffers.views(buffers.take(count))
            into = targets[number * count : (number + 1) * count]
            with torch.cuda.stream(torch.cuda.Stream()):  # a compute stream of its own: nothing waits for its gathers
                while not stop.is_set():
                    if saving.wait(0.01):
                        views.filled(transfers.stage(pages, views.blocks))
                        self.staging.copy(into, views, checksums=False)
                        saved[number] += count * payload

        def before(on: bool) -> None:
            (saving.set if on else saving.clear)()
            time.sleep(0.1)
            self._saved = (sum(saved), time.perf_counter())

        def after() -> None:
            if saving.is_set():
                rates.append((sum(saved) - self._saved[0]) / (time.perf_counter() - self._saved[1]) / 1e9)

        threads = [threading.Thread(target=save, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        steps = {
            "prefill step, 8,192 tokens": self.prefill_step(pool),
            "decode step, 16 sequences": self.decode_step(pool),
        }
        try:
            for name, step in steps.items():
                rates: list[float] = []
                sides = [
                    Side("alone", step, partial(before, False), after),
                    Side("saving", step, partial(before, True), after),
                ]
                times = interleaved(sides, 5 if self.quick else 11, warmups=1)
                alone, beside = (statistics.median(times[label].seconds) for label in ("alone", "saving"))
                params = {"saves": f"{statistics.median(rates):.1f} GB/s"}
                spread = (min(times["saving"].seconds), max(times["saving"].seconds))
                self.add(f"{name}, while saving", params, beside, spread, "s", Baseline("alone", alone), 1.03, True)
        finally:
            stop.set()
            for thread in threads:
                thread.join(10.0)
            engine.close()
            self.staging.windows.close()

    def prefill_step(self, pool) -> Callable[[], None]:  # type: ignore[no-untyped-def]
        length = 8192
        start = 64 * BLOCK_TOKENS
        return self.step(pool, [(start, length, start)], repeats=2)

    def decode_step(self, pool) -> Callable[[], None]:  # type: ignore[no-untyped-def]
        return self.step(pool, [(0, 1, 8191 + 4 * n) for n in range(16)], repeats=10)

    def step(self, pool, parts, *, repeats: int) -> Callable[[], None]:  # type: ignore[no-untyped-def]
        """Forward passes over (first slot, new tokens, tokens before)."""
        device = self.device.torch_device
        spans, positions, slots, row = [], [], [], 0
        for first, length, before in parts:
            spans.append(SequenceSpan(row, length, slice(first, first + before + length)))
            positions.append(torch.arange(before, before + length))
            slots.append(torch.arange(first + before, first + before + length))
            row += length
        batch = FlatBatch(
            torch.randint(0, 128_000, (row,), device=device),
            torch.cat(positions).to(device),
            torch.cat(slots).to(device),
            spans,
            torch.arange(row - 1, row, device=device),
        )

        def run() -> None:
            for _ in range(repeats):
                self.model.forward(batch, pool.kv)
            torch.cuda.synchronize()

        return run

    def add(
        self,
        name: str,
        params: dict[str, object],
        value: float,
        spread: tuple[float, float],
        unit: str,
        baseline: Baseline | None = None,
        target: float | None = None,
        at_most: bool = False,
    ) -> None:
        self.run.results.append(Result(name, params, value, spread, unit, baseline, target, at_most))
        print(json.dumps(self.run.results[-1].to_json()), file=sys.stderr, flush=True)


def release_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def seconds(value: float | None) -> float:
    assert value is not None, "a request that ended without a token"
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="JSON only; it is what is printed in any case")
    parser.add_argument("--store", type=Path, help="directory for the daemon's store")
    parser.add_argument("--only", choices=("ttft", "gain", "interference"), help="one part")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_gain: torch finds no CUDA device here")
    # The engine's thread launches work for the device; it must not wait 5 ms (the default) behind other threads.
    sys.setswitchinterval(0.0005)
    bench = Bench(quick=options.quick)
    if options.only in (None, "interference"):
        bench.interference()
    if options.only in (None, "ttft"):
        bench.ttft(options.store)
    if options.only in (None, "gain"):
        bench.throughput(options.store, confined=True)
        bench.throughput(options.store, confined=False)
    print(json.dumps(bench.run.to_json(), indent=1))


if __name__ == "__main__":
    main()
