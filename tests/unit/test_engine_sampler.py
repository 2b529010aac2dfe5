"""Sampling: greedy, the cuts, the distribution, the seed."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from cachesvc.engine.errors import RequestError
from cachesvc.engine.request import SamplingParams
from cachesvc.engine.sampler import sample

PROBABILITIES = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])
LOGITS = PROBABILITIES.log()


def draws(params: SamplingParams, count: int = 4000) -> Counter[int]:
    return Counter(sample(LOGITS.expand(count, -1), [params] * count, range(count)))


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.stack((LOGITS, LOGITS.flip(0)))
    assert sample(logits, [SamplingParams()] * 2, [0, 5]) == [1, 3]


def test_temperature_one_follows_the_probabilities() -> None:
    counts = draws(SamplingParams(temperature=1.0, seed=3))
    for token, probability in enumerate(PROBABILITIES.tolist()):
        assert abs(counts[token] / 4000 - probability) < 4 * math.sqrt(probability / 4000)


def test_temperature_sharpens() -> None:
    counts = draws(SamplingParams(temperature=0.5, seed=3))
    squared = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    assert abs(counts[1] / 4000 - float(squared[1])) < 0.04


def test_top_k_keeps_k() -> None:
    assert set(draws(SamplingParams(temperature=1.0, top_k=2))) == {1, 3}


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.3, {1}), (0.41, {1, 3}), (0.66, {1, 3, 4}), (0.99, {0, 1, 2, 3, 4}), (1e-9, {1})]
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: set[int]) -> None:
    assert set(draws(SamplingParams(temperature=1.0, top_p=top_p))) == kept


def test_top_p_applies_to_what_top_k_left() -> None:
    # Of 0.4 and 0.25 the first is 62 %.
    assert set(draws(SamplingParams(temperature=1.0, top_k=2, top_p=0.6))) == {1}


def test_a_draw_depends_on_seed_and_index_only() -> None:
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(50)]
    together = sample(LOGITS.expand(50, -1), params, [7] * 50)
    alone = [sample(LOGITS[None], [one], [7])[0] for one in params]
    assert together == alone
    assert len(set(together)) > 1
    assert together != sample(LOGITS.expand(50, -1), params, [8] * 50)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ],
)
def test_senseless_values_are_refused(params: dict[str, float], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)  # type: ignore[arg-type]
