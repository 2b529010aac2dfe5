"""Which family a checkpoint belongs to, by its `model_type`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from cachesvc.engine.models import ced, deepseek_v3, gemma3, gpt_oss, llama
from cachesvc.engine.models.base import Model
from cachesvc.engine.models.config import ModelConfig, read_json, require


class _Family(Protocol):
    def load(self, path: Path, *, dtype: torch.dtype = ..., device: torch.device | str = ...) -> Model[Any]: ...


_MODELS: dict[str, _Family] = {
    **dict.fromkeys(llama.MODEL_TYPES, llama.LlamaModel),
    **dict.fromkeys(gpt_oss.MODEL_TYPES, gpt_oss.GptOssModel),
    **dict.fromkeys(gemma3.MODEL_TYPES, gemma3.Gemma3Model),
    **dict.fromkeys(deepseek_v3.MODEL_TYPES, deepseek_v3.DeepseekV3Model),
    **dict.fromkeys(ced.MODEL_TYPES, ced.CedModel),
}


def load_model(
    path: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Model[ModelConfig]:
    """Loads the checkpoint directory `path`. Raises `CheckpointError` for a family that is not implemented."""
    kind = str(read_json(path).get("model_type"))
    require(kind in _MODELS, "model_type", kind, ", ".join(_MODELS))
    return _MODELS[kind].load(path, dtype=dtype, device=device)
