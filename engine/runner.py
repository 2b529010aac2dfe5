"""One step on the device: chunks in, one sampled token per finished chunk out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from cachesvc.engine.kv import PagePool
from cachesvc.engine.models.base import FlatBatch, Model, SequenceSpan
from cachesvc.engine.request import SamplingParams
from cachesvc.engine.sampler import sample
from cachesvc.engine.scheduler import Chunk


@dataclass(frozen=True)
class Step:
    """A batch, and what is needed beyond it."""

    batch: FlatBatch
    unknown: dict[int, str]
    """Rows whose token the step before samples, and for which request."""
    sampled: list[tuple[str, SamplingParams, int]]
    """For each row of logits its request, how to sample, and how many tokens the request will have generated before."""


class Runner:
    """Turns scheduled chunks into one flat batch, runs the model over it and samples.

    With a thread of its own a step is under way while its caller prepares the next one. Steps run one after the other,
    as on a device's stream. A token that is not known yet when its step is prepared comes from the step before it.
    """

    def __init__(
        self,
        model: Model[Any],
        pool: PagePool,
        *,
        bounded: bool = False,
        invariant: bool = False,
        threaded: bool = False,
    ) -> None:
        self._model = model
        self._pool = pool
        self._bounded = bounded
        self._invariant = invariant
        self._thread = ThreadPoolExecutor(1, "engine-device") if threaded else None
        self._last: dict[str, int] = {}

    def launch(
        self,
        chunks: Sequence[Chunk],
        kv: Sequence[torch.Tensor] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Future[dict[str, int]]:
        """Starts a step; gives by request id the next token of each request that is computed to its end.

        `kv`: in place of the pool's own. `meanwhile` is called once a device has everything to compute.
        """
        step = self._prepare(chunks)
        if self._thread is not None:
            return self._thread.submit(self._run, step, self._pool.kv if kv is None else kv, meanwhile)
        done: Future[dict[str, int]] = Future()
        done.set_result(self._run(step, self._pool.kv if kv is None else kv, meanwhile))
        return done

    def close(self) -> None:
        """Waits for the steps that are under way."""
        if self._thread is not None:
            self._thread.shutdown()

    def _run(self, step: Step, kv: Sequence[torch.Tensor], meanwhile: Callable[[], None]) -> dict[str, int]:
        batch = step.batch
        if step.unknown:
            tokens = batch.tokens.clone()
            rows = torch.tensor(list(step.unknown), device=tokens.device)
            known = [self._last[request_id] for request_id in step.unknown.values()]
            tokens[rows] = torch.tensor(known, device=tokens.device)
            batch = replace(batch, tokens=tokens)
        logits = self._model.forward(batch, kv)
        meanwhile()
        chosen = sample(logits, [params for _, params, _ in step.sampled], [index for _, _, index in step.sampled])
        self._last = {request_id: token for (request_id, _, _), token in zip(step.sampled, chosen, strict=True)}
        return self._last

    def _prepare(self, chunks: Sequence[Chunk]) -> Step:
        tokens: list[int] = []
        positions, slots, spans, logit_rows, sampled = [], [], [], [], []
        unknown: dict[int, str] = {}
        for chunk in chunks:
            request, start, stop = chunk.request, chunk.start, chunk.stop
            spans.append(
                SequenceSpan(
                    start=len(tokens),
                    length=stop - start,
                    context=request.table.context(stop),
                    seen_from=request.seen_from,
                    frozen=chunk.frozen,
                    confined=chunk.frozen and self._bounded,
                    full_from=request.full_from or 0,
                )
            )
            tokens.extend(request.tokens[start:stop])
            if stop > len(request.tokens):
                unknown[len(tokens)] = request.request_id
                tokens.append(0)
            positions.append(torch.arange(start, stop))
            slots.append(request.table.slots(start, stop))
            if chunk.samples:
                logit_rows.append(len(tokens) - 1)
                sampled.append((request.request_id, request.params, stop - request.input_tokens))
        device = self._pool.device
        batch = FlatBatch(
            tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions=torch.cat(positions).to(device),
            slots=torch.cat(slots),
            spans=spans,
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
            invariant=self._invariant,
        )
        return Step(batch, unknown, sampled)
