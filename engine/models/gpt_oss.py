"""gpt-oss: layers with a window of 128 and layers that see all, in turn; attention sinks; routed experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from cachesvc.engine.models.layers import routed
from cachesvc.engine.models.linear import linear, rowwise
from cachesvc.engine.models.rope import Rotary, rotate
from cachesvc.engine.models.weights import Weights

MODEL_TYPES = ("gpt_oss",)


@dataclass(frozen=True)
class GptOssConfig(ModelConfig):
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    experts: int
    experts_per_token: int
    swiglu_alpha: float
    swiglu_limit: float
    rope: dict[str, Any]

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> GptOssConfig:
        require(raw.get("model_type") in MODEL_TYPES, "model_type", raw.get("model_type"), "gpt_oss")
        require(raw.get("attention_bias", True), "attention_bias", raw.get("attention_bias"), "true")
        return cls(
            **common_fields(raw),
            intermediate_size=raw["intermediate_size"],
            num_attention_heads=raw["num_attention_heads"],
            num_key_value_heads=raw["num_key_value_heads"],
            head_dim=raw["head_dim"],
            windows=layer_windows(raw),
            experts=raw["num_local_experts"],
            experts_per_token=raw["num_experts_per_tok"],
            swiglu_alpha=raw.get("swiglu_alpha", 1.702),
            swiglu_limit=raw.get("swiglu_limit", 7.0),
            rope=raw.get("rope_parameters") or {**raw["rope_scaling"], "rope_theta": raw["rope_theta"]},
        )

    def kv_groups(self, dtype: torch.dtype) -> tuple[KVGroup, ...]:
        return window_groups(self.windows, self.num_key_value_heads, self.head_dim, dtype)


@dataclass(frozen=True)
class GptOssLayer:
    """Weights of one layer; q, k and v are one matrix. Of each expert gate and up take turns, column by column."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    sinks: Tensor
    out: Tensor
    out_bias: Tensor
    post_norm: Tensor
    router: Tensor
    router_bias: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor
    down: Tensor
    down_bias: Tensor


class GptOssModel(Model[GptOssConfig]):
    def __init__(
        self, config: GptOssConfig, embedding: Tensor, layers: list[GptOssLayer], norm: Tensor, head: Tensor
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
    def load(cls, path: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> GptOssModel:
        """Loads a checkpoint directory with weights that are not quantised. Raises `CheckpointError`."""
        config = GptOssConfig.from_dir(path)
        weights = Weights(path, dtype, device)
        take = weights.take
        hidden, inner, n = config.hidden_size, config.intermediate_size, config.experts
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        layers = []
        for index in range(config.num_hidden_layers):
            prefix = f"model.layers.{index}"
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            sizes = {"q": q_size, "k": kv_size, "v": kv_size}
            layers.append(
                GptOssLayer(
                    input_norm=take(f"{prefix}.input_layernorm.weight", hidden),
                    qkv=torch.cat([take(f"{attention}.{x}_proj.weight", size, hidden) for x, size in sizes.items()]),
                    qkv_bias=torch.cat([take(f"{attention}.{x}_proj.bias", size) for x, size in sizes.items()]),
                    sinks=take(f"{attention}.sinks", config.num_attention_heads),
                    out=take(f"{attention}.o_proj.weight", hidden, q_size),
                    out_bias=take(f"{attention}.o_proj.bias", hidden),
                    post_norm=take(f"{prefix}.post_attention_layernorm.weight", hidden),
                    router=take(f"{mlp}.router.weight", n, hidden),
                    router_bias=take(f"{mlp}.router.bias", n),
                    gate_up=_transposed(take(f"{mlp}.experts.gate_up_proj", n, hidden, 2 * inner)),
                    gate_up_bias=take(f"{mlp}.experts.gate_up_proj_bias", n, 2 * inner),
                    down=_transposed(take(f"{mlp}.experts.down_proj", n, inner, hidden)),
                    down_bias=take(f"{mlp}.experts.down_proj_bias", n, hidden),
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
            normed = F.rms_norm(hidden, width, layer.input_norm, eps)
            qkv = linear(normed, layer.qkv, layer.qkv_bias, invariant=sure)
            parts = qkv.split_with_sizes((q_size, kv_size, kv_size), -1)
            q, k, v = (part.reshape(len(qkv), -1, config.head_dim) for part in parts)
            batch.write(pool, rotate(k, cos, sin), v, stored=window is None)
            attended = attention(rotate(q, cos, sin), pool, window=window, sinks=layer.sinks)
            hidden = hidden + linear(attended, layer.out, layer.out_bias, invariant=sure)
            hidden = hidden + self._experts(layer, F.rms_norm(hidden, width, layer.post_norm, eps), sure)
        last = F.rms_norm(hidden[batch.logit_rows], width, self._norm, eps)
        return linear(last, self._head, invariant=sure).float()

    def _experts(self, layer: GptOssLayer, x: Tensor, sure: bool) -> Tensor:
        scores = linear(x, layer.router, layer.router_bias, invariant=sure).contiguous()
        best, chosen = torch.topk(scores, self.config.experts_per_token, dim=-1)
        experts: list[Callable[[Tensor], Tensor]] = [
            partial(self._expert, layer, number, sure) for number in range(self.config.experts)
        ]
        return routed(x, chosen, torch.softmax(best, -1), experts)

    def _expert(self, layer: GptOssLayer, number: int, sure: bool, x: Tensor) -> Tensor:
        """A clamped SwiGLU."""
        limit, alpha = self.config.swiglu_limit, self.config.swiglu_alpha
        both = linear(x, layer.gate_up[number], layer.gate_up_bias[number], invariant=sure)
        gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
        glu = gate * rowwise(torch.sigmoid, gate * alpha, invariant=sure)
        return linear((up + 1) * glu, layer.down[number], layer.down_bias[number], invariant=sure)


def _transposed(experts: Tensor) -> Tensor:
    """From [experts, in, out], as the checkpoint has them, to [experts, out, in], as `linear` takes them."""
    return experts.transpose(1, 2).contiguous()
