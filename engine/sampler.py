"""Chooses the next token of each request. What a request gets depends on nothing but its own logits and seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from cachesvc.engine.request import SamplingParams


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], indices: Sequence[int]) -> list[int]:
    """One token per row of float32 logits ``[n, vocab_size]``.

    `indices` says how many tokens each request has generated before. The random number of a token is a function of
    (seed, index) and not the state of a generator, so batching, preemption and chunking cannot change it.
    """
    greedy = logits.argmax(-1).tolist()
    return [
        int(token) if wanted.temperature == 0 else _draw(row, wanted, index)
        for token, row, wanted, index in zip(greedy, logits, params, indices, strict=True)
    ]


def _draw(logits: torch.Tensor, params: SamplingParams, index: int) -> int:
    """Inverse-transform sampling over the likeliest tokens, likeliest first; ties by token id."""
    ordered, ids = torch.sort(logits.double().cpu() / params.temperature, descending=True, stable=True)
    if params.top_k:
        ordered, ids = ordered[: params.top_k], ids[: params.top_k]
    cumulative = torch.softmax(ordered, -1).cumsum(-1)
    # The token that reaches top_p is the last one kept, so at least one is.
    kept = min(int(torch.searchsorted(cumulative, params.top_p)) + 1, len(cumulative))
    point = random.Random(f"{params.seed}:{index}").random() * float(cumulative[kept - 1])
    return int(ids[min(int(torch.searchsorted(cumulative[:kept], point, right=True)), kept - 1)])
