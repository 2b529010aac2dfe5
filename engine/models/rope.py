"""Rotary position embeddings: frequencies (default, Llama 3's and YaRN's), tables of cos and sin, rotation."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from cachesvc.engine.models.config import require

_PIECE: Final = 1024
"""Positions computed at a time. A piece always has the same shape, so a position always gets the same bits."""


class Rotary:
    """cos and sin for `dim` rotated dimensions, in the halves order of Hugging Face checkpoints.

    `rope` is `rope_parameters` (transformers 5), or `rope_scaling` with a `theta` of its own (before).
    Raises `CheckpointError` for a kind of scaling that is not implemented.
    """

    def __init__(
        self, dim: int, rope: dict[str, Any], theta: float | None = None, device: torch.device | str = "cpu"
    ) -> None:
        theta = float(rope.get("rope_theta") or theta or 10_000.0)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        require(kind in ("default", "llama3", "yarn"), "rope_type", kind, "default, llama3 or yarn")
        self.dim = dim
        self.scale = 1.0
        frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        if kind == "llama3":
            frequencies = _stretch(frequencies, rope)
        elif kind == "yarn":
            frequencies = _yarn(frequencies, rope, theta, dim)
            self.scale = _yarn_scale(rope)
        self._frequencies = frequencies.to(device)
        self._table = torch.empty((2, 0, dim), dtype=torch.float32, device=device)

    def at(self, positions: Tensor, dtype: torch.dtype, stop: int) -> tuple[Tensor, Tensor]:
        """cos and sin, each [T, 1, dim] in `dtype`, of int64 positions [T] below `stop`; computed in float32."""
        while self._table.shape[1] < stop:
            self._table = torch.cat((self._table, self._piece(self._table.shape[1])), 1)
        cos, sin = self._table[:, positions, None].to(dtype)
        return cos, sin

    def _piece(self, start: int) -> Tensor:
        """float32 [2, _PIECE, dim]."""
        positions = torch.arange(start, start + _PIECE, dtype=torch.float32, device=self._frequencies.device)
        angles = positions[:, None] * self._frequencies
        angles = torch.cat((angles, angles), -1)
        return torch.stack((angles.cos(), angles.sin())) * self.scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [T, heads, dim] by cos and sin [T, 1, dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def halves(x: Tensor) -> Tensor:
    """From interleaved pairs (DeepSeek) to the order that `rotate` takes."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's correction of the attention's temperature (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _stretch(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """Llama 3: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    keep: Tensor = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    stretched: Tensor = keep * frequencies + (1.0 - keep) * frequencies / rope["factor"]
    return stretched


def _yarn(frequencies: Tensor, rope: dict[str, Any], theta: float, dim: int) -> Tensor:
    """YaRN: dimensions that turn often are kept, those that turn seldom divided by `factor` (arXiv 2309.00071)."""

    name = "original_max_position_embeddings"
    require(name in rope, name, rope.get(name), "yarn only with the context length of the training")

    def dimension_of(turns: float) -> float:
        return dim * math.log(rope[name] / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(rope.get("beta_fast") or 32.0), dimension_of(rope.get("beta_slow") or 1.0)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    keep = 1.0 - ramp.clamp(0.0, 1.0)
    mixed: Tensor = frequencies / rope["factor"] * (1.0 - keep) + frequencies * keep
    return mixed


def _yarn_scale(rope: dict[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    mscale, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dims:
        return yarn_mscale(rope["factor"], mscale) / yarn_mscale(rope["factor"], all_dims)
    return yarn_mscale(rope["factor"])
