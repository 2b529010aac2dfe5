"""The engine on a real checkpoint, SmolLM2-135M-Instruct, against transformers on the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_support import FakeCache, forward_all

from cachesvc.connector.prefix_cache import NullPrefixCache
from cachesvc.engine.convert import ensure_model
from cachesvc.engine.engine import Engine, EngineConfig
from cachesvc.engine.models.llama import LlamaModel
from cachesvc.engine.request import SamplingParams
from cachesvc.engine.tokenizer import ChatTokenizer
from cachesvc.engine.transcript import load_transcript

NEW_TOKENS = 64
QUESTIONS = [
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List three causes of a slow database query.",
    "Explain in two sentences why the sky is blue.",
]

# The first use on a machine converts the model.
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return ensure_model()


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LlamaModel:
    return LlamaModel.load(checkpoint)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> ChatTokenizer:
    return ChatTokenizer(checkpoint)


@pytest.fixture(scope="module")
def prompts(tokenizer: ChatTokenizer) -> list[list[int]]:
    """Four short questions, and one prompt that spans several blocks."""
    short = [tokenizer.encode(tokenizer.render([{"role": "user", "content": text}])) for text in QUESTIONS]
    return [*short, tokenizer.encode(tokenizer.render(load_transcript().turns[0]))[:600]]


@pytest.fixture(scope="module")
def answers(model: LlamaModel, prompts: list[list[int]]) -> list[list[int]]:
    """Ours, greedy, all five in one batch, in chunks, on pages that do not divide a block."""
    config = EngineConfig(num_pages=40, page_size=48, max_batch_tokens=256)
    with Engine(model, NullPrefixCache(), config) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, stop_token_ids=()))
    return [list(output.tokens) for output in outputs]


@pytest.fixture(scope="module")
def reference(checkpoint: Path, prompts: list[list[int]], answers: list[list[int]]) -> list[torch.Tensor]:
    """Logits of transformers for each prompt followed by our answer, one row per token."""
    from transformers import LlamaForCausalLM

    theirs = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        return [
            theirs(torch.tensor([prompt + answer])).logits[0] for prompt, answer in zip(prompts, answers, strict=True)
        ]


def test_64_greedy_tokens_are_those_of_transformers(
    prompts: list[list[int]], answers: list[list[int]], reference: list[torch.Tensor]
) -> None:
    """If the likeliest token after every prefix of our answer is our next one, greedy search gives our answer."""
    for prompt, answer, logits in zip(prompts, answers, reference, strict=True):
        assert len(answer) == NEW_TOKENS
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_logits_are_those_of_transformers(
    model: LlamaModel, prompts: list[list[int]], answers: list[list[int]], reference: list[torch.Tensor]
) -> None:
    for prompt, answer, expected in zip(prompts, answers, reference, strict=True):
        tokens = prompt + answer
        # The prompt in two chunks, the answer as decoding computes it: the first tokens of it one by one.
        chunks = [len(prompt) - 5, 5, 1, 1, 1, NEW_TOKENS - 3]
        logits = forward_all(model, tokens, chunks, page_size=48)
        assert (logits - expected).abs().max() < 1e-3
        assert expected.abs().max() > 5


def test_the_model_knows_the_capital_of_france(tokenizer: ChatTokenizer, answers: list[list[int]]) -> None:
    assert "Paris" in tokenizer.decode(answers[0])


def test_a_hit_continues_with_the_same_words(
    model: LlamaModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    cache = FakeCache(model.config)
    hits = []
    for new_tokens in (42, 10):
        params = SamplingParams(max_new_tokens=new_tokens, stop_token_ids=())
        with Engine(model, cache, EngineConfig(num_pages=50)) as engine:
            (output,) = engine.generate([prompts[-1]], params)
        assert list(output.tokens) == answers[-1][:new_tokens]
        hits.append(output.hit_tokens)
    assert hits == [0, 512]
    # The block that decoding completed (600 + 40 tokens) is there for the next turn.
    longer = [*prompts[-1], *answers[-1]]
    with Engine(model, cache, EngineConfig(num_pages=50)) as engine:
        (output,) = engine.generate([longer], SamplingParams(max_new_tokens=1))
    assert output.hit_tokens == 640
