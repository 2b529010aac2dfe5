"""One step on the device: chunks in, one sampled token per finished chunk out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cachesvc.engine.kv import PagePool
from cachesvc.engine.models.llama import FlatBatch, LlamaModel, SequenceSpan
from cachesvc.engine.sampler import sample
from cachesvc.engine.scheduler import Chunk


class Runner:
    """Turns scheduled chunks into one flat batch, runs the model over it and samples."""

    def __init__(self, model: LlamaModel, pool: PagePool) -> None:
        self._model = model
        self._pool = pool

    def run(
        self,
        chunks: Sequence[Chunk],
        ready: Callable[[int], None] = lambda layer: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[str, int]:
        """Computes the chunks' KV; returns by request id, the next token of each request computed to its end.

        `ready` is called with each layer before its KV is read; `meanwhile` once a device has everything to compute.
        """
        logits = self._model.forward(self._flatten(chunks), self._pool.kv, ready)
        meanwhile()
        sampling = [chunk.request for chunk in chunks if chunk.samples]
        tokens = sample(logits, [r.params for r in sampling], [len(r.generated) for r in sampling])
        return {request.request_id: token for request, token in zip(sampling, tokens, strict=True)}

    def _flatten(self, chunks: Sequence[Chunk]) -> FlatBatch:
        tokens: list[int] = []
        positions, slots, spans, logit_rows = [], [], [], []
        for chunk in chunks:
            request, start, stop = chunk
            spans.append(SequenceSpan(len(tokens), stop - start, request.table.context(stop)))
            tokens.extend(request.tokens[start:stop])
            positions.append(torch.arange(start, stop))
            slots.append(request.table.slots(start, stop))
            if chunk.samples:
                logit_rows.append(len(tokens) - 1)
        device = self._pool.device
        return FlatBatch(
            tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions=torch.cat(positions).to(device),
            slots=torch.cat(slots),
            spans=spans,
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        )
