"""DeepSeek-V3: multi-head latent attention (one compressed KV per token and layer) and routed experts.

Attention is computed on the latent itself: the matrices that would expand it into keys and values are applied to the
queries and to the sums instead (arXiv 2405.04434, section 2.1.2), for prompts and for decoding alike.
"""

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
from cachesvc.engine.models.config import ModelConfig, common_fields, dtype_name, require
from cachesvc.engine.models.layers import GatedMLP, routed
from cachesvc.engine.models.linear import linear, per_head, rowwise
from cachesvc.engine.models.rope import Rotary, halves, rotate, yarn_mscale
from cachesvc.engine.models.weights import Weights

MODEL_TYPES = ("deepseek_v3",)
_LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class DeepseekV3Config(ModelConfig):
    intermediate_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    dense_layers: int
    experts: int
    shared_experts: int
    experts_per_token: int
    expert_groups: int
    groups_per_token: int
    normed_shares: bool
    routed_scale: float
    interleaved: bool
    rope: dict[str, Any]

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DeepseekV3Config:
        require(raw.get("model_type") in MODEL_TYPES, "model_type", raw.get("model_type"), "deepseek_v3")
        require(raw.get("hidden_act", "silu") == "silu", "hidden_act", raw.get("hidden_act"), "silu")
        require(not raw.get("attention_bias"), "attention_bias", raw.get("attention_bias"), "false")
        return cls(
            **common_fields(raw),
            intermediate_size=raw["intermediate_size"],
            moe_intermediate_size=raw["moe_intermediate_size"],
            num_attention_heads=raw["num_attention_heads"],
            q_lora_rank=raw.get("q_lora_rank"),
            kv_lora_rank=raw["kv_lora_rank"],
            nope_dim=raw["qk_nope_head_dim"],
            rope_dim=raw["qk_rope_head_dim"],
            value_dim=raw["v_head_dim"],
            dense_layers=raw["first_k_dense_replace"],
            experts=raw["n_routed_experts"],
            shared_experts=raw["n_shared_experts"],
            experts_per_token=raw["num_experts_per_tok"],
            expert_groups=raw["n_group"],
            groups_per_token=raw["topk_group"],
            normed_shares=raw["norm_topk_prob"],
            routed_scale=raw["routed_scaling_factor"],
            interleaved=raw.get("rope_interleave", True),
            rope=raw.get("rope_parameters") or {**(raw.get("rope_scaling") or {}), "rope_theta": raw.get("rope_theta")},
        )

    @property
    def latent_dim(self) -> int:
        return self.kv_lora_rank + self.rope_dim

    @property
    def attention_scale(self) -> float:
        scale: float = (self.nope_dim + self.rope_dim) ** -0.5
        all_dims = self.rope.get("mscale_all_dim")
        return scale * yarn_mscale(self.rope["factor"], all_dims) ** 2 if all_dims else scale

    def kv_groups(self, dtype: torch.dtype) -> tuple[KVGroup, ...]:
        return (KVGroup("full", self.num_hidden_layers, 1, self.latent_dim, dtype_name(dtype), planes=1),)


@dataclass(frozen=True)
class Router:
    weight: Tensor
    correction: Tensor
    """Added to the scores where experts are chosen, not where their shares are computed."""
    experts: list[GatedMLP]
    shared: GatedMLP


@dataclass(frozen=True)
class DeepseekV3Layer:
    input_norm: Tensor
    q_down: Tensor | None
    q_norm: Tensor | None
    q: Tensor
    kv_down: Tensor
    kv_norm: Tensor
    keys_up: Tensor
    """[heads, kv_lora_rank, nope_dim]: from a query to what it is compared with, the latent."""
    values_up: Tensor
    """[heads, value_dim, kv_lora_rank]"""
    out: Tensor
    post_norm: Tensor
    mlp: GatedMLP | Router


class DeepseekV3Model(Model[DeepseekV3Config]):
    def __init__(
        self, config: DeepseekV3Config, embedding: Tensor, layers: list[DeepseekV3Layer], norm: Tensor, head: Tensor
    ) -> None:
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._rotary = Rotary(config.rope_dim, config.rope, device=self.device)

    @classmethod
    def load(
        cls, path: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> DeepseekV3Model:
        """Loads a checkpoint directory with weights that are not quantised. Raises `CheckpointError`."""
        config = DeepseekV3Config.from_dir(path)
        weights = Weights(path, dtype, device)
        layers = [_layer(config, weights, index) for index in range(config.num_hidden_layers)]
        embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        norm = weights.take("model.norm.weight", config.hidden_size)
        tied = config.tie_word_embeddings
        head = embedding if tied else weights.take("lm_head.weight", config.vocab_size, config.hidden_size)
        return cls(config, embedding, layers, norm, head)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, kv: Sequence[Tensor]) -> Tensor:
        config, sure = self.config, batch.invariant
        eps, width = config.rms_norm_eps, (config.hidden_size,)
        cos, sin = self._rotary.at(batch.positions, self.dtype, batch.stop)
        order = halves if config.interleaved else torch.clone
        attention = Attention(batch)

        hidden = F.embedding(batch.tokens, self._embedding)
        for layer, pool in zip(self._layers, kv, strict=True):
            normed = F.rms_norm(hidden, width, layer.input_norm, eps)
            query = normed
            if layer.q_down is not None and layer.q_norm is not None:
                query = linear(normed, layer.q_down, invariant=sure)
                query = F.rms_norm(query, layer.q_norm.shape, layer.q_norm, _LATENT_NORM_EPS)
            q = linear(query, layer.q, invariant=sure).reshape(len(normed), config.num_attention_heads, -1)
            q_nope, q_rope = q.split_with_sizes((config.nope_dim, config.rope_dim), -1)
            q_latent = per_head(q_nope, layer.keys_up, invariant=sure)
            q = torch.cat((q_latent, rotate(order(q_rope), cos, sin)), -1)

            compressed = linear(normed, layer.kv_down, invariant=sure)
            latent, k_rope = compressed.split_with_sizes((config.kv_lora_rank, config.rope_dim), -1)
            latent = F.rms_norm(latent, layer.kv_norm.shape, layer.kv_norm, _LATENT_NORM_EPS)
            k_rope = rotate(order(k_rope[:, None]), cos, sin)
            batch.write(pool, torch.cat((latent[:, None], k_rope), -1))
            sums = attention(q, pool, scale=config.attention_scale, value_dim=config.kv_lora_rank)
            sums = sums.view(len(q), config.num_attention_heads, -1)
            attended = per_head(sums, layer.values_up, invariant=sure).reshape(len(q), -1)
            hidden = hidden + linear(attended, layer.out, invariant=sure)
            hidden = hidden + self._mlp(layer.mlp, F.rms_norm(hidden, width, layer.post_norm, eps), sure)
        last = F.rms_norm(hidden[batch.logit_rows], width, self._norm, eps)
        return linear(last, self._head, invariant=sure).float()

    def _mlp(self, mlp: GatedMLP | Router, x: Tensor, sure: bool) -> Tensor:
        if isinstance(mlp, GatedMLP):
            return mlp(x, invariant=sure)
        chosen, shares = self._route(mlp, x, sure)
        experts: list[Callable[[Tensor], Tensor]] = [partial(expert, invariant=sure) for expert in mlp.experts]
        return routed(x, chosen, shares, experts) + mlp.shared(x, invariant=sure)

    def _route(self, router: Router, x: Tensor, sure: bool) -> tuple[Tensor, Tensor]:
        """Experts and their shares, each [T, experts_per_token]: the best of the groups with the best two experts."""
        config = self.config
        scores = rowwise(torch.sigmoid, linear(x.float(), router.weight, invariant=sure), invariant=sure)
        wanted = (scores + router.correction).view(len(x), config.expert_groups, -1)
        best_groups = wanted.topk(2, dim=-1).values.sum(-1).topk(config.groups_per_token, dim=-1).indices
        allowed = torch.zeros(wanted.shape[:2], dtype=torch.bool, device=x.device).scatter_(1, best_groups, True)
        wanted = wanted.masked_fill(~allowed[..., None], float("-inf")).view(len(x), -1)
        chosen = wanted.topk(config.experts_per_token, dim=-1).indices
        shares = scores.gather(1, chosen)
        if config.normed_shares:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return chosen, shares * config.routed_scale


def _layer(config: DeepseekV3Config, weights: Weights, index: int) -> DeepseekV3Layer:
    take = weights.take
    prefix = f"model.layers.{index}"
    attention, hidden, heads = f"{prefix}.self_attn", config.hidden_size, config.num_attention_heads
    q_size, rank = heads * (config.nope_dim + config.rope_dim), config.q_lora_rank
    expand = take(f"{attention}.kv_b_proj.weight", heads * (config.nope_dim + config.value_dim), config.kv_lora_rank)
    keys_up, values_up = expand.view(heads, -1, config.kv_lora_rank).split_with_sizes(
        (config.nope_dim, config.value_dim), 1
    )
    return DeepseekV3Layer(
        input_norm=take(f"{prefix}.input_layernorm.weight", hidden),
        q_down=take(f"{attention}.q_a_proj.weight", rank, hidden) if rank else None,
        q_norm=take(f"{attention}.q_a_layernorm.weight", rank) if rank else None,
        q=take(f"{attention}.q_b_proj.weight", q_size, rank)
        if rank
        else take(f"{attention}.q_proj.weight", q_size, hidden),
        kv_down=take(f"{attention}.kv_a_proj_with_mqa.weight", config.latent_dim, hidden),
        kv_norm=take(f"{attention}.kv_a_layernorm.weight", config.kv_lora_rank),
        keys_up=keys_up.transpose(1, 2).contiguous(),
        values_up=values_up.contiguous(),
        out=take(f"{attention}.o_proj.weight", hidden, heads * config.value_dim),
        post_norm=take(f"{prefix}.post_attention_layernorm.weight", hidden),
        mlp=GatedMLP.take(weights, f"{prefix}.mlp", hidden, config.intermediate_size)
        if index < config.dense_layers
        else _router(config, weights, f"{prefix}.mlp"),
    )


def _router(config: DeepseekV3Config, weights: Weights, prefix: str) -> Router:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    return Router(
        weight=weights.take(f"{prefix}.gate.weight", config.experts, hidden, dtype=torch.float32),
        correction=weights.take(f"{prefix}.gate.e_score_correction_bias", config.experts, dtype=torch.float32),
        experts=[
            GatedMLP.take(weights, f"{prefix}.experts.{number}", hidden, inner) for number in range(config.experts)
        ],
        shared=GatedMLP.take(weights, f"{prefix}.shared_experts", hidden, inner * config.shared_experts),
    )
