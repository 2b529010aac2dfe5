"""A `ced` checkpoint with random weights, for demonstrations and benchmarks: nobody has trained one."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class CedShape:
    """A `ced` whose encoder half is its first half and owns two sets of records, of one and of two tokens."""

    layers: int = 8
    hidden: int = 128
    heads: int = 4
    latent: int = 96
    rope: int = 32
    vocabulary: int = 512
    keep: int = 140
    form: str = "fp8"
    context: int = 40_000


def make_ced(path: Path, shape: CedShape, seed: int = 0) -> Path:
    """Writes the checkpoint directory `path` and returns it."""
    path.mkdir(parents=True, exist_ok=True)
    ratios = [1, 2, *[0] * (shape.layers - 2)]
    inner, dim = 3 * shape.hidden, shape.latent + shape.rope
    config = {
        "model_type": "ced",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "kv_lora_rank": shape.latent,
        "qk_rope_head_dim": shape.rope,
        "sliding_window": 128,
        "n_prefill_layer": shape.layers // 2,
        "prefill_keep_tokens": shape.keep,
        "compress_ratios": ratios,
        "record_format": shape.form,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
    }
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(rows, columns, generator=generator) / columns**0.5
        return values

    tensors = {"model.embed_tokens.weight": torch.randn(shape.vocabulary, shape.hidden, generator=generator)}
    for index, ratio in enumerate(ratios):
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        tensors |= {
            f"{layer}.input_layernorm.weight": torch.ones(shape.hidden),
            f"{layer}.post_attention_layernorm.weight": torch.ones(shape.hidden),
            f"{attention}.q_proj.weight": matrix(shape.heads * dim, shape.hidden),
            f"{attention}.kv_proj.weight": matrix(dim, shape.hidden),
            f"{attention}.kv_norm.weight": torch.ones(shape.latent),
            f"{attention}.o_proj.weight": matrix(shape.hidden, shape.heads * shape.latent),
            f"{layer}.mlp.gate_proj.weight": matrix(inner, shape.hidden),
            f"{layer}.mlp.up_proj.weight": matrix(inner, shape.hidden),
            f"{layer}.mlp.down_proj.weight": matrix(shape.hidden, inner),
        }
        if ratio:
            tensors[f"{attention}.compressor.kv_proj.weight"] = matrix(dim, shape.hidden)
            tensors[f"{attention}.compressor.norm.weight"] = torch.ones(shape.latent)
        if ratio == 2:
            tensors[f"{attention}.compressor.gate_proj.weight"] = matrix(1, shape.hidden)
    tensors["model.norm.weight"] = torch.ones(shape.hidden)
    save_file(tensors, path / "model.safetensors")
    return path


def made_beside(source: Path) -> Path:
    """A `ced` that speaks with the tokenizer of the checkpoint `source`, made once and kept next to it."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    target = source.with_name(f"{source.name}-ced")
    if not (target / ".complete").exists():
        shape = CedShape(
            layers=6, hidden=192, vocabulary=config["vocab_size"], context=config["max_position_embeddings"]
        )
        make_ced(target, shape)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (source / name).exists():
                shutil.copyfile(source / name, target / name)
        (target / ".complete").touch()
    return target
