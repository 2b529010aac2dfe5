"""What the engine's tests share: tiny random checkpoints and an in-memory stand-in for the cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cachesvc.engine.cache import block_layout
from cachesvc.engine.models.config import LlamaConfig
from cachesvc.keys import BLOCK_TOKENS, Namespace, PrefixHasher

Copy = Callable[[int, Sequence[memoryview]], None]

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


@dataclass
class FakePass:
    tokens: list[int]
    hasher: PrefixHasher
    hit_tokens: int
    saved_blocks: int
    finished: bool = False


@dataclass
class FakeCache:
    """Keeps payloads in a dictionary and checks that the engine keeps to the rules of `PrefixCache`.

    `loadable` limits how many of the hit tokens a load delivers (None: all); `per_call` is how many blocks go into one
    call of scatter or gather.
    """

    config: LlamaConfig
    dtype: torch.dtype = torch.float32
    loadable: int | None = None
    per_call: int = 2
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    passes: list[FakePass] = field(default_factory=list)
    saves: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.payload_bytes = block_layout(self.config, self.dtype).payload_bytes
        self._namespace = Namespace("tiny", "0", str(self.dtype))

    def match(
        self, tokens: Sequence[int], *, traffic_class: str | None = None, salt: bytes = b"", adapter: bytes = b""
    ) -> FakePass:
        hasher = PrefixHasher(self._namespace, salt=salt, adapter=adapter)
        hasher.extend(tokens)
        hit = 0
        while hit < (len(tokens) - 1) // BLOCK_TOKENS and hasher.keys[hit] in self.blocks:
            hit += 1
        self.passes.append(FakePass(list(tokens), hasher, hit * BLOCK_TOKENS, hit))
        return self.passes[-1]

    def load(self, p: FakePass, scatter: Copy) -> int:
        assert not p.finished
        limit = p.hit_tokens if self.loadable is None else min(self.loadable, p.hit_tokens)
        count = limit // BLOCK_TOKENS
        for first in range(0, count, self.per_call):
            keys = p.hasher.keys[first : min(first + self.per_call, count)]
            scatter(first, [memoryview(self.blocks[key]) for key in keys])
        return count * BLOCK_TOKENS

    def extend(self, p: FakePass, tokens: Sequence[int]) -> None:
        assert not p.finished
        p.tokens += tokens
        p.hasher.extend(tokens)

    def save(self, p: FakePass, computed_tokens: int, gather: Copy) -> int:
        assert not p.finished
        assert computed_tokens <= len(p.tokens)
        stop = computed_tokens // BLOCK_TOKENS
        offered = 0
        for first in range(p.saved_blocks, stop, self.per_call):
            keys = p.hasher.keys[first : min(first + self.per_call, stop)]
            buffers = [bytearray(b"\xff" * self.payload_bytes) for _ in keys]
            gather(first, [memoryview(buffer) for buffer in buffers])
            for key, buffer in zip(keys, buffers, strict=True):
                self.saves.append(key)
                self.blocks[key] = bytes(buffer)
            offered += len(keys)
        p.saved_blocks = max(p.saved_blocks, stop)
        return offered

    def finish(self, p: FakePass) -> None:
        assert not p.finished, "a pass was finished twice"
        p.finished = True


class NoCache:
    """The cache switched off."""

    @dataclass
    class Pass:
        hit_tokens: int = 0

    def match(
        self, tokens: Sequence[int], *, traffic_class: str | None = None, salt: bytes = b"", adapter: bytes = b""
    ) -> Pass:
        return self.Pass()

    def load(self, p: Pass, scatter: Copy) -> int:
        return 0

    def extend(self, p: Pass, tokens: Sequence[int]) -> None:
        pass

    def save(self, p: Pass, computed_tokens: int, gather: Copy) -> int:
        return 0

    def finish(self, p: Pass) -> None:
        pass
