"""Reads the tensors of a safetensors checkpoint, one file or sharded, and names its exact content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from cachesvc.engine.errors import CheckpointError


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


def read_tensors(path: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every tensor of the checkpoint as (name, tensor in `dtype` on the CPU)."""
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a mapping: it has no iterator)
                    yield name, tensors.get_tensor(name).to(dtype)
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged: {error}") from error


def content_digest(path: Path) -> str:
    """sha256 (hex) over the configuration and the bytes of all weights.

    It stands for the weights in a cache namespace. Names and sizes would not do: a fine-tuned model has the same ones.
    """
    total = hashlib.sha256()
    for file in [path / "config.json", *weight_files(path)]:
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()
