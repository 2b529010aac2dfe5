"""A model of Llama-3-8B's shape with random weights, and engines around it that the benchmarks need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch

from cachesvc.connector.base import RestoreCheckpoint, Scatter
from cachesvc.connector.device import DeviceLoads, DeviceStaging
from cachesvc.connector.passes import Pass
from cachesvc.connector.prefix_cache import NullPrefixCache
from cachesvc.engine.engine import Engine
from cachesvc.engine.models.base import SequenceSpan
from cachesvc.engine.models.layers import GatedMLP
from cachesvc.engine.models.llama import LlamaConfig, LlamaLayer, LlamaModel
from cachesvc.engine.runner import Runner, Step
from cachesvc.engine.scheduler import Chunk
from cachesvc.kernels import pool_of_pages
from cachesvc.keys import BLOCK_TOKENS, Tokens

WINDOW: Final = 128
SPAN: Final = 1280
"""Tokens that attend to each other and to the window before them, where attention is confined."""

MAX_TOKENS: Final = 32_768

V41_TOKEN_BYTES: Final = 890


def llama_8b(*, layers: int = 32) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
        windows=(None,) * layers,
        qk_norm=False,
        rope={"rope_theta": 500_000.0},
        eos_token_ids=(),
    )


def random_model(config: LlamaConfig, device: torch.device) -> LlamaModel:
    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16, device=device) * columns**-0.5

    ones = torch.ones(config.hidden_size, dtype=torch.bfloat16, device=device)
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    layers = [
        LlamaLayer(
            input_norm=ones,
            qkv=matrix(q + 2 * kv, hidden),
            q_norm=None,
            k_norm=None,
            out=matrix(hidden, q),
            post_norm=ones,
            mlp=GatedMLP(matrix(2 * inner, hidden), matrix(hidden, inner)),
        )
        for _ in range(config.num_hidden_layers)
    ]
    return LlamaModel(config, matrix(config.vocab_size, hidden), layers, ones, matrix(config.vocab_size, hidden))


class HitCache(NullPrefixCache):
    """Says that so many tokens are there, and moves nothing: what is left is the computing of the rest."""

    def __init__(self, hit_tokens: int) -> None:
        self._hit = hit_tokens

    def begin(
        self,
        tokens: Tokens,
        *,
        traffic_class: str | None = None,
        salt: bytes = b"",
        adapter: bytes = b"",
        extra: Mapping[int, bytes] | None = None,
        local_tokens: int = 0,
        counted: bool = True,
    ) -> Pass:
        p = Pass(tokens)
        p.hit_tokens = self._hit
        return p

    def load(self, p: Pass, scatter: Scatter, restore: RestoreCheckpoint | None = None) -> int:
        return self._hit


class ConfinedRunner(Runner):
    """Attention of `SPAN` tokens at a time, to themselves and the window before: as dear at any place of a prompt.

    So is that of a model with sliding windows and a compressed global KV, whose prefill is what a hit rate multiplies.
    """

    def _prepare(self, chunks: Sequence[Chunk]) -> Step:
        step = super()._prepare(chunks)
        batch = step.batch
        spans = []
        for span, chunk in zip(batch.spans, chunks, strict=True):
            for start in range(0, span.length, SPAN):
                length = min(SPAN, span.length - start)
                stop = chunk.start + start + length
                first = max(0, stop - length - WINDOW)
                context = span.context
                if isinstance(context, slice):
                    cut: slice | torch.Tensor = slice(context.start + first, context.start + stop)
                else:
                    cut = context[first:stop]
                spans.append(SequenceSpan(span.start + start, length, cut))
        return replace(step, batch=replace(batch, spans=spans))


def confine(engine: Engine) -> None:
    model = engine._model
    assert isinstance(model, LlamaModel)
    # The table of angles grows with contexts, which are cut here, and not with positions, which are not.
    model._rotary.at(torch.zeros(1, dtype=torch.int64, device=model.device), model.dtype, MAX_TOKENS)
    engine._runner = ConfinedRunner(model, engine._pool)


def compress(engine: Engine, staging: DeviceStaging) -> None:
    """What goes to and from the cache is a pool of V4.1's size; the model computes on its own KV as before."""
    pool = engine._pool
    rows = torch.randint(
        0, 256, (pool.num_pages, V41_TOKEN_BYTES * pool.page_size), dtype=torch.uint8, device=pool.device
    )
    paged = pool_of_pages(rows, pages=BLOCK_TOKENS // pool.page_size)
    path = engine._device
    assert path is not None, "an engine without staging"
    path._transfers = staging.transfers(paged)
    path._loads = DeviceLoads(path._transfers)
