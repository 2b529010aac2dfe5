"""What a service needs: storage, bandwidth, index, hosts and cards. Every number says its formula."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final, NamedTuple

from cachesvc.errors import ConfigError
from cachesvc.keys import BLOCK_TOKENS

DAY: Final = 86_400.0

# ---- bytes per token, from a model's config.json ---------------------------------------------------------------------

_DTYPE_BYTES: Final = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "fp8": 1, "int8": 1,
}  # fmt: skip
_FULL_ATTENTION: Final = "full_attention"
_MOST_WRITTEN: Final = 2
"""Share of the input: all of it, and answers as long again."""


class TokenBytes(NamedTuple):
    """What the KV of a token takes, and how that was computed."""

    value: float
    formula: str


def presets() -> dict[str, Mapping[str, Any]]:
    """By name, the fields of well-known models' config.json that decide it."""
    found: dict[str, Mapping[str, Any]] = json.loads(files("cachesvc").joinpath("models.json").read_text("utf-8"))
    return found


def token_bytes(config: Mapping[str, Any], dtype: str | None = None) -> TokenBytes:
    """Bytes of KV per token, from the fields of a config.json; `dtype` of the KV replaces the model's.

    Multi-head latent attention keeps one compressed vector and one rotary key for all heads (and, with sparse
    attention, an 8-bit index key with a 4-byte scale). Layers with a sliding window or a recurrent state are not
    stored: what they need is recomputed after a hit. Raises `ConfigError` for a field that is missing.
    """
    try:
        return _token_bytes(config, dtype)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise ConfigError(f"the model's configuration lacks a field, or it is no number: {error}") from error


def _token_bytes(config: Mapping[str, Any], dtype: str | None) -> TokenBytes:
    config = config.get("text_config") or config
    if "kv_bytes_per_token" in config:
        value = float(config["kv_bytes_per_token"])
        return TokenBytes(value, f"{value:g} B as published")
    name = dtype or config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if name not in _DTYPE_BYTES:
        raise ConfigError(f"KV of type {name!r} is unknown; use one of {', '.join(_DTYPE_BYTES)}")
    width = _DTYPE_BYTES[name]
    layers = int(config["num_hidden_layers"])
    if config.get("kv_lora_rank"):
        rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
        index = int(config.get("index_head_dim") or 0)
        extra = f" + {index} + 4" if index else ""
        size = (rank + rope) * width + (index + 4 if index else 0)
        return TokenBytes(float(layers * size), f"{layers} layers × (({rank} + {rope}) × {width} B{extra})")
    heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    head = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    full = _full_layers(config, layers)
    if not full:
        raise ConfigError("all layers of this model keep a window or a state only: there is nothing to store")
    which = f"{full} layers" if full == layers else f"{full} of {layers} layers (the others keep a window or a state)"
    return TokenBytes(float(2 * full * heads * head * width), f"K and V × {which} × {heads} heads × {head} × {width} B")


def _full_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers that attend to everything."""
    types = config.get("layer_types")
    if types:
        return sum(kind == _FULL_ATTENTION for kind in types)
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return layers
    pattern = config.get("sliding_window_pattern")
    if pattern:  # one in so many attends to everything
        return layers // int(pattern)
    return min(layers, int(config["max_window_layers"])) if "max_window_layers" in config else 0


# ---- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assumptions:
    """Rates in tokens; `write_share` of the input tokens is written; `use_span` from writing to last use, seconds."""

    tokens_per_day: float
    hit_rate: float
    bytes_per_token: float
    retention: float
    """Seconds that a block is kept since last use, averaged over what is written."""
    write_share: float
    use_span: float = 0.0
    replicas: int = 1
    block_tokens: int = BLOCK_TOKENS
    prefill_per_card: float = 60_000.0
    cards_per_host: int = 8
    index_bytes: float = 64.0
    link_bytes_per_s: float = 54.5e9
    card_hour: float | None = None

    def __post_init__(self) -> None:
        positive = ("tokens_per_day", "bytes_per_token", "retention", "replicas", "block_tokens", "prefill_per_card")
        for name in (*positive, "cards_per_host", "index_bytes", "link_bytes_per_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name.replace('_', ' ')} is {getattr(self, name):g}; it must be more than 0")
        if not 0 <= self.hit_rate < 1:
            raise ConfigError(f"the hit rate is {self.hit_rate:g}; it must be at least 0 and less than 1")
        for name in ("write_share", "use_span", "card_hour"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"{name.replace('_', ' ')} is {value:g}; it must be a number, and not negative")
        if self.write_share > _MOST_WRITTEN:
            raise ConfigError(f"{self.write_share:g} of the input is written; over {_MOST_WRITTEN} cannot be meant")


class Quantity(NamedTuple):
    name: str
    value: float
    unit: str
    formula: str


def plan(given: Assumptions) -> list[Quantity]:
    """Every number, in the order in which they follow from each other."""
    tokens = given.tokens_per_day / DAY
    hits = tokens * given.hit_rate
    block_bytes = given.bytes_per_token * given.block_tokens
    written = tokens * given.write_share * given.replicas
    kept = written * (given.retention + given.use_span)
    blocks = kept / given.block_tokens
    gain = 1 / (1 - given.hit_rate)
    card = given.prefill_per_card * gain
    card_hits = card * given.hit_rate
    cards = tokens / card
    found = [
        Quantity("input", tokens, "tokens/s", "tokens per day ÷ 86,400 s"),
        Quantity("bytes of a block", block_bytes, "B", "bytes per token × tokens per block"),
        Quantity("prefill saved", gain, "×", "1 ÷ (1 − hit rate)"),
        Quantity("input per card", card, "tokens/s", "prefill per card ÷ (1 − hit rate)"),
        Quantity("cards fed", cards, "cards", "input ÷ input per card"),
        Quantity("hosts fed", cards / given.cards_per_host, "hosts", "cards fed ÷ cards per host"),
        Quantity("cards without a cache", tokens / given.prefill_per_card, "cards", "input ÷ prefill per card"),
        Quantity("blocks read per card", card_hits / given.block_tokens, "blocks/s",
                 "input per card × hit rate ÷ tokens per block"),
        Quantity("read per card", card_hits * given.bytes_per_token, "B/s",
                 "blocks read per card × bytes of a block"),
        Quantity("read per host", card_hits * given.bytes_per_token * given.cards_per_host, "B/s",
                 "read per card × cards per host"),
        Quantity("read", hits * given.bytes_per_token, "B/s", "input × hit rate × bytes per token"),
        Quantity("blocks read", hits / given.block_tokens, "blocks/s", "input × hit rate ÷ tokens per block"),
        Quantity("written", written * given.bytes_per_token, "B/s",
                 "input × write rate × replicas × bytes per token"),
        Quantity("blocks written", written / given.block_tokens, "blocks/s",
                 "input × write rate × replicas ÷ tokens per block"),
        Quantity("storage", kept * given.bytes_per_token, "B", "written × (TTL + use span)"),
        Quantity("blocks stored", blocks, "blocks", "storage ÷ bytes of a block"),
        Quantity("index in memory", blocks / given.replicas * given.index_bytes, "B",
                 "blocks stored ÷ replicas × index bytes per block"),
        Quantity("a missed block, computed", given.block_tokens / given.prefill_per_card, "s",
                 "tokens per block ÷ prefill per card"),
        Quantity("a hit block, over the link", block_bytes / given.link_bytes_per_s, "s",
                 "bytes of a block ÷ link bandwidth"),
        Quantity("a million missed tokens", 1e6 / given.prefill_per_card, "s", "1,000,000 ÷ prefill per card"),
        Quantity("one per cent of hit rate", tokens * 0.01 / given.prefill_per_card, "cards",
                 "input × 0.01 ÷ prefill per card"),
    ]  # fmt: skip
    if given.card_hour is not None:
        price = 1e6 / given.prefill_per_card / 3_600 * given.card_hour
        found.append(Quantity("price of a million missed tokens", price, "", "its card seconds ÷ 3,600 × card hour"))
    return found
