"""Gemma 3 (text): five window layers to one that sees all, each kind with its own rotary base; norms on all sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cachesvc.connector.layout import KVGroup
from cachesvc.engine.models.attention import Attention
from cachesvc.engine.models.base import FlatBatch, Model
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

MODEL_TYPES = ("gemma3_text",)
_GELU = partial(F.gelu, approximate="tanh")


@dataclass(frozen=True)
class Gemma3Config(ModelConfig):
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    query_scale: float
    full_rope: dict[str, Any]
    window_rope: dict[str, Any]

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Gemma3Config:
        require(raw.get("model_type") in MODEL_TYPES, "model_type", raw.get("model_type"), "gemma3_text")
        activation = raw.get("hidden_activation", "gelu_pytorch_tanh")
        require(activation == "gelu_pytorch_tanh", "hidden_activation", activation, "gelu_pytorch_tanh")
        unset = ("attention_bias", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
        for name in unset:
            require(not raw.get(name), name, raw.get(name), "none")
        count, pattern = raw["num_hidden_layers"], raw.get("sliding_window_pattern") or 6
        kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count)]
        rope = raw.get("rope_parameters") or {
            "full_attention": {**(raw.get("rope_scaling") or {}), "rope_theta": raw["rope_theta"]},
            "sliding_attention": {"rope_theta": raw["rope_local_base_freq"]},
        }
        return cls(
            **common_fields({"tie_word_embeddings": True, **raw}),
            intermediate_size=raw["intermediate_size"],
            num_attention_heads=raw["num_attention_heads"],
            num_key_value_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            windows=layer_windows({"layer_types": kinds, **raw}),
            query_scale=raw["query_pre_attn_scalar"] ** -0.5,
            full_rope=rope["full_attention"],
            window_rope=rope["sliding_attention"],
        )

    def kv_groups(self, dtype: torch.dtype) -> tuple[KVGroup, ...]:
        return window_groups(self.windows, self.num_key_value_heads, self.head_dim, dtype)


@dataclass(frozen=True)
class Gemma3Layer:
    """Weights of one layer; q, k and v are one matrix. Norms hold 1 + weight, in float32."""

    before_attention: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    after_attention: Tensor
    before_mlp: Tensor
    mlp: GatedMLP
    after_mlp: Tensor


class Gemma3Model(Model[Gemma3Config]):
    def __init__(
        self, config: Gemma3Config, embedding: Tensor, layers: list[Gemma3Layer], norm: Tensor, head: Tensor
    ) -> None:
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._places = pool_indices(config.windows)
        self._full_rotary = Rotary(config.head_dim, config.full_rope, device=self.device)
        self._window_rotary = Rotary(config.head_dim, config.window_rope, device=self.device)
        # In the model's dtype, in which the embedding is multiplied by it.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=self.dtype, device=self.device)

    @classmethod
    def load(cls, path: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Gemma3Model:
        """Loads a checkpoint directory. Raises `CheckpointError` if it does not fit."""
        config = Gemma3Config.from_dir(path)
        weights = Weights(path, dtype, device)
        take = weights.take
        hidden, dim = config.hidden_size, config.head_dim
        sizes = {"q": config.num_attention_heads * dim, "k": config.num_key_value_heads * dim}
        sizes["v"] = sizes["k"]

        def norm(name: str, size: int) -> Tensor:
            return take(f"{name}.weight", size, dtype=torch.float32) + 1.0

        layers = []
        for index in range(config.num_hidden_layers):
            prefix = f"model.layers.{index}"
            attention = f"{prefix}.self_attn"
            layers.append(
                Gemma3Layer(
                    before_attention=norm(f"{prefix}.input_layernorm", hidden),
                    qkv=torch.cat([take(f"{attention}.{x}_proj.weight", size, hidden) for x, size in sizes.items()]),
                    q_norm=norm(f"{attention}.q_norm", dim),
                    k_norm=norm(f"{attention}.k_norm", dim),
                    out=take(f"{attention}.o_proj.weight", hidden, sizes["q"]),
                    after_attention=norm(f"{prefix}.post_attention_layernorm", hidden),
                    before_mlp=norm(f"{prefix}.pre_feedforward_layernorm", hidden),
                    mlp=GatedMLP.take(weights, f"{prefix}.mlp", hidden, config.intermediate_size),
                    after_mlp=norm(f"{prefix}.post_feedforward_layernorm", hidden),
                )
            )
        embedding = take("model.embed_tokens.weight", config.vocab_size, hidden)
        last = norm("model.norm", hidden)
        head = embedding if config.tie_word_embeddings else take("lm_head.weight", config.vocab_size, hidden)
        return cls(config, embedding, layers, last, head)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, kv: Sequence[Tensor]) -> Tensor:
        config, sure = self.config, batch.invariant
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        full = self._full_rotary.at(batch.positions, self.dtype, batch.stop)
        windowed = self._window_rotary.at(batch.positions, self.dtype, batch.stop)
        attention = Attention(batch)

        hidden = F.embedding(batch.tokens, self._embedding) * self._embedding_scale
        for layer, place, window in zip(self._layers, self._places, config.windows, strict=True):
            cos, sin = full if window is None else windowed
            qkv = linear(self._normed(hidden, layer.before_attention), layer.qkv, invariant=sure)
            parts = qkv.split_with_sizes((q_size, kv_size, kv_size), -1)
            q, k, v = (part.reshape(len(qkv), -1, config.head_dim) for part in parts)
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
            batch.write(kv[place], rotate(k, cos, sin), v, stored=window is None)
            attended = attention(rotate(q, cos, sin), kv[place], window=window, scale=config.query_scale)
            attended = linear(attended, layer.out, invariant=sure)
            hidden = hidden + self._normed(attended, layer.after_attention)
            inner = layer.mlp(self._normed(hidden, layer.before_mlp), activation=_GELU, invariant=sure)
            hidden = hidden + self._normed(inner, layer.after_mlp)
        return linear(self._normed(hidden[batch.logit_rows], self._norm), self._head, invariant=sure).float()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), weight.shape, weight, self.config.rms_norm_eps).to(x.dtype)
