"""`ced`: a small causal encoder-decoder with one compressed KV, in the manner of DeepSeek-V4.1.

* Every layer sees a window of its own KV: one head, whose values are the first part of its keys.
* Some layers of the encoder half (`compress_ratios`) own a compressed KV: one 8- or 4-bit record for every one or two
  tokens. Each layer also sees all records of the last owner at or before it: the whole decoder half shares them.
* All tokens of a prompt go through the first `n_prefill_layer` layers, the encoder half; through the decoder half go
  only the last `prefill_keep_tokens` of them, and what is decoded.

Only the records are stored. Windows are computed again after a hit (`cachesvc.engine.replay`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cachesvc.connector.layout import KVGroup
from cachesvc.engine.models import records
from cachesvc.engine.models.attention import Attention, Keys
from cachesvc.engine.models.base import FlatBatch, Model, SequenceSpan
from cachesvc.engine.models.config import ModelConfig, common_fields, dtype_name, require
from cachesvc.engine.models.layers import GatedMLP
from cachesvc.engine.models.linear import linear, rowwise
from cachesvc.engine.models.rope import Rotary, rotate
from cachesvc.engine.models.weights import Weights

MODEL_TYPES = ("ced",)


@dataclass(frozen=True)
class CedConfig(ModelConfig):
    intermediate_size: int
    num_attention_heads: int
    latent_dim: int
    rope_dim: int
    sliding_window: int
    n_prefill_layer: int
    prefill_keep_tokens: int
    compress_ratios: tuple[int, ...]
    """For each layer how many tokens make one of its records; 0: it owns none."""
    record_format: str
    rope: dict[str, Any]

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> CedConfig:
        require(raw.get("model_type") in MODEL_TYPES, "model_type", raw.get("model_type"), "ced")
        config = cls(
            **common_fields(raw),
            intermediate_size=raw["intermediate_size"],
            num_attention_heads=raw["num_attention_heads"],
            latent_dim=raw["kv_lora_rank"],
            rope_dim=raw["qk_rope_head_dim"],
            sliding_window=raw["sliding_window"],
            n_prefill_layer=raw["n_prefill_layer"],
            prefill_keep_tokens=raw["prefill_keep_tokens"],
            compress_ratios=tuple(raw["compress_ratios"]),
            record_format=raw["record_format"],
            rope=raw.get("rope_parameters") or {"rope_theta": raw["rope_theta"]},
        )
        ratios, form, keep = config.compress_ratios, config.record_format, config.prefill_keep_tokens
        owned = ratios[: config.n_prefill_layer]
        good = len(ratios) == config.num_hidden_layers and set(ratios) <= {0, 1, 2} and any(owned)
        good = good and not any(ratios[config.n_prefill_layer :])
        require(good, "compress_ratios", ratios, "0, 1 or 2 for each layer, owners in the encoder half only")
        require(form in records.FORMATS, "record_format", form, " or ".join(records.FORMATS))
        whole = config.key_dim % records.GROUP[form] == 0
        require(whole, "kv_lora_rank + qk_rope_head_dim", config.key_dim, f"multiples of {records.GROUP[form]}")
        require(keep >= config.sliding_window, "prefill_keep_tokens", keep, "at least a window")
        return config

    @property
    def key_dim(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def replay_layers(self) -> int:
        return self.n_prefill_layer

    @property
    def prefill_keep(self) -> int | None:
        return self.prefill_keep_tokens

    def kv_groups(self, dtype: torch.dtype) -> tuple[KVGroup, ...]:
        size, name = records.record_bytes(self.key_dim, self.record_format), dtype_name(dtype)
        groups = [
            KVGroup(f"records-{n}", self.compress_ratios.count(n), 1, size, "uint8", planes=1, tokens_per_record=n)
            for n in (1, 2)
            if n in self.compress_ratios
        ]
        window = KVGroup(
            "window", self.num_hidden_layers, 1, self.key_dim, name, 1, window=self.sliding_window, policy="never"
        )
        groups.append(window)
        if 2 in self.compress_ratios:
            # What the first token of a pair leaves for the second. A block of 128 ends with a whole pair.
            width = self.key_dim + 1
            pairs = self.compress_ratios.count(2)
            groups.append(KVGroup("unpaired", pairs, 1, width, name, 1, window=2, policy="never"))
        return tuple(groups)


@dataclass(frozen=True)
class Compressor:
    """Makes records out of an owner's input: a projection and, for pairs, a gate that weighs the two."""

    kv: Tensor
    gate: Tensor | None
    norm: Tensor


@dataclass(frozen=True)
class CedLayer:
    input_norm: Tensor
    q: Tensor
    kv: Tensor
    kv_norm: Tensor
    compressor: Compressor | None
    out: Tensor
    post_norm: Tensor
    mlp: GatedMLP


class _Places(NamedTuple):
    """Where a layer's KV lies in the pool."""

    window: int
    records: int | None
    unpaired: int | None


class CedModel(Model[CedConfig]):
    def __init__(
        self, config: CedConfig, embedding: Tensor, layers: list[CedLayer], norm: Tensor, head: Tensor
    ) -> None:
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._rotary = Rotary(config.rope_dim, config.rope, device=self.device)
        self._places = _places(config)

    @classmethod
    def load(cls, path: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> CedModel:
        """Loads a checkpoint directory. Raises `CheckpointError` if it does not fit."""
        config = CedConfig.from_dir(path)
        weights = Weights(path, dtype, device)
        take, hidden, dim, heads = weights.take, config.hidden_size, config.key_dim, config.num_attention_heads
        layers = []
        for index, ratio in enumerate(config.compress_ratios):
            prefix = f"model.layers.{index}"
            attention = f"{prefix}.self_attn"
            compressor = None
            if ratio:
                compressor = Compressor(
                    kv=take(f"{attention}.compressor.kv_proj.weight", dim, hidden),
                    gate=take(f"{attention}.compressor.gate_proj.weight", 1, hidden) if ratio == 2 else None,
                    norm=take(f"{attention}.compressor.norm.weight", config.latent_dim),
                )
            layers.append(
                CedLayer(
                    input_norm=take(f"{prefix}.input_layernorm.weight", hidden),
                    q=take(f"{attention}.q_proj.weight", heads * dim, hidden),
                    kv=take(f"{attention}.kv_proj.weight", dim, hidden),
                    kv_norm=take(f"{attention}.kv_norm.weight", config.latent_dim),
                    compressor=compressor,
                    out=take(f"{attention}.o_proj.weight", hidden, heads * config.latent_dim),
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
        config, half = self.config, self.config.n_prefill_layer
        hidden = F.embedding(batch.tokens, self._embedding)
        seen: list[Keys] = []
        hidden, seen = self._layers_of(range(half), batch, hidden, kv, seen)
        batch, kept = _decoder_batch(batch)
        if not batch.spans:
            return hidden.new_empty((0, config.vocab_size), dtype=torch.float32)
        # Spans without rows have left the batch: so do the records that they see.
        hidden, _ = self._layers_of(range(half, len(self._layers)), batch, hidden[kept.rows], kv, kept.of(seen))
        last = F.rms_norm(hidden[batch.logit_rows], (config.hidden_size,), self._norm, config.rms_norm_eps)
        return linear(last, self._head, invariant=batch.invariant).float()

    def _layers_of(
        self, numbers: range, batch: FlatBatch, hidden: Tensor, kv: Sequence[Tensor], seen: list[Keys]
    ) -> tuple[Tensor, list[Keys]]:
        """Some layers, one after the other. `seen` holds for each span the records of the last owner so far."""
        config, sure = self.config, batch.invariant
        width, eps = (config.hidden_size,), config.rms_norm_eps
        cos, sin = self._rotary.at(batch.positions, self.dtype, batch.stop)
        attention = Attention(batch)
        for number in numbers:
            layer, places = self._layers[number], self._places[number]
            normed = F.rms_norm(hidden, width, layer.input_norm, eps)
            q = linear(normed, layer.q, invariant=sure).reshape(len(normed), config.num_attention_heads, -1)
            q = self._rotated(q, cos, sin)
            key = self._key(linear(normed, layer.kv, invariant=sure), layer.kv_norm, cos, sin)
            batch.write(kv[places.window], key, stored=False)
            if layer.compressor is not None:
                self._compress(layer.compressor, places, batch, normed, kv, (cos, sin))
                seen = [self._records(batch, span, kv, places, config.compress_ratios[number]) for span in batch.spans]
            sums = []
            for index, span in enumerate(batch.spans):
                near = attention.paged(
                    kv[places.window], span, window=config.sliding_window, value_dim=config.latent_dim
                )
                keys = [seen[index], near] if seen else [near]
                sums.append(attention.attend(q[span.start : span.start + span.length], index, keys))
            hidden = hidden + linear(torch.cat(sums), layer.out, invariant=sure)
            hidden = hidden + layer.mlp(F.rms_norm(hidden, width, layer.post_norm, eps), invariant=sure)
        return hidden, seen

    def _key(self, x: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """From a projection [T, key_dim] to a key [T, 1, key_dim]: the latent normed, the rest rotated."""
        latent = F.rms_norm(x[:, : self.config.latent_dim], norm.shape, norm, self.config.rms_norm_eps)
        return self._rotated(torch.cat((latent, x[:, self.config.latent_dim :]), -1)[:, None], cos, sin)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        still, turning = x.split_with_sizes((self.config.latent_dim, self.config.rope_dim), -1)
        return torch.cat((still, rotate(turning, cos, sin)), -1)

    def _compress(
        self,
        compressor: Compressor,
        places: _Places,
        batch: FlatBatch,
        normed: Tensor,
        kv: Sequence[Tensor],
        turn: tuple[Tensor, Tensor],
    ) -> None:
        """Writes the records that the batch's tokens complete."""
        sure, form = batch.invariant, self.config.record_format
        if places.records is None:
            raise AssertionError("a layer with a compressor owns no records")
        projected = linear(normed, compressor.kv, invariant=sure)
        if compressor.gate is None or places.unpaired is None:
            key = self._key(projected, compressor.norm, *turn)
            batch.write(kv[places.records], records.encode(key, form))
            return
        parts = torch.cat((projected, linear(normed, compressor.gate, invariant=sure)), -1)
        batch.write(kv[places.unpaired], parts[:, None], stored=False)
        for span in batch.spans:
            low, high = span.first_position // 2, span.context_length // 2
            if span.frozen or low == high:
                continue
            pairs = kv[places.unpaired][0, _picked(span.context, 2 * low, 2 * high), 0].view(high - low, 2, -1)
            # The share of the second token; that of the first is the rest.
            second = rowwise(torch.sigmoid, (pairs[:, 1] - pairs[:, 0])[:, -1:], invariant=sure)
            merged = (pairs[:, 0] * (1 - second) + pairs[:, 1] * second)[:, :-1]
            ends = torch.arange(2 * low + 1, 2 * high, 2, device=merged.device)
            cos, sin = self._rotary.at(ends, self.dtype, batch.stop)
            key = self._key(merged, compressor.norm, cos, sin)
            kv[places.records][0, _picked(span.records(2), low, high)] = records.encode(key, form)

    def _records(self, batch: FlatBatch, span: SequenceSpan, kv: Sequence[Tensor], places: _Places, ratio: int) -> Keys:
        """All records of the sequence, or those that a confined span sees."""
        if places.records is None:
            raise AssertionError("a layer with a compressor owns no records")
        first = span.seen_from if span.confined else 0
        low = first // ratio
        if batch.invariant:
            low -= low % 128
        stored = kv[places.records][0, _picked(span.records(ratio), low, span.context_length // ratio)]
        k = records.decode(stored, self.config.key_dim, self.config.record_format, self.dtype)
        return Keys(k, k[..., : self.config.latent_dim], start=low * ratio, step=ratio, first=first)


class _Kept(NamedTuple):
    """What of a batch goes on to the decoder half."""

    rows: Tensor
    spans: list[int]

    def of(self, seen: list[Keys]) -> list[Keys]:
        return [seen[index] for index in self.spans]


def _decoder_batch(batch: FlatBatch) -> tuple[FlatBatch, _Kept]:
    """The rows at or behind each span's `full_from`: always the last ones of their span."""
    spans, rows, indices, start = [], [], [], 0
    for index, span in enumerate(batch.spans):
        length = min(span.length, max(0, span.context_length - span.full_from))
        if length:
            rows.append(torch.arange(span.start + span.length - length, span.start + span.length))
            seen_from = max(span.seen_from, span.full_from)
            spans.append(replace(span, start=start, length=length, seen_from=seen_from))
            indices.append(index)
            start += length
    kept = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
    kept = kept.to(batch.tokens.device)
    new_row = torch.full((len(batch.tokens),), -1, dtype=torch.int64, device=kept.device)
    new_row[kept] = torch.arange(len(kept), device=kept.device)
    shorter = replace(
        batch,
        tokens=batch.tokens[kept],
        positions=batch.positions[kept],
        slots=batch.slots[kept],
        spans=spans,
        logit_rows=new_row[batch.logit_rows],
    )
    return shorter, _Kept(kept, indices)


def _picked(slots: slice | Tensor, start: int, stop: int) -> slice | Tensor:
    return slice(slots.start + start, slots.start + stop) if isinstance(slots, slice) else slots[start:stop]


def _places(config: CedConfig) -> list[_Places]:
    """The pool holds the groups of `kv_groups` one after the other."""
    ratios, layers = config.compress_ratios, config.num_hidden_layers
    ones, twos = ratios.count(1), ratios.count(2)
    places = []
    for number, ratio in enumerate(ratios):
        before = ratios[:number].count(ratio)
        records_at = {0: None, 1: before, 2: ones + before}[ratio]
        unpaired = ones + twos + layers + before if ratio == 2 else None
        places.append(_Places(ones + twos + number, records_at, unpaired))
    return places
