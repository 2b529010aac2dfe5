"""The Llama family (Llama 2 and 3, SmolLM2) and Qwen3, with windows where the configuration has them.

One forward pass takes a *flat* batch: the new tokens of all sequences one after the other, no padding. Everything but
attention is one matrix product for all of them; attention runs sequence by sequence over that sequence's own slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cachesvc.connector.layout import KVGroup
from cachesvc.engine.models.attention import Attention
from cachesvc.engine.models.base import FlatBatch, Model, SequenceSpan
from cachesvc.engine.models.config import (
    ModelConfig,
    common_fields,
    layer_windows,
    pool_indices,
    require,
    window_groups,
)
from cachesvc.engine.models.layers import GatedMLP
from cachesvc.engine.models.linear import linear
from cachesvc.engine.models.rope import Rotary, rotate
from cachesvc.engine.models.weights import Weights

__all__ = ["FlatBatch", "LlamaConfig", "LlamaModel", "SequenceSpan"]

MODEL_TYPES = ("llama", "qwen3")


@dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    qk_norm: bool
    rope: dict[str, Any]

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> LlamaConfig:
        require(raw.get("model_type") in MODEL_TYPES, "model_type", raw.get("model_type"), " or ".join(MODEL_TYPES))
        require(raw.get("hidden_act", "silu") == "silu", "hidden_act", raw.get("hidden_act"), "silu")
        for name in ("attention_bias", "mlp_bias"):
            require(not raw.get(name), name, raw.get(name), "false")
        heads = raw["num_attention_heads"]
        kv_heads = raw.get("num_key_value_heads") or heads
        require(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of {heads} attention heads")
        return cls(
            **common_fields(raw),
            intermediate_size=raw["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            windows=layer_windows(raw) if raw.get("use_sliding_window") else (None,) * raw["num_hidden_layers"],
            qk_norm=raw["model_type"] == "qwen3",
            # `rope_parameters` is transformers 5; before it there were `rope_theta` and `rope_scaling`.
            rope=raw.get("rope_parameters") or {**(raw.get("rope_scaling") or {}), "rope_theta": raw.get("rope_theta")},
        )

    def kv_groups(self, dtype: torch.dtype) -> tuple[KVGroup, ...]:
        return window_groups(self.windows, self.num_key_value_heads, self.head_dim, dtype)


@dataclass(frozen=True)
class LlamaLayer:
    """Weights of one layer; q, k and v are one matrix."""

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    post_norm: Tensor
    mlp: GatedMLP


class LlamaModel(Model[LlamaConfig]):
    def __init__(
        self, config: LlamaConfig, embedding: Tensor, layers: list[LlamaLayer], norm: Tensor, head: Tensor
    ) -> None:
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._places = pool_indices(config.windows)
        self._rotary = Rotary(config.head_dim, config.rope, device=self.device)

    @classmethod
    def load(cls, path: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> LlamaModel:
        """Loads a checkpoint directory (config.json and safetensors). Raises `CheckpointError` if it does not fit."""
        config = LlamaConfig.from_dir(path)
        weights = Weights(path, dtype, device)
        take = weights.take
        hidden, dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_attention_heads * dim, config.num_key_value_heads * dim
        layers = []
        for index in range(config.num_hidden_layers):
            prefix = f"model.layers.{index}"
            attention = f"{prefix}.self_attn"
            layers.append(
                LlamaLayer(
                    input_norm=take(f"{prefix}.input_layernorm.weight", hidden),
                    qkv=torch.cat(
                        (
                            take(f"{attention}.q_proj.weight", q_size, hidden),
                            take(f"{attention}.k_proj.weight", kv_size, hidden),
                            take(f"{attention}.v_proj.weight", kv_size, hidden),
                        )
                    ),
                    q_norm=take(f"{attention}.q_norm.weight", dim) if config.qk_norm else None,
                    k_norm=take(f"{attention}.k_norm.weight", dim) if config.qk_norm else None,
                    out=take(f"{attention}.o_proj.weight", hidden, q_size),
                    post_norm=take(f"{prefix}.post_attention_layernorm.weight", hidden),
                    mlp=GatedMLP.take(weights, f"{prefix}.mlp", hidden, config.intermediate_size),
                )
            )
        embedding = take("model.embed_tokens.weight", config.vocab_size, hidden)
        norm = take("model.norm.weight", hidden)
        head = embedding if config.tie_word_embeddings else take("lm_head.weight", config.vocab_size, hidden)
        return cls(config, embedding, layers, norm, head)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, kv: Sequence[Tensor]) -> Tensor:
        config, sure = self.config, batch.invariant
        eps, width = config.rms_norm_eps, (config.hidden_size,)
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        cos, sin = self._rotary.at(batch.positions, self.dtype, batch.stop)
        attention = Attention(batch)

        hidden = F.embedding(batch.tokens, self._embedding)
        for layer, place, window in zip(self._layers, self._places, config.windows, strict=True):
            pool = kv[place]
            qkv = linear(F.rms_norm(hidden, width, layer.input_norm, eps), layer.qkv, invariant=sure)
            parts = qkv.split_with_sizes((q_size, kv_size, kv_size), -1)
            q, k, v = (part.reshape(len(qkv), -1, config.head_dim) for part in parts)
            if layer.q_norm is not None:
                q = F.rms_norm(q, (config.head_dim,), layer.q_norm, eps)
                k = F.rms_norm(k, (config.head_dim,), layer.k_norm, eps)
            batch.write(pool, rotate(k, cos, sin), v, stored=window is None)
            attended = attention(rotate(q, cos, sin), pool, window=window)
            hidden = hidden + linear(attended, layer.out, invariant=sure)
            hidden = hidden + layer.mlp(F.rms_norm(hidden, width, layer.post_norm, eps), invariant=sure)
        last = F.rms_norm(hidden[batch.logit_rows], width, self._norm, eps)
        return linear(last, self._head, invariant=sure).float()
