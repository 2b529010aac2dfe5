"""A Llama-family `config.json`, read once and checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachesvc.engine.errors import CheckpointError

_MODEL_TYPES = ("llama",)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies (`rope_type` "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of one model. `max_position_embeddings` is the context limit in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_theta: float
    rope_scaling: RopeScaling | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dir(cls, path: Path) -> LlamaConfig:
        """Reads `path`/config.json. Raises `CheckpointError` when it is missing or asks for what is not implemented."""
        file = path / "config.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{file} does not exist; point at a Hugging Face checkpoint directory") from error
        except ValueError as error:
            raise CheckpointError(f"{file} is not JSON: {error}") from error
        try:
            return cls.from_dict(raw)
        except KeyError as error:
            raise CheckpointError(f"{file} has no entry {error}") from error

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> LlamaConfig:
        """The same from parsed JSON. Raises `CheckpointError` for what is not implemented, `KeyError` if incomplete."""
        _require(raw.get("model_type") in _MODEL_TYPES, "model_type", raw.get("model_type"), " or ".join(_MODEL_TYPES))
        _require(raw.get("hidden_act", "silu") == "silu", "hidden_act", raw.get("hidden_act"), "silu")
        for name in ("attention_bias", "mlp_bias"):
            _require(not raw.get(name), name, raw.get(name), "false")
        heads = raw["num_attention_heads"]
        kv_heads = raw.get("num_key_value_heads") or heads
        _require(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of {heads} attention heads")
        theta, scaling = _rope(raw)
        eos = raw.get("eos_token_id")
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            rms_norm_eps=raw["rms_norm_eps"],
            max_position_embeddings=raw["max_position_embeddings"],
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            rope_theta=theta,
            rope_scaling=scaling,
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        )


def _rope(raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
    rope: dict[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    _require(kind == "llama3", "rope_type", kind, "default or llama3")
    scaling = RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position_embeddings=rope["original_max_position_embeddings"],
    )
    return theta, scaling


def _require(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise CheckpointError(f"config.json has {name} = {value!r}; this engine implements {wanted}")
