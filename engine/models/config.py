"""What every family's `config.json` has in common, read once and checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from cachesvc.connector.layout import KVGroup
from cachesvc.engine.errors import CheckpointError


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one model. `max_position_embeddings` is the context limit in tokens."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dir(cls, path: Path) -> Self:
        """Reads `path`/config.json. Raises `CheckpointError` when it is missing or asks for what is not implemented."""
        try:
            return cls.from_dict(read_json(path))
        except KeyError as error:
            raise CheckpointError(f"{path / 'config.json'} has no entry {error}") from error

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """The same from parsed JSON. Raises `CheckpointError` for what is not implemented, `KeyError` if incomplete."""
        raise NotImplementedError

    def kv_groups(self, dtype: torch.dtype) -> tuple[KVGroup, ...]:
        """The KV of the model in `dtype`. The pool holds the layers of the first group, then those of the second…"""
        raise NotImplementedError

    @property
    def replay_layers(self) -> int:
        """Window layers, one above the other, through which a replayed token's error can reach the last one."""
        return sum(group.layers for group in self.kv_groups(torch.float32) if group.window is not None)

    @property
    def prefill_keep(self) -> int | None:
        """Last tokens of a prompt that go through all layers, the others through the first only; None: all do."""
        return None


def common_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of `ModelConfig`. Raises `CheckpointError` for quantised weights, `KeyError` if incomplete."""
    require(not raw.get("quantization_config"), "quantization_config", raw.get("quantization_config"), "none")
    eos = raw.get("eos_token_id")
    return {
        "vocab_size": raw["vocab_size"],
        "hidden_size": raw["hidden_size"],
        "num_hidden_layers": raw["num_hidden_layers"],
        "rms_norm_eps": raw["rms_norm_eps"],
        "max_position_embeddings": raw["max_position_embeddings"],
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    }


def window_groups(
    layer_windows: Sequence[int | None], kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[KVGroup, ...]:
    """Two groups for a hybrid model: the layers that see all, and those that see a window. One where there is one."""
    groups = []
    for window in sorted(set(layer_windows), key=lambda w: w or 0):
        groups.append(
            KVGroup(
                name="full" if window is None else "window",
                layers=list(layer_windows).count(window),
                kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=dtype_name(dtype),
                window=window,
            )
        )
    return tuple(groups)


def pool_indices(layer_windows: Sequence[int | None]) -> list[int]:
    """For each layer its place in the pool, whose order is that of `window_groups`."""
    order = sorted(range(len(layer_windows)), key=lambda i: (layer_windows[i] or 0, i))
    return [order.index(i) for i in range(len(layer_windows))]


def layer_windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    """The window of each layer, None where it sees all, from `layer_types` and `sliding_window`."""
    kinds = raw["layer_types"]
    wrong = set(kinds) - {"full_attention", "sliding_attention"}
    require(not wrong and len(kinds) == raw["num_hidden_layers"], "layer_types", kinds, "full or sliding attention")
    return tuple(raw["sliding_window"] if kind == "sliding_attention" else None for kind in kinds)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_json(path: Path) -> dict[str, Any]:
    """`path`/config.json. Raises `CheckpointError` when it is missing or not JSON."""
    file = path / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist; point at a Hugging Face checkpoint directory") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return raw


def require(ok: bool, name: str, value: object, wanted: str) -> None:
    """Raises `CheckpointError` unless `ok`."""
    if not ok:
        raise CheckpointError(f"config.json has {name} = {value!r}; this engine implements {wanted}")
