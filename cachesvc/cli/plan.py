"""``cachesvc plan``: what a service needs, from its traffic, hit rate, model and TTLs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer
from rich.table import Table

from cachesvc.cli import options
from cachesvc.cli._console import wide_console
from cachesvc.cli._ttl import duration, parse_ttls
from cachesvc.config import parse_size
from cachesvc.errors import ConfigError
from cachesvc.plan import DAY, Assumptions, Quantity, TokenBytes, presets, token_bytes
from cachesvc.plan import plan as make_plan
from cachesvc.trace.formats import common_block, merged, open_trace
from cachesvc.trace.replay import rows, simulations
from cachesvc.trace.simulate import EXPIRED, INFINITE, NEVER_SEEN, TTL, Simulation

TokensPerDay = Annotated[str | None, typer.Option(help="input tokens a day: 155T, 2.5B, 800M; default: the trace's")]
HitRate = Annotated[str | None, typer.Option(help="by tokens: 0.96 or 96%; or give --trace")]
TracePath = Annotated[Path | None, typer.Option("--trace", help="take hit rate and write rate from a trace, by TTL")]
BytesPerToken = Annotated[float | None, typer.Option(help="what the KV of a token takes; or --model, --model-config")]
Model = Annotated[str | None, typer.Option(help="a well-known model; `--model list` names them")]
ModelConfig = Annotated[Path | None, typer.Option(help="a model's config.json")]
KvDtype = Annotated[str | None, typer.Option(help="type of the KV, if not the model's: bfloat16, fp8, …")]
Ttl = Annotated[list[str] | None, typer.Option(help="3d,7d: one after the other; agent=3d,chat=7d: together")]
Share = Annotated[str | None, typer.Option(help="agent=0.9,chat=0.1: of what is written, for TTLs by class")]
WriteRate = Annotated[float | None, typer.Option(help="written share of the input; default: what missed")]
UseSpan = Annotated[str, typer.Option(help="mean time from a block's writing to its last use")]
Replicas = Annotated[int, typer.Option(help="copies of each block", max=1_000)]
Prefill = Annotated[float, typer.Option("--prefill-rate", help="tokens/s that a card computes")]
CardsPerHost = Annotated[int, typer.Option(help="cards of a host", max=1_000_000)]
IndexBytes = Annotated[float, typer.Option(help="memory of the index for a block")]
Link = Annotated[str, typer.Option(help="bandwidth from host memory to a card, bytes a second")]
CardHour = Annotated[float | None, typer.Option(help="price of a card hour: prices a miss")]
SessionGap = Annotated[str, typer.Option(help="agent traces: the k-th session starts at k times this")]

_COUNT: Final = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([kmbgt]?)", re.IGNORECASE)
_COUNTS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_SCALES: Final = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class _Case(NamedTuple):
    label: str
    retention: float
    hit_rate: float
    write_share: float


def plan(
    tokens_per_day: TokensPerDay = None,
    hit_rate: HitRate = None,
    trace: TracePath = None,
    bytes_per_token: BytesPerToken = None,
    model: Model = None,
    model_config: ModelConfig = None,
    kv_dtype: KvDtype = None,
    ttl: Ttl = None,
    share: Share = None,
    write_rate: WriteRate = None,
    use_span: UseSpan = "0s",
    replicas: Replicas = 1,
    prefill_rate: Prefill = 60_000.0,
    cards_per_host: CardsPerHost = 8,
    index_bytes: IndexBytes = 64.0,
    link: Link = "54.5GB",
    card_hour: CardHour = None,
    session_gap: SessionGap = "60s",
    as_json: options.Json = False,
) -> None:
    """Turns traffic, hit rate, model and TTLs into storage, bandwidth, index, hosts and cards, with formulas."""
    if model == "list":
        for name, config in presets().items():
            kv = token_bytes(config)
            print(f"{name}: {kv.value:g} B a token = {kv.formula}")
        return
    kv = _token_bytes(bytes_per_token, model, model_config, kv_dtype)
    ttls = [one for one in parse_ttls(ttl or ["3d,7d"], sliding=True) if one is not None]
    if (hit_rate is None) == (trace is None):
        raise ConfigError("give one of --hit-rate and --trace")
    if trace is not None:
        if share is not None:
            raise ConfigError("--share is taken from the trace: leave it out, or give --hit-rate instead of --trace")
        per_day, cases = _cases_of_trace(trace, ttls, duration("--session-gap", session_gap))
    else:
        per_day, cases = None, [_case(one, _ratio(hit_rate or ""), _shares(share)) for one in ttls]
    if tokens_per_day is not None:
        per_day = _count(tokens_per_day)
    if per_day is None:
        raise ConfigError("give --tokens-per-day, or a trace that lasts for some time")
    try:
        link_bytes = parse_size(link)
    except ValueError as error:
        raise ConfigError(f"--link: {error}") from error
    plans: list[tuple[_Case, Assumptions, list[Quantity]]] = []
    for case in cases:
        given = Assumptions(
            tokens_per_day=per_day,
            hit_rate=case.hit_rate,
            bytes_per_token=kv.value,
            retention=case.retention,
            write_share=case.write_share if write_rate is None else write_rate,
            use_span=duration("--use-span", use_span),
            replicas=replicas,
            prefill_per_card=prefill_rate,
            cards_per_host=cards_per_host,
            index_bytes=index_bytes,
            link_bytes_per_s=link_bytes,
            card_hour=card_hour,
        )
        plans.append((case, given, make_plan(given)))
    if as_json:
        result = [
            {"ttl": case.label, "assumptions": asdict(given), "quantities": [number._asdict() for number in numbers]}
            for case, given, numbers in plans
        ]
        print(json.dumps({"bytes_per_token": kv._asdict(), "plans": result}, indent=1))
        return
    console = wide_console()
    console.print(_table("Assumed", [(case.label, _assumed(given, kv)) for case, given, _ in plans]))
    console.print(_table("Follows", [(case.label, numbers) for case, _, numbers in plans]))


# ---- what was given --------------------------------------------------------------------------------------------------


def _token_bytes(given: float | None, model: str | None, path: Path | None, dtype: str | None) -> TokenBytes:
    if sum(option is not None for option in (given, model, path)) != 1:
        raise ConfigError("give one of --bytes-per-token, --model and --model-config")
    if given is not None:
        if dtype is not None:
            raise ConfigError(f"--kv-dtype {dtype} is of a model's KV: it does not go with --bytes-per-token")
        return TokenBytes(given, "given")
    if model is not None:
        known = presets()
        if model.lower() not in known:
            raise ConfigError(f"--model {model!r} is not known here; use --model-config, or one of {', '.join(known)}")
        return token_bytes(known[model.lower()], dtype)
    assert path is not None
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no JSON object")
    return token_bytes(config, dtype)


def _count(text: str) -> float:
    match = _COUNT.fullmatch(text.strip())
    try:
        return float(match[1]) * _COUNTS[match[2].lower()] if match else float(text)
    except ValueError as error:
        raise ConfigError(f"--tokens-per-day {text!r} is not a number such as 155T or 800M") from error


def _ratio(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise ConfigError(f"--hit-rate {text!r} is not a number such as 0.96 or 96%") from error


def _shares(text: str | None) -> dict[str, float]:
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    try:
        shares = {name: float(value) for name, _, value in pairs}
    except ValueError as error:
        raise ConfigError(f"--share {text}: it must be like agent=0.9,chat=0.1") from error
    if len(shares) < len(pairs):
        raise ConfigError(f"--share {text} names a class twice")
    if shares and not (abs(sum(shares.values()) - 1) <= 1e-6 and min(shares.values()) >= 0):
        raise ConfigError(f"--share {text}: the shares must sum to 1")
    return shares


def _case(ttl: TTL, hit_rate: float, shares: dict[str, float]) -> _Case:
    unknown = next((name for name in shares if name not in ttl.by_class), None)
    if unknown is not None:
        raise ConfigError(f"--share names the class {unknown!r}, of which --ttl {ttl.text} says nothing")
    if ttl.plain is not None:
        retention = ttl.plain
    elif not shares and len(ttl.by_class) > 1:
        raise ConfigError(f"--ttl {ttl.text} needs --share, or plain TTLs such as --ttl 3d,7d")
    else:
        shares = shares or dict.fromkeys(ttl.by_class, 1.0)
        retention = sum(part * ttl.of(name) for name, part in shares.items())
    return _Case(ttl.text, retention, hit_rate, 1 - hit_rate)


def _cases_of_trace(path: Path, ttls: Sequence[TTL], gap: float) -> tuple[float | None, list[_Case]]:
    """Input tokens a day, and for each TTL what a cache without limit hits, writes and keeps."""
    trace = open_trace(path)
    block = common_block([trace], None)
    caches = simulations([INFINITE], [], ttls, block)
    first, last = None, 0.0
    for request in merged([trace], block, gap):
        first, last = request.at if first is None else first, request.at
        for cache in caches:
            cache.ask(request)
    cases = [_case_of(cache, ttl) for cache, ttl in zip(caches, ttls, strict=True)]
    span = last - (first or 0.0)
    tokens = sum(counts.input_tokens for counts in caches[0].counts.values())
    return (tokens * DAY / span if span > 0 else None), cases


def _case_of(cache: Simulation, ttl: TTL) -> _Case:
    *by_class, total = rows(cache, sampled=False)
    written = {row.traffic_class: row.miss_tokens[NEVER_SEEN] + row.miss_tokens[EXPIRED] for row in by_class}
    everything = sum(written.values())
    retention = sum(tokens * ttl.of(name) for name, tokens in written.items()) / (everything or 1)
    return _Case(ttl.text, retention, total.hit_rate, everything / (total.input_tokens or 1))


# ---- what came out ---------------------------------------------------------------------------------------------------


def _assumed(given: Assumptions, kv: TokenBytes) -> list[Quantity]:
    rows = [
        Quantity("tokens per day", given.tokens_per_day, "tokens", ""),
        Quantity("hit rate", given.hit_rate, "", "hit tokens ÷ input tokens"),
        Quantity("write rate", given.write_share, "", "tokens written once ÷ input tokens; 1 − hit rate if not given"),
        Quantity("bytes per token", given.bytes_per_token, "B", kv.formula),
        Quantity("tokens per block", given.block_tokens, "tokens", ""),
        Quantity("TTL", given.retention / DAY, "d", "since last use, by what is written"),
        Quantity("use span", given.use_span / DAY, "d", "from writing to last use; storage grows with it"),
        Quantity("replicas", given.replicas, "", ""),
        Quantity("prefill per card", given.prefill_per_card, "tokens/s", "computed, not read"),
        Quantity("cards per host", given.cards_per_host, "", ""),
        Quantity("index bytes per block", given.index_bytes, "B", ""),
        Quantity("link bandwidth", given.link_bytes_per_s, "B/s", "host memory to card"),
    ]
    return rows if given.card_hour is None else [*rows, Quantity("card hour", given.card_hour, "", "")]


def _table(title: str, columns: Sequence[tuple[str, Sequence[Quantity]]]) -> Table:
    table = Table(title, title_justify="left")
    for label, _ in columns:
        table.add_column(f"TTL {label}", justify="right", no_wrap=True)
    table.add_column("formula" if title == "Follows" else "what it is")
    for same in zip(*(numbers for _, numbers in columns), strict=True):
        table.add_row(same[0].name, *(_shown(number) for number in same), same[0].formula)
    return table


def _shown(number: Quantity) -> str:
    value, unit = number.value, number.unit
    if unit in ("cards", "hosts", "blocks/s", "", "d", "×") and value < 1e6:
        return f"{value:,.4g} {unit}".strip() if value < 1_000 else f"{value:,.0f} {unit}".strip()
    if unit == "s" and value < 0.1:
        return f"{value * 1e6:,.4g} µs"
    if unit == "B" and value < 1e6:
        return f"{value:,.0f} B"
    for scale, prefix in _SCALES:
        if value >= scale:
            return f"{value / scale:,.4g} {prefix}{'' if unit.startswith('B') else ' '}{unit}"
    return f"{value:,.4g} {unit}".strip()
