"""The conversation of the demonstration: a tool-using agent's session, without the model's own answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

from cachesvc.engine.tokenizer import Message


@dataclass(frozen=True)
class Transcript:
    """`turns[i]` holds the messages that come before the model's i-th answer: a question, tool calls, tool results.

    The system prompt is the first message of the first turn.
    """

    name: str
    turns: tuple[tuple[Message, ...], ...]


def load_transcript() -> Transcript:
    """Reads the transcript that comes with the package."""
    text = resources.files("cachesvc.engine").joinpath("transcript.json").read_text(encoding="utf-8")
    raw = json.loads(text)
    turns = [tuple(turn["messages"]) for turn in raw["turns"]]
    turns[0] = ({"role": "system", "content": raw["system"]}, *turns[0])
    return Transcript(raw["name"], tuple(turns))
