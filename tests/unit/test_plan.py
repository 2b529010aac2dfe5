"""Sizing: the world that the design starts from, model presets, and one line for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trace_files import mooncake, real, write

from cachesvc.errors import ConfigError
from cachesvc.plan import Assumptions, plan, presets, token_bytes

Typed = Callable[..., tuple[int, str, str]]
DAY = 86_400.0
WORLD: dict[str, Any] = {
    "tokens_per_day": 155e12, "hit_rate": 0.96, "bytes_per_token": 890, "retention": 3 * DAY, "write_share": 0.04,
}  # fmt: skip


def numbers(**changed: Any) -> dict[str, float]:
    return {number.name: number.value for number in plan(Assumptions(**(WORLD | changed)))}


def test_the_world_of_the_design() -> None:
    found = numbers()
    assert found["bytes of a block"] == 113_920
    assert found["prefill saved"] == pytest.approx(25)
    assert found["input per card"] == pytest.approx(1.5e6)
    assert found["blocks read per card"] == pytest.approx(11_250)
    assert round(found["read per card"] / 1e9, 2) == 1.28
    assert round(found["read per host"] / 1e9, 1) == 10.3
    assert found["cards without a cache"] == pytest.approx(25 * found["cards fed"])
    assert found["hosts fed"] == pytest.approx(155e12 / DAY / 1.5e6 / 8)
    assert found["blocks read"] == pytest.approx(11_250 * found["cards fed"])
    assert found["storage"] == pytest.approx(155e12 * 0.04 * 890 * 3) == pytest.approx(16.554e15)
    assert numbers(retention=7 * DAY)["storage"] == pytest.approx(38.626e15)
    assert found["index in memory"] == pytest.approx(found["blocks stored"] * 64)
    assert found["one per cent of hit rate"] == pytest.approx(299, abs=0.1)


def test_replicas_are_written_and_stored_but_indexed_once() -> None:
    one, two = numbers(use_span=DAY), numbers(use_span=DAY, replicas=2)
    assert two["storage"] == 2 * one["storage"] == pytest.approx(2 * numbers(retention=4 * DAY)["storage"])
    assert two["written"] == 2 * one["written"] and two["read"] == one["read"]
    assert two["index in memory"] == one["index in memory"]


@pytest.mark.parametrize("changed", [{"hit_rate": 1}, {"hit_rate": -0.1}, {"bytes_per_token": 0}, {"replicas": 0}])
def test_what_cannot_be_is_refused(changed: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        numbers(**changed)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deepseek-v4.1-flash", 890),
        ("llama-3-8b", 128 * 1024),
        ("llama-3.1-70b", 320 * 1024),
        ("deepseek-v3", 61 * 576 * 2),
        ("gpt-oss-120b", 18 * 2 * 8 * 64 * 2),
        ("gemma-3-27b", 10 * 2 * 16 * 128 * 2),
        ("smollm2-135m", 30 * 2 * 3 * 64 * 2),
    ],
)
def test_presets(name: str, expected: int) -> None:
    assert token_bytes(presets()[name]).value == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_key_value_heads": 2}, 4 * 2 * 2 * 16 * 2),
        ({"dtype": "float32"}, 4 * 2 * 4 * 16 * 4),
        ({"sliding_window": 512, "use_sliding_window": False}, 4 * 2 * 4 * 16 * 2),
        ({"sliding_window": 512, "max_window_layers": 3}, 3 * 2 * 4 * 16 * 2),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, 2 * 4 * 16 * 2),
    ],
)
def test_other_models(config: dict[str, Any], expected: int) -> None:
    base = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
    assert token_bytes(base | config).value == expected == token_bytes({"text_config": base | config}).value
    assert token_bytes(base | config, "fp8").value == expected / (4 if "dtype" in config else 2)


def test_the_command_line_reproduces_it(typed: Typed) -> None:
    world = (
        "plan",
        "--tokens-per-day",
        "155T",
        "--hit-rate",
        "96%",
        "--model",
        "DeepSeek-V4.1-Flash",
        "--ttl",
        "3d,7d",
    )
    code, out, _ = typed(*world)
    for shown in ("25 ×", "1.5 M tokens/s", "11,250 blocks/s", "1.282 GB/s", "10.25 GB/s", "113,920 B", "16.55 PB"):
        assert code == 0 and shown in out
    assert "input × write rate × replicas × bytes per token" in out and "prefill per card" in out
    plans = json.loads(typed(*world, "--json")[1])["plans"]
    assert [one["ttl"] for one in plans] == ["3d", "7d"]
    both = json.loads(typed(*world[:-2], "--ttl", "agent=3d,chat=7d", "--share", "agent=0.75,chat=0.25", "--json")[1])
    assert both["plans"][0]["assumptions"]["retention"] == pytest.approx(4 * DAY)


def test_a_trace_gives_hit_rate_and_write_rate(typed: Typed, tmp_path: Path) -> None:
    trace = write(tmp_path / "t", [mooncake(at, 600, [1, 2]) for at in (0, 10_000, 50_000, 100_000)])
    command = ("plan", "--trace", trace, "--bytes-per-token", 1000, "--ttl", "1m,30s", "--ttl", "chat=20s", "--json")
    minute, _, short = (one["assumptions"] for one in json.loads(typed(*command)[1])["plans"])
    assert minute["tokens_per_day"] == 2400 * DAY / 100 and minute["hit_rate"] == 3 * 512 / 2400
    assert minute["write_share"] == 512 / 2400 and short["write_share"] == 3 * 512 / 2400
    assert short["retention"] == 20


@pytest.mark.long
def test_the_real_agents_give_the_96_percent(typed: Typed) -> None:
    trace = real("agent_sample.jsonl")
    out = json.loads(typed("plan", "--trace", trace, "--bytes-per-token", 890, "--ttl", "3d", "--json")[1])
    assert out["plans"][0]["assumptions"]["hit_rate"] == pytest.approx(0.9638, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--hit-rate", "0.5"], "--tokens-per-day"),
        (["--tokens-per-day", "1T"], "one of --hit-rate and --trace"),
        (["--tokens-per-day", "lots", "--hit-rate", "0.5"], "'lots'"),
        (["--tokens-per-day", "1T", "--hit-rate", "most"], "'most'"),
        (["--tokens-per-day", "1T", "--hit-rate", "100%"], "the hit rate is 1"),
        (["--tokens-per-day", "1T", "--hit-rate", "0.5", "--model", "llama-3-8b"], "one of --bytes-per-token"),
        (["--tokens-per-day", "1T", "--hit-rate", "0.5", "--ttl", "agent=1d,chat=2d"], "needs --share"),
        (["--tokens-per-day", "1T", "--hit-rate", "0.5", "--share", "agent=0.5"], "must sum to 1"),
        (["--tokens-per-day", "1T", "--hit-rate", "0.5", "--share", "agent=1"], "says nothing"),
        (["--tokens-per-day", "1T", "--hit-rate", "0.5", "--share", "a=0.5,a=0.5,b=0.5"], "twice"),
        (["--tokens-per-day", "1T", "--hit-rate", "0.5", "--share", "a=nan"], "must sum to 1"),
        (["--tokens-per-day", "1T", "--hit-rate", "0.5", "--write-rate", "inf"], "write share is inf"),
        (["--tokens-per-day", "1T", "--hit-rate", "0.5", "--write-rate", "7"], "cannot be meant"),
        (["--tokens-per-day", "1T", "--hit-rate", "0.5", "--card-hour", "nan"], "card hour is nan"),
        (["--tokens-per-day", "1T", "--hit-rate", "0.5", "--kv-dtype", "fp8"], "does not go with"),
        (["--tokens-per-day", "1T", "--hit-rate", "0.5", "--link", "9" * 400], "is not a size"),
        (["--tokens-per-day", "1T", "--hit-rate", "0.5", "--replicas", "9" * 400], "--replicas"),
        (["--tokens-per-day", "1T", "--hit-rate", "0.5", "--ttl", "0"], "more than 0"),
        (["--trace", "/nowhere"], "cannot read /nowhere"),
    ],
)
def test_one_line_and_an_exit_code(typed: Typed, arguments: list[str], why: str) -> None:
    code, out, err = typed("plan", "--bytes-per-token", 890, *arguments)
    assert code in (2, 7) and not out and err.count("\n") == 1 and why in err, err


@pytest.mark.parametrize(
    ("content", "why"),
    [("{", "no JSON"), ("[]", "no JSON object"), ("{}", "lacks a field"), ('{"torch_dtype": "int3"}', "'int3'")],
)
def test_a_bad_model_configuration_is_one_line(typed: Typed, tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    code, _, err = typed("plan", "--tokens-per-day", "1T", "--hit-rate", "0.5", "--model-config", path)
    assert code == 2 and err.count("\n") == 1 and why in err
    code, _, err = typed("plan", "--tokens-per-day", "1T", "--hit-rate", "0.5", "--model", "gpt-2")
    assert code == 2 and "llama-3-8b" in err


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": "abc"},
        {"text_config": [1]},
        {"kv_bytes_per_token": "abc"},
        {"kv_bytes_per_token": None},
        {"torch_dtype": ["x"]},
        {"num_hidden_layers": float("inf"), "num_attention_heads": 1, "hidden_size": 1},
        {"num_hidden_layers": 10**400, "num_attention_heads": 1, "hidden_size": 1},
        {},
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        token_bytes(config)
