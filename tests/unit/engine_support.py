"""What the engine's tests share: tiny random checkpoints and an in-memory stand-in for the cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cachesvc.connector.base import BasePrefixCache, Gather, RestoreCheckpoint, Scatter
from cachesvc.connector.layout import StorePolicy
from cachesvc.connector.passes import Pass
from cachesvc.connector.stats import CacheStats
from cachesvc.engine.cache import block_layout
from cachesvc.engine.kv import PagePool, PageTable
from cachesvc.engine.models.base import FlatBatch, Model, SequenceSpan
from cachesvc.engine.models.config import ModelConfig
from cachesvc.keys import BLOCK_TOKENS, Namespace, PrefixHasher, Tokens

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "eos_token_id": 198,
}


def tiny_tensors(raw: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights, large enough that different tokens and positions give clearly different logits."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 2.0 / columns**0.5

    hidden, inner, dim = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    q, kv = raw["num_attention_heads"] * dim, raw["num_key_value_heads"] * dim
    tensors = {"model.embed_tokens.weight": torch.randn(raw["vocab_size"], hidden, generator=generator)}
    for index in range(raw["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        tensors |= {
            prefix + "input_layernorm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
            prefix + "post_attention_layernorm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
            prefix + "self_attn.q_proj.weight": matrix(q, hidden),
            prefix + "self_attn.k_proj.weight": matrix(kv, hidden),
            prefix + "self_attn.v_proj.weight": matrix(kv, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, q),
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    tensors["model.norm.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    if not raw["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(raw["vocab_size"], hidden)
    return tensors


def write_checkpoint(path: Path, raw: dict[str, Any], *, shards: int = 1) -> dict[str, torch.Tensor]:
    """Writes a checkpoint directory as Hugging Face does; returns its tensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    tensors = tiny_tensors(raw)
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return tensors
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::shards]}
        save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def random_tokens(count: int, seed: int, vocab: int = 190) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, vocab, (count,), generator=generator)]


def forward_all(
    model: Model[Any], tokens: list[int], chunks: list[int], page_size: int = 7, invariant: bool = False
) -> torch.Tensor:
    """Logits of every position, computed in chunks of the given lengths over a scattered page table."""
    pool = PagePool(model.config, num_pages=len(tokens) // page_size + 5, page_size=page_size, dtype=model.dtype)
    for layer in pool.kv:
        layer.fill_(float("nan") if layer.is_floating_point() else 0xFF)  # What was not written must not be read.
    held = pool.allocate(2)
    table = PageTable(pool)
    table.ensure(1)
    pool.release(held)  # The table goes on with pages below its first one.
    table.ensure(len(tokens))
    assert table.pages != sorted(table.pages)
    rows, start = [], 0
    for length in chunks:
        stop = start + length
        batch = FlatBatch(
            tokens=torch.tensor(tokens[start:stop]),
            positions=torch.arange(start, stop),
            slots=table.slots(start, stop),
            spans=[SequenceSpan(0, length, table.context(stop))],
            logit_rows=torch.arange(length),
            invariant=invariant,
        )
        rows.append(model.forward(batch, pool.kv))
        start = stop
    return torch.cat(rows)


class FakeCache(BasePrefixCache):
    """Keeps payloads in a dictionary and checks that the engine keeps to the rules of `BasePrefixCache`.

    `loadable` limits how many of the hit tokens a load delivers (None: all); `per_call` is how many blocks go into one
    call of scatter or gather; `polls_needed` is how often a pass is asked for before it is settled.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        *,
        blocks: dict[bytes, bytes] | None = None,
        per_call: int = 2,
        windows: StorePolicy | None = None,
    ) -> None:
        self.payload_bytes = block_layout(config, dtype, windows).payload_bytes
        self.per_call = per_call
        self.loadable: int | None = None
        self.polls_needed = 1
        self.blocks = {} if blocks is None else blocks
        self.passes: list[Pass] = []
        self.saves: list[bytes] = []
        self.waits = 0
        self._polls: dict[bytes, int] = {}
        self._namespace = Namespace("tiny", "0", str(dtype))

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
        p = Pass(tokens, PrefixHasher(self._namespace, salt=salt, adapter=adapter, extra=extra))
        assert p.hash(wait=True)
        self.passes.append(p)
        return p

    def poll(self, p: Pass) -> bool:
        self._polls[p.id] = self._polls.get(p.id, 0) + 1
        if self._polls[p.id] < self.polls_needed:
            return False
        if p.pending:
            p.pending = False
            hit = 0
            while hit < (p.prompt_tokens - 1) // BLOCK_TOKENS and p.keys[hit] in self.blocks:
                hit += 1
            p.hit_tokens = hit * BLOCK_TOKENS
            p.next_save = hit
        return True

    def wait(self, p: Pass, timeout_s: float) -> bool:
        self.waits += 1
        return self.poll(p)

    def load(self, p: Pass, scatter: Scatter, restore: RestoreCheckpoint | None = None) -> int:
        assert not p.finished
        assert not p.pending
        limit = p.hit_tokens if self.loadable is None else min(self.loadable, p.hit_tokens)
        count = limit // BLOCK_TOKENS
        for first in range(0, count, self.per_call):
            keys = p.keys[first : min(first + self.per_call, count)]
            scatter(first, [memoryview(self.blocks[key]) for key in keys])
        return count * BLOCK_TOKENS

    def extend(self, p: Pass, tokens: Tokens) -> None:
        assert not p.finished
        p.add(tokens)
        assert p.hash(wait=True)

    def save(self, p: Pass, computed_tokens: int, gather: Gather) -> int:
        assert not p.finished
        stop = computed_tokens // BLOCK_TOKENS
        assert stop <= len(p.keys)
        offered = 0
        for first in range(p.next_save, stop, self.per_call):
            keys = p.keys[first : min(first + self.per_call, stop)]
            buffers = [bytearray(b"\xff" * self.payload_bytes) for _ in keys]
            gather(first, [memoryview(buffer) for buffer in buffers])
            for key, buffer in zip(keys, buffers, strict=True):
                self.saves.append(key)
                self.blocks[key] = bytes(buffer)
            offered += len(keys)
        p.next_save = max(p.next_save, stop)
        return offered

    def finish(self, p: Pass) -> None:
        assert not p.finished, "a pass was finished twice"
        p.finished = True

    def flush(self, timeout_s: float) -> bool:
        return True

    def ready(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        pass

    @property
    def stats(self) -> CacheStats:
        return CacheStats()
