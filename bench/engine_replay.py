"""Bounded and exact replay: their cost in tokens, arithmetic and time, what is stored, and what the bounded one loses.

Cost: `ced` models with random weights, from 1,024 to 32,768 tokens of context and from 4 to 16 layers. Quality: a real
model on real text, SmolLM2-135M with some of its layers cut down to a window. It was not trained for that, so its
perplexity says nothing about hybrid models; the differences between replayed and computed windows do.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from cachesvc.benchmark.harness import Baseline, Result, Run, Side, interleaved
from cachesvc.engine.cache import block_layout
from cachesvc.engine.convert import ensure_model
from cachesvc.engine.kv import PagePool, PageTable
from cachesvc.engine.made import CedShape, make_ced
from cachesvc.engine.models.base import FlatBatch, Model, SequenceSpan
from cachesvc.engine.models.llama import LlamaModel
from cachesvc.engine.models.loading import load_model
from cachesvc.engine.replay import Replay, replay_start
from cachesvc.engine.tokenizer import ChatTokenizer
from cachesvc.engine.transcript import load_transcript

BLOCK: Final = 128
CHUNK: Final = 512
DEEP_CONTEXT: Final = 4096
"""Where depths are compared, and the longest at which the exact replay is counted: there it takes seconds."""
SCORED: Final = 256
"""Tokens behind the hit whose predictions are compared."""


class Prompt(NamedTuple):
    """One prompt in a pool of its own."""

    model: Model[Any]
    tokens: Sequence[int]
    pool: PagePool
    table: PageTable

    @classmethod
    def of(cls, model: Model[Any], tokens: Sequence[int]) -> Prompt:
        pool = PagePool(model.config, num_pages=-(-len(tokens) // 16), page_size=16, dtype=model.dtype)
        table = PageTable(pool)
        table.ensure(len(tokens))
        return cls(model, tokens, pool, table)

    def compute(self, start: int, stop: int, logits: bool = False, **span: Any) -> torch.Tensor:
        """Tokens `start` to `stop` in chunks; their logits if wanted."""
        keep, rows = self.model.config.prefill_keep, []
        full_from = 0 if keep is None else max(0, len(self.tokens) - keep)
        for first in range(start, stop, CHUNK):
            last = min(stop, first + CHUNK)
            batch = FlatBatch(
                tokens=torch.tensor(self.tokens[first:last]),
                positions=torch.arange(first, last),
                slots=self.table.slots(first, last),
                spans=[SequenceSpan(0, last - first, self.table.context(last), full_from=full_from, **span)],
                logit_rows=torch.arange(last - first) if logits else torch.empty(0, dtype=torch.int64),
            )
            rows.append(self.model.forward(batch, self.pool.kv))
        return torch.cat(rows)

    def after_hit(self, hit: int) -> Prompt:
        """The same prompt in a new pool that holds what is stored of its first `hit` tokens."""
        other = Prompt.of(self.model, self.tokens)
        for index, group in enumerate(self.pool.groups):
            if group.window is None:
                for mine, theirs in zip(self.pool.layers(index), other.pool.layers(index), strict=True):
                    theirs[:, : hit // group.tokens_per_record] = mine[:, : hit // group.tokens_per_record]
        return other

    def replay(self, hit: int, mode: Replay, window: int) -> int:
        """Rebuilds the windows before `hit`; how many tokens that took."""
        keep = self.model.config.prefill_keep
        full_from = None if keep is None else max(0, len(self.tokens) - keep)
        start = replay_start(self.model.config, window, hit, full_from, mode)
        self.compute(start, hit, seen_from=start, frozen=True, confined=mode == "bounded")
        return hit - start


def flops(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def one(run: Run, name: str, params: dict[str, Any], value: float, unit: str, **more: Any) -> None:
    """A result that is counted, not timed."""
    run.results.append(Result(name, params, value, (value, value), unit, **more))


def cost(run: Run, place: Path, contexts: Sequence[int], depths: Sequence[int], repeats: int) -> None:
    """The pool is filled with random records: a replay's cost does not depend on what they say."""
    first: dict[str, float] = {}
    for depth in depths:
        model = load_model(make_ced(place / f"depth-{depth}", CedShape(layers=depth)))
        for context in contexts if depth == depths[0] else (DEEP_CONTEXT,):
            generator = torch.Generator().manual_seed(context)
            tokens = torch.randint(0, model.config.vocab_size, (context + 300,), generator=generator).tolist()
            sequence = Prompt.of(model, tokens)
            for layer in sequence.pool.kv:
                if layer.dtype == torch.uint8:
                    layer.random_(0, 100, generator=generator)
            params = {"context": context, "layers": depth, "encoder_layers": depth // 2}
            modes: tuple[Replay, ...] = ("bounded", "exact") if context <= DEEP_CONTEXT else ("bounded",)
            for mode in modes:
                taken = sequence.replay(context, mode, BLOCK)
                target = BLOCK if mode == "bounded" else None
                one(run, f"replayed tokens, {mode}", params, taken, "tokens", target=target, at_most=True)
                count = flops(
                    lambda sequence=sequence, context=context, mode=mode: sequence.replay(context, mode, BLOCK)
                )
                per_layer = count / (depth // 2)
                base = first.setdefault(mode, per_layer)
                one(
                    run,
                    f"arithmetic per encoder layer, {mode}",
                    params,
                    per_layer,
                    "FLOP",
                    baseline=Baseline(f"{contexts[0]} tokens, {depths[0]} layers", base),
                    target=1.05 if mode == "bounded" else None,
                    at_most=True,
                )
            side = Side("bounded", lambda s=sequence, c=context: _nothing(s.replay(c, "bounded", BLOCK)))
            seconds = interleaved([side], repeats)["bounded"].seconds
            middle = sorted(seconds)[len(seconds) // 2]
            spread = (min(seconds), max(seconds))
            run.results.append(Result("time of a bounded replay", params, middle, spread, "s"))


def _nothing(_: object) -> None:
    return None


def prefill(run: Run, place: Path, length: int, repeats: int) -> None:
    """A cold prompt with and without the decoder half for most of it."""
    sequences = {}
    for name, keep in (("truncated", 140), ("all layers", 1 << 20)):
        model = load_model(make_ced(place / name.replace(" ", "-"), CedShape(layers=8, keep=keep, hidden=256)))
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, model.config.vocab_size, (length,), generator=generator).tolist()
        sequences[name] = Prompt.of(model, tokens)
    params = {"tokens": length, "layers": 8, "encoder_layers": 4}
    counts = {name: flops(lambda s=s: s.compute(0, length)) for name, s in sequences.items()}
    base = Baseline("all layers", counts["all layers"])
    one(run, "prefill arithmetic", params, counts["truncated"], "FLOP", baseline=base, target=0.6, at_most=True)
    sides = [Side(name, lambda s=s: _nothing(s.compute(0, length))) for name, s in sequences.items()]
    times = interleaved(sides, repeats)
    middle = {name: sorted(t.seconds)[len(t.seconds) // 2] for name, t in times.items()}
    spread = (min(times["truncated"].seconds), max(times["truncated"].seconds))
    run.results.append(
        Result("prefill time", params, middle["truncated"], spread, "s", Baseline("all layers", middle["all layers"]))
    )


def stored_bytes(run: Run, place: Path) -> None:
    for form in ("fp8", "fp4"):
        config = load_model(make_ced(place / form, CedShape(layers=8, form=form))).config
        sizes = {w: block_layout(config, torch.bfloat16, w).payload_bytes / BLOCK for w in ("never", "every_block")}
        base = Baseline("with its windows", sizes["every_block"])
        params = {"records": form, "layers": 8, "dtype": "bfloat16"}
        one(run, "stored bytes per token", params, sizes["never"], "B", baseline=base, target=1 / 8, at_most=True)


def quality(run: Run, cases: Sequence[tuple[int, int]], hit: int) -> None:
    """Against windows that were computed: `cases` are (how many layers see only a window, its tokens)."""
    path = ensure_model()
    tokenizer = ChatTokenizer(path)
    text = tokenizer.render([message for turn in load_transcript().turns for message in turn])
    tokens = tokenizer.encode(text)[: hit + SCORED + 1]
    whole = LlamaModel.load(path)
    layers = whole.config.num_hidden_layers
    for count, window in cases:
        # Evenly spread, as hybrid models have them.
        windows = tuple(window if (i + 1) * count // layers > i * count // layers else None for i in range(layers))
        model = LlamaModel(
            replace(whole.config, windows=windows), whole._embedding, whole._layers, whole._norm, whole._head
        )
        cold = Prompt.of(model, tokens)
        cold.compute(0, hit)
        expected = cold.compute(hit, hit + SCORED, logits=True)
        params = {"model": path.name, "window_layers": count, "window": window, "hit": hit, "scored": SCORED}
        modes: tuple[Replay, ...] = ("exact", "bounded")
        for mode in modes:
            warm = cold.after_hit(hit)
            taken = warm.replay(hit, mode, window)
            got = warm.compute(hit, hit + SCORED, logits=True, seen_from=hit - taken)
            compare(run, mode, {**params, "replayed_tokens": taken}, expected, got, tokens[hit + 1 :])


def compare(
    run: Run, mode: str, params: dict[str, Any], expected: torch.Tensor, got: torch.Tensor, following: Sequence[int]
) -> None:
    target = torch.tensor(following[: len(expected)])
    agree = float((expected.argmax(-1) == got.argmax(-1)).float().mean())
    one(run, f"same greedy token, {mode}", params, agree, "share", target=1.0 if mode == "exact" else None)
    divergence = float((expected - got).abs().max())
    one(
        run,
        f"largest difference of a logit, {mode}",
        params,
        divergence,
        "",
        target=1e-2 if mode == "exact" else None,
        at_most=True,
    )
    kl = F.kl_div(F.log_softmax(got, -1), F.log_softmax(expected, -1), log_target=True, reduction="batchmean")
    one(run, f"divergence of the distributions, {mode}", params, float(kl), "nats per token")
    perplexity = [math.exp(float(F.cross_entropy(logits, target))) for logits in (got, expected)]
    one(
        run,
        f"perplexity, {mode}",
        params,
        perplexity[0],
        "",
        baseline=Baseline("windows computed, not replayed", perplexity[1]),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter prompts, fewer cases: about a minute")
    parser.add_argument("--json", action="store_true", help="accepted for uniformity: JSON is all that is printed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("cost", "stored", "prefill", "quality"), action="append")
    parser.add_argument("--threads", type=int, help="of torch")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    quick = arguments.quick
    contexts = (1024, 4096, 32768) if quick else (1024, 2048, 4096, 8192, 16384, 32768)
    depths = (4, 16) if quick else (4, 8, 16)
    cases = ((5, 128), (25, 128)) if quick else ((5, 128), (15, 128), (25, 128), (15, 512))
    wanted = arguments.only or ["cost", "stored", "prefill", "quality"]
    run = Run("bench/engine_replay.py", {"quick": quick, "threads": torch.get_num_threads()})
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        if "cost" in wanted:
            cost(run, place, contexts, depths, arguments.repeats)
        if "stored" in wanted:
            stored_bytes(run, place)
        if "prefill" in wanted:
            prefill(run, place, 2048 if quick else 4096, arguments.repeats)
    if "quality" in wanted:
        quality(run, cases, 1024 if quick else 2048)
    run.params = {**run.params, "seconds": round(time.perf_counter() - started)}
    result = run.to_json()
    print(json.dumps(result, indent=1))
    return 1 if any(row["pass"] is False for row in result["results"]) else 0


if __name__ == "__main__":
    sys.exit(main())
