"""Options of the adapter: the argument `cachesvc` of `LLM`, or JSON in ``CACHESVC_DEEPINFER``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cachesvc.connector.settings import AdapterSettings

VARIABLE: Final = "CACHESVC_DEEPINFER"


@dataclass(frozen=True)
class Settings(AdapterSettings):
    """Options of the adapter, beside those of every adapter.

    save_decoded: save the blocks of answers too, since the next turn resends them.
    replay_tokens: tokens before the end of a hit that are computed again, to rebuild the sliding windows; -1: as many
        as the model's window, rounded up to a block.
    load_threads: loads that run side by side.
    pinned_share: share of DeepInfer's blocks that saves may keep pinned. At the limit saving waits for a later step.
    """

    save_decoded: bool = True
    replay_tokens: int = -1
    load_threads: int = 2
    pinned_share: float = 0.125


def parse_settings(given: Mapping[str, Any] | None) -> Settings:
    """`given`, or what the environment says. Raises `ValueError` for what makes no sense."""
    source = "cachesvc="
    if given is None:
        source = VARIABLE
        try:
            given = json.loads(os.environ.get(VARIABLE) or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(f"{VARIABLE} is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise ValueError(f"{VARIABLE} is {given!r}; it must be a JSON object")
    settings = Settings.parse(given, source)
    if settings.load_threads < 1:
        raise ValueError(f"load_threads is {settings.load_threads}; it must be positive")
    if settings.replay_tokens < -1:
        raise ValueError(f"replay_tokens is {settings.replay_tokens}; it must be -1 or more")
    if not 0 < settings.pinned_share <= 1:
        raise ValueError(f"pinned_share is {settings.pinned_share}; it must be above 0 and at most 1")
    return settings
