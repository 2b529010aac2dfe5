"""The Llama family (Llama 2 and 3, SmolLM2) in plain torch, over a paged KV pool.

One forward pass takes a *flat* batch: the new tokens of all sequences one after the other, no padding. Everything but
attention is one matrix product for all of them; attention runs sequence by sequence over that sequence's own slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from cachesvc.engine.errors import CheckpointError
from cachesvc.engine.models.config import LlamaConfig, RopeScaling
from cachesvc.engine.models.linear import linear
from cachesvc.engine.models.weights import read_tensors


@dataclass(frozen=True)
class SequenceSpan:
    """The new tokens of one sequence in a flat batch: rows `start` to `start + length`, at the end of its context."""

    start: int
    length: int
    context: slice | Tensor
    """Slots of all its tokens so far, the new ones included, in order: int64 [context], or a slice if consecutive."""


@dataclass(frozen=True)
class FlatBatch:
    """Input of one forward pass over `T` new tokens; all tensors are int64."""

    tokens: Tensor
    """[T] token ids."""
    positions: Tensor
    """[T] position of each in its sequence."""
    slots: Tensor
    """[T] where in the pool the K and V of each are written."""
    spans: Sequence[SequenceSpan]
    logit_rows: Tensor
    """[n] rows of which logits are wanted: the last known token of each sequence that is to be sampled."""


@dataclass(frozen=True)
class LlamaLayer:
    """Weights of one layer; q, k and v are one matrix, and so are the MLP's gate and up."""

    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class LlamaModel:
    """Weights and forward pass. Stateless: the KV pool belongs to the caller, so engines can share one model."""

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
        self._inv_freq = _inverse_frequencies(config).to(self.device)

    @classmethod
    def load(cls, path: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> LlamaModel:
        """Loads a checkpoint directory (config.json and safetensors). Raises `CheckpointError` if it does not fit."""
        config = LlamaConfig.from_dir(path)
        tensors = {name: tensor.to(device) for name, tensor in read_tensors(path, dtype)}

        def take(name: str, *shape: int) -> Tensor:
            if name not in tensors:
                raise CheckpointError(f"{path} has no tensor {name!r}; config.json and weights do not belong together")
            tensor = tensors.pop(name)
            if tensor.shape != shape:
                raise CheckpointError(f"{name} has shape {list(tensor.shape)}; config.json asks for {list(shape)}")
            return tensor

        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        layers = []
        for index in range(config.num_hidden_layers):
            prefix = f"model.layers.{index}"
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
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
                    out=take(f"{attention}.o_proj.weight", hidden, q_size),
                    post_norm=take(f"{prefix}.post_attention_layernorm.weight", hidden),
                    gate_up=torch.cat(
                        (take(f"{mlp}.gate_proj.weight", inner, hidden), take(f"{mlp}.up_proj.weight", inner, hidden))
                    ),
                    down=take(f"{mlp}.down_proj.weight", hidden, inner),
                )
            )
        embedding = take("model.embed_tokens.weight", config.vocab_size, hidden)
        norm = take("model.norm.weight", hidden)
        head = embedding if config.tie_word_embeddings else take("lm_head.weight", config.vocab_size, hidden)
        return cls(config, embedding, layers, norm, head)

    @torch.inference_mode()
    def forward(
        self, batch: FlatBatch, kv: Sequence[Tensor], ready: Callable[[int], None] = lambda layer: None
    ) -> Tensor:
        """Writes the batch's K and V into `kv` and returns float32 logits ``[n, vocab_size]`` of `batch.logit_rows`.

        `kv` holds per layer ``[2, num_slots, kv_heads, head_dim]`` in the model's dtype and device. `ready` is called
        with each layer before its KV is read.
        """
        config = self.config
        eps, width = config.rms_norm_eps, (config.hidden_size,)
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        cos, sin = self._rotary(batch.positions)
        masks = [_causal_mask(span, self.dtype, self.device, config) for span in batch.spans]

        hidden = F.embedding(batch.tokens, self._embedding)
        for index, (layer, pool) in enumerate(zip(self._layers, kv, strict=True)):
            qkv = linear(F.rms_norm(hidden, width, layer.input_norm, eps), layer.qkv)
            parts = qkv.split_with_sizes((q_size, kv_size, kv_size), -1)
            q, k, v = (part.view(len(qkv), -1, config.head_dim) for part in parts)
            pool[0].index_copy_(0, batch.slots, _rotate(k, cos, sin))
            pool[1].index_copy_(0, batch.slots, v)
            q = _rotate(q, cos, sin)
            ready(index)
            attended = [_attend(q, pool, span, mask) for span, mask in zip(batch.spans, masks, strict=True)]
            hidden = hidden + linear(torch.cat(attended), layer.out)
            gate, up = linear(F.rms_norm(hidden, width, layer.post_norm, eps), layer.gate_up).chunk(2, -1)
            hidden = hidden + linear(F.silu(gate) * up, layer.down)
        last = F.rms_norm(hidden[batch.logit_rows], width, self._norm, eps)
        return linear(last, self._head).float()

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [T, 1, head_dim], computed in float32 as the reference does."""
        angles = positions[:, None].float() * self._inv_freq
        angles = torch.cat((angles, angles), -1)[:, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def _inverse_frequencies(config: LlamaConfig) -> Tensor:
    """Rotary frequencies, float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    return frequencies if config.rope_scaling is None else _stretch(frequencies, config.rope_scaling)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * frequencies + (1.0 - keep) * frequencies / scaling.factor


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding to x [T, heads, head_dim] (halves, as in Hugging Face checkpoints)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _causal_mask(span: SequenceSpan, dtype: torch.dtype, device: torch.device, config: LlamaConfig) -> Tensor | None:
    """Additive mask [group * length, context] for `_attend`; a single new token sees everything and needs none."""
    if span.length == 1 or device.type != "cpu":
        return None
    context = _context_length(span)
    mask = torch.full((span.length, context), float("-inf"), dtype=dtype, device=device)
    mask.triu_(context - span.length + 1)
    return mask.repeat(config.num_attention_heads // config.num_key_value_heads, 1)


def _attend(q: Tensor, pool: Tensor, span: SequenceSpan, mask: Tensor | None) -> Tensor:
    """Attention of one sequence: q [T, heads, head_dim] of the whole batch -> [length, heads * head_dim].

    The query heads that share a KV head are laid out as further rows of that head, so K and V are never repeated.
    """
    k, v = pool[:, span.context] if isinstance(span.context, slice) else pool.index_select(1, span.context)
    if span.length > 1 and mask is None:
        return attend_fused(q[span.start : span.start + span.length], k, v)
    kv_heads, head_dim = k.shape[1:]
    rows = q[span.start : span.start + span.length].view(span.length, kv_heads, -1, head_dim)
    rows = rows.permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)  # [1, kv_heads, group * length, head_dim]
    out = F.scaled_dot_product_attention(rows, k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=mask)
    return out.view(kv_heads, -1, span.length, head_dim).permute(2, 0, 1, 3).reshape(span.length, -1)


def attend_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same for q [length, heads, head_dim] with kernels that need no mask in memory, as devices have them."""
    rows, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    mask: Any = causal_lower_right(len(q), k.shape[2])  # the last rows of a square: what is new comes last
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(len(q), -1)


def _context_length(span: SequenceSpan) -> int:
    context = span.context
    return context.stop - context.start if isinstance(context, slice) else len(context)
