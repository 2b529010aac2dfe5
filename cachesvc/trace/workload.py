"""Seeded agent and chat traffic, as sessions of the agent format and as our own.

Agent sessions follow fits to 710 real coding-agent sessions: log-normal turns, steps and pauses, a system prompt that
survives when a full context is compacted, and a few histories whose end is rewritten. Chat follows fits to an hour of a
public chat service: short conversations, long first prompts, minutes between turns. The same seed makes the same bytes.
"""

from __future__ import annotations

import base64
import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count as count_from
from itertools import islice
from typing import Any, Final, NamedTuple

import xxhash

from cachesvc.keys import BLOCK_TOKENS
from cachesvc.trace.formats import ID_BITS, Request, Session, interleaved

BLOCK: Final = 64
"""Tokens a block in sessions, as in the agent format."""


class LogNormal(NamedTuple):
    """Mean and deviation of the logarithm, and the limits that values are cut to."""

    mean: float
    deviation: float
    low: float
    high: float

    def draw(self, random: random.Random) -> float:
        return min(self.high, max(self.low, math.exp(random.gauss(self.mean, self.deviation))))


# ---- fitted values ---------------------------------------------------------------------------------------------------

# Tokens of tools and of the system prompt, and the share of sessions with these.
_AGENT_HEADS: Final = (
    (12_597, 2_208, 0.18), (12_597, 2_134, 0.16), (9_292, 2_696, 0.12), (13_136, 2_635, 0.09), (10_667, 1_906, 0.09),
    (10_837, 2_337, 0.08), (10_971, 3_767, 0.07), (12_439, 3_096, 0.06), (11_922, 2_733, 0.05), (10_769, 2_177, 0.05),
    (9_074, 1_573, 0.05),
)  # fmt: skip
_AGENT_FRESH: Final = 0.554
"""Share of sessions that start afresh; the others resume a long context."""
_AGENT_FRESH_TURNS: Final = LogNormal(4.05, 1.0, 3, 1_178)
_AGENT_RESUMED_TURNS: Final = LogNormal(3.2, 1.15, 3, 1_178)
_AGENT_FRESH_TOKENS: Final = LogNormal(9.827, 0.248, 1, 40_000)
_AGENT_RESUMED_TOKENS: Final = LogNormal(11.75, 0.73, 40_000, 852_000)
_AGENT_WINDOWS: Final = ((165_000, 0.78), (900_000, 0.22))
_AGENT_MAX_TOKENS: Final = 900_000
_AGENT_OUTPUT: Final = LogNormal(5.56, 0.90, 20, 32_000)
_AGENT_ADDED: Final = LogNormal(6.70, 1.07, 60, 60_000)
_AGENT_ANSWER_SECONDS: Final = LogNormal(1.95, 0.75, 1.2, 300)
_AGENT_STEP_SECONDS: Final = LogNormal(2.2, 1.0, 1, 600)
_AGENT_PAUSE_SECONDS: Final = LogNormal(5.52, 1.6, 5, 78_638)
_AGENT_PAUSES: Final = 0.12
_AGENT_REWRITES: Final = 0.0135
_AGENT_REWRITTEN_SHARE: Final = LogNormal(-0.55, 0.50, 0.12, 1.5)
_AGENT_MIN_REWRITTEN: Final = 11_000
_AGENT_NOTHING_KEPT: Final = 0.08
_AGENT_CUT_ONE: Final = 0.04
_AGENT_CUT_MORE: Final = 0.01
_AGENT_CUT_BLOCKS: Final = LogNormal(3, 1.5, 2, 1_500)

_CHAT_FIRST_TOKENS: Final = LogNormal(8.585, 1.261, 20, 126_000)
_CHAT_MESSAGE_TOKENS: Final = LogNormal(5.5, 1.5, 5, 60_000)
_CHAT_OUTPUT: Final = LogNormal(5.336, 1.358, 1, 2_000)
_CHAT_PAUSE_SECONDS: Final = LogNormal(4.87, 0.984, 2, 3_600)
_CHAT_GOES_ON: Final = 1 / 3
_CHAT_WINDOW: Final = 128_000


# ---- sessions --------------------------------------------------------------------------------------------------------


class _Context:
    """The blocks of a session so far, as ranges of ids."""

    def __init__(self) -> None:
        self._next = 1
        self.ranges: list[list[int]] = []

    def become(self, kept: int, tokens: int) -> None:
        """The first `kept` blocks stay, fresh ones follow until `tokens` are full."""
        ranges, left = [], kept
        for first, count in self.ranges:
            if left <= 0:
                break
            ranges.append([first, min(count, left)])
            left -= count
        added = tokens // BLOCK - sum(count for _, count in ranges)
        if added > 0:
            ranges.append([self._next, added])
            self._next += added
        self.ranges = ranges


def sessions(traffic_class: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Lines of the agent format; `traffic_class` is ``agent`` or ``chat``."""
    make = {"agent": _agent_session, "chat": _chat_session}[traffic_class]
    for number in range(count):
        # Each session has a generator of its own: a longer run begins like a shorter one.
        yield {"id": f"{traffic_class}-{number:05d}", "block_size": BLOCK} | make(
            random.Random(f"{traffic_class} {seed} {number}")
        )


def _agent_session(draw: random.Random) -> dict[str, Any]:
    ((tools, system, _),) = draw.choices(_AGENT_HEADS, [share for *_, share in _AGENT_HEADS])
    ((window, _),) = draw.choices(_AGENT_WINDOWS, [share for _, share in _AGENT_WINDOWS])
    fresh = draw.random() < _AGENT_FRESH
    turns = int((_AGENT_FRESH_TURNS if fresh else _AGENT_RESUMED_TURNS).draw(draw))
    first = (_AGENT_FRESH_TOKENS if fresh else _AGENT_RESUMED_TOKENS).draw(draw)
    tokens = int(min(0.9 * window, max(first, tools + system + 200)))
    head, context, at, reqs = (tools + system) // BLOCK, _Context(), 0.0, []
    context.become(0, tokens)
    for turn in range(turns):
        if turn:
            pause = _AGENT_PAUSE_SECONDS if draw.random() < _AGENT_PAUSES else _AGENT_STEP_SECONDS
            at += _AGENT_ANSWER_SECONDS.draw(draw) + pause.draw(draw)
            kept, tokens = _next_agent_prompt(draw, tokens, head, window)
            context.become(kept, tokens)
        reqs.append([round(at, 3), tokens, int(_AGENT_OUTPUT.draw(draw)), 0, context.ranges])
    return {"tool_tokens": tools, "system_tokens": system, "reqs": reqs}


def _next_agent_prompt(draw: random.Random, tokens: int, head: int, window: int) -> tuple[int, int]:
    """Blocks kept of a prompt of `tokens`, and the tokens of the next."""
    full = tokens // BLOCK
    if tokens > window or draw.random() < _AGENT_REWRITES:  # compacted, or another thread of the conversation
        kept = 0 if draw.random() < _AGENT_NOTHING_KEPT else min(head, full)
        rewritten = max(_AGENT_MIN_REWRITTEN, tokens * _AGENT_REWRITTEN_SHARE.draw(draw))
        tokens = int(min(window, rewritten))
        return min(kept, tokens // BLOCK), tokens
    luck = draw.random()
    cut = 0
    if luck < _AGENT_CUT_MORE:
        cut = int(_AGENT_CUT_BLOCKS.draw(draw))
    elif luck < _AGENT_CUT_MORE + _AGENT_CUT_ONE:
        cut = 1
    kept = min(full, max(head, full - cut))
    return kept, min(_AGENT_MAX_TOKENS, kept * BLOCK + tokens % BLOCK + int(_AGENT_ADDED.draw(draw)))


def _chat_session(draw: random.Random) -> dict[str, Any]:
    tokens, at, context, reqs = int(_CHAT_FIRST_TOKENS.draw(draw)), 0.0, _Context(), []
    while tokens <= _CHAT_WINDOW:
        context.become(tokens // BLOCK, tokens)
        output = int(_CHAT_OUTPUT.draw(draw))
        reqs.append([round(at, 3), tokens, output, 0, context.ranges])
        if draw.random() >= _CHAT_GOES_ON:
            break
        at += _CHAT_PAUSE_SECONDS.draw(draw)
        tokens += output + int(_CHAT_MESSAGE_TOKENS.draw(draw))
    return {"reqs": reqs}


# ---- as requests, and as our own trace -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """How many sessions of each class, each class's k-th starting at k times `gap` seconds."""

    agents: int
    chats: int
    seed: int
    gap: float

    def requests(self, limit: int | None = None) -> Iterator[Request]:
        """The first `limit` in order of time, at 128 tokens a block. Keys are hashes of 64 bits."""
        for session, turn in islice(interleaved(self._sessions()), limit):
            request = session.request(turn)
            keys = [xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"), self.seed) for key in request.keys]
            yield request._replace(keys=keys)

    def _sessions(self) -> Iterator[Session]:
        kinds = {"agent": self.agents, "chat": self.chats}
        rows = {name: sessions(name, count, self.seed) for name, count in kinds.items()}
        space = count_from(0)
        for number in range(max(kinds.values())):
            for name, count in kinds.items():
                if number < count:
                    turns = next(rows[name])["reqs"]
                    step = BLOCK_TOKENS // BLOCK
                    yield Session(number * self.gap, turns, step, BLOCK_TOKENS, next(space) << ID_BITS, 0, name)


def own_trace(requests: Iterable[Request], seed: int) -> Iterator[str]:
    """Lines of our own format, see `cachesvc.trace.formats.OwnTrace`."""
    yield _line({"cachesvc_trace": 1, "made_by": "cachesvc workload", "seed": seed})
    for number, request in enumerate(requests):
        packed = base64.b64encode(b"".join(key.to_bytes(8, "little") for key in request.keys)).decode("ascii")
        yield _line(
            {
                "event": "ask",
                "at": round(request.at, 3),
                "pass": f"{number:x}",
                "class": request.traffic_class,
                "model": "workload",
                "tenant": "",
                "block": BLOCK_TOKENS,
                "input": request.input_tokens,
                "local": 0,
                "keys": packed,
            }
        )


def agent_trace(traffic_class: str, count: int, seed: int) -> Iterator[str]:
    """Lines of the agent format."""
    return map(_line, sessions(traffic_class, count, seed))


def _line(row: Any) -> str:
    return json.dumps(row, separators=(",", ":")) + "\n"
