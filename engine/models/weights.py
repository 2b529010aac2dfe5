"""Reads the tensors of a safetensors checkpoint, one file or sharded, and names its exact content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from cachesvc.engine.errors import CheckpointError

_SMALL: Final = 1 << 16
"""Elements below which a tensor is kept as stored until it is taken: routers' corrections lose too much in bfloat16."""


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory, sorted. Raises `CheckpointError` if any is missing."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{index} is not an index of safetensors files: {error}") from error
        # A name from the index must not lead out of the directory.
        files = [path / Path(name).name for name in names]
    else:
        files = [path / "model.safetensors"]
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file} does not exist; the checkpoint is incomplete")
    return files


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor of the checkpoint as (name, tensor on the CPU, as it is stored)."""
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a mapping: it has no iterator)
                    yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error


class Weights:
    """The tensors of a checkpoint in one dtype on one device, taken out one by one and checked against the config."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device | str) -> None:
        self._path = path
        self._dtype = dtype
        self._device = device
        self._tensors = {
            name: tensor if tensor.numel() < _SMALL else tensor.to(dtype) for name, tensor in read_tensors(path)
        }

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, once. `dtype` instead of the model's is for small ones that need it.

        Raises `CheckpointError` when it is missing or has another shape.
        """
        if name not in self._tensors:
            raise CheckpointError(f"{self._path} has no tensor {name!r}; config.json and weights do not fit")
        tensor = self._tensors.pop(name)
        if tensor.shape != shape:
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}; config.json asks for {list(shape)}")
        return tensor.to(device=self._device, dtype=dtype or self._dtype)


def content_digest(path: Path) -> str:
    """sha256 (hex) over the configuration and the bytes of all weights.

    It stands for the weights in a cache namespace. Names and sizes would not do: a fine-tuned model has the same ones.
    """
    total = hashlib.sha256()
    for file in [path / "config.json", *weight_files(path)]:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()
