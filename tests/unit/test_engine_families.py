"""Every model family against transformers on the same files, `ced` against a plain float64 reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_families import CED, FAMILIES, HUGGING_FACE, CedReference, make_ced, make_family, one_thread  # noqa: F401  (one_thread)
from engine_support import forward_all, random_tokens

from cachesvc.connector.prefix_cache import NullPrefixCache
from cachesvc.engine.engine import Engine, EngineConfig
from cachesvc.engine.errors import CheckpointError
from cachesvc.engine.models import records
from cachesvc.engine.models.loading import load_model
from cachesvc.engine.request import SamplingParams

# Importing transformers alone can take a minute on a busy machine.
pytestmark = pytest.mark.timeout(400)

TOKENS = 330
NEW = 12


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("families")
    return path


def greedy(path: Path, prompt: list[int]) -> list[int]:
    config = EngineConfig(num_pages=60, page_size=16, max_batch_tokens=200)
    with Engine(load_model(path), NullPrefixCache(), config) as engine:
        return list(engine.generate([prompt], SamplingParams(max_new_tokens=NEW, stop_token_ids=()))[0].tokens)


@pytest.mark.parametrize("family", HUGGING_FACE)
def test_logits_and_greedy_tokens_equal_those_of_transformers(family: str, place: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = make_family(place, family)
    tokens = random_tokens(TOKENS, seed=3)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
        # Without a mask token 0 would count as padding.
        inputs = {"input_ids": torch.tensor([tokens]), "attention_mask": torch.ones(1, TOKENS, dtype=torch.int64)}
        answer = reference.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        wanted = answer[0, TOKENS:].tolist()
    assert expected.std() > 0.3  # A comparison of values near zero would prove nothing.
    model = load_model(path)
    for invariant in (False, True):
        for chunks in ([TOKENS], [1, 64, 128, 7, 130]):
            got = forward_all(model, tokens, chunks, invariant=invariant)
            assert (got - expected).abs().max() < 2e-3, (invariant, chunks)
    assert greedy(path, tokens) == wanted
    assert len(set(wanted)) > 1


@pytest.mark.parametrize("ratios", [[1, 0, 0, 0], [2, 0, 0, 0], [0, 2, 0, 0], [1, 2, 0, 0]], ids=str)
@pytest.mark.parametrize("form", records.FORMATS)
def test_ced_equals_its_reference(form: str, ratios: list[int], tmp_path: Path) -> None:
    raw = CED | {"compress_ratios": ratios, "record_format": form}
    if form == "fp4":
        raw |= {"kv_lora_rank": 40}
    path = make_ced(tmp_path, raw)
    tokens = random_tokens(TOKENS, seed=4)
    reference, model = CedReference(path), load_model(path)
    expected = reference.logits(tokens)
    assert expected.std() > 0.3
    for invariant in (False, True):
        for chunks in ([TOKENS], [1, 64, 128, 7, 130]):
            got = forward_all(model, tokens, chunks, page_size=6, invariant=invariant)
            # A value that lies on the edge between two of a record's codes may fall on either side.
            assert (got - expected).abs().mean() < 1e-3 and (got - expected).abs().max() < 0.1
    wanted: list[int] = []
    for step in range(NEW):
        row = reference.logits([*tokens, *wanted], keep=raw["prefill_keep_tokens"] + step)[-1]
        wanted.append(int(row.argmax()))
    assert greedy(path, tokens) == wanted


def test_the_decoder_half_sees_only_the_last_tokens_of_a_prompt(tmp_path: Path) -> None:
    """Otherwise nothing would be saved, and the comparison with a truncating reference would prove nothing."""
    reference = CedReference(make_ced(tmp_path, CED))
    tokens = random_tokens(TOKENS, seed=4)
    assert (reference.logits(tokens)[-1] - reference.logits(tokens, keep=140)[-1]).abs().max() > 1e-4


@pytest.mark.parametrize(("form", "size", "error"), [("fp8", 528, 0.04), ("fp4", 288, 0.15)])
def test_records_have_the_size_and_precision_of_their_format(form: str, size: int, error: float) -> None:
    x = torch.randn(50, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 3, 50)[:, None]
    encoded = records.encode(x, form)
    assert encoded.shape == (50, size) == (50, records.record_bytes(512, form))
    decoded = records.decode(encoded, 512, form, torch.float32)
    assert ((decoded - x).norm(dim=1) / x.norm(dim=1)).max() < error
    zeros = torch.zeros(1, 512)
    assert torch.equal(records.decode(records.encode(zeros, form), 512, form, torch.float32), zeros)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": [1, 0, 2, 0]}, "compress_ratios"),
        ({"compress_ratios": [0, 0, 0, 0]}, "compress_ratios"),
        ({"record_format": "fp6"}, "record_format = 'fp6'"),
        ({"kv_lora_rank": 25}, "kv_lora_rank"),
        ({"prefill_keep_tokens": 100}, "prefill_keep_tokens = 100"),
    ],
)
def test_a_ced_that_makes_no_sense_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = make_ced(tmp_path, CED)
    (path / "config.json").write_text(json.dumps(CED | change))
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(CheckpointError, match=r"model_type = 'mamba'.*llama"):
        load_model(tmp_path)


def test_every_family_is_listed() -> None:
    assert set(FAMILIES) == {"qwen3", "gpt_oss", "gemma3", "deepseek_v3", "ced"}
