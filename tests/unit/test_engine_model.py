"""The Llama model against transformers, on tiny random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import TINY, forward_all, random_tokens, write_checkpoint

from cachesvc.engine.errors import CheckpointError
from cachesvc.engine.models.linear import linear
from cachesvc.engine.models.llama import LlamaModel
from cachesvc.engine.models.weights import content_digest

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "no_gqa": {"num_key_value_heads": 6},
    "one_kv_head": {"num_key_value_heads": 1},
    "llama3_rope": {"rope_theta": 500000.0, "rope_scaling": ROPE_LLAMA3},
    "rope_of_transformers_5": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
}


def reference(path: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    raw = {key: value for key, value in (TINY | VARIANTS[variant]).items() if value is not None}
    write_checkpoint(tmp_path, raw)
    tokens = random_tokens(200, seed=3)
    expected = reference(tmp_path, tokens)
    model = LlamaModel.load(tmp_path)
    for chunks in ([200], [1, 64, 128, 7]):
        assert (forward_all(model, tokens, chunks) - expected).abs().max() < 1e-3
    assert expected.std() > 0.5  # A comparison of values near zero would prove nothing.


def test_rope_scaling_changes_the_logits(tmp_path: Path) -> None:
    tokens = random_tokens(100, seed=3)
    write_checkpoint(tmp_path / "plain", TINY)
    write_checkpoint(tmp_path / "scaled", TINY | {"rope_scaling": ROPE_LLAMA3})
    plain, scaled = (forward_all(LlamaModel.load(tmp_path / name), tokens, [100]) for name in ("plain", "scaled"))
    assert (plain - scaled).abs().max() > 0.1


def test_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    tokens = random_tokens(30, seed=4)
    write_checkpoint(tmp_path / "one", TINY)
    write_checkpoint(tmp_path / "three", TINY, shards=3)
    one, three = (forward_all(LlamaModel.load(tmp_path / name), tokens, [30]) for name in ("one", "three"))
    assert torch.equal(one, three)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_smaller_dtypes_run_and_come_close(dtype: torch.dtype, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY)
    tokens = random_tokens(60, seed=5)
    exact = forward_all(LlamaModel.load(tmp_path), tokens, [60])
    model = LlamaModel.load(tmp_path, dtype=dtype)
    close = forward_all(model, tokens, [50, 10])
    assert close.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(exact, close).min() > 0.98


@pytest.mark.parametrize("rows", [1, 2, 128, 129])
@pytest.mark.parametrize("width", [6, 7])
def test_linear_is_the_ordinary_product(rows: int, width: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, 5, generator=generator) for n in (rows, width))
    assert torch.allclose(linear(x, weight), x @ weight.t(), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type = 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"num_key_value_heads": 4}, "num_key_value_heads = 4"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings = None"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"vocab_size": None}, "no entry 'vocab_size'"),
        ({"vocab_size": 200}, r"shape \[199, 48\]; config.json asks for \[200, 48\]"),
        ({"num_hidden_layers": 4}, "no tensor 'model.layers.3"),
    ],
)
def test_what_is_not_implemented_or_does_not_fit_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, TINY)
    raw = {key: value for key, value in (TINY | change).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message):
        LlamaModel.load(tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        LlamaModel.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        LlamaModel.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not exist"):
        LlamaModel.load(tmp_path)
    write_checkpoint(tmp_path, TINY)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="is damaged"):
        LlamaModel.load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"gone\.safetensors does not exist"):
        LlamaModel.load(tmp_path)


def test_content_digest_sees_one_changed_weight_and_the_configuration(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY)
    first = content_digest(tmp_path)
    assert content_digest(tmp_path) == first
    file = tmp_path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    changed = content_digest(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"rope_theta": 20000.0}))
    assert len({first, changed, content_digest(tmp_path)}) == 3
