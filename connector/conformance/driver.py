"""What the suite needs of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What became of one prompt.

    `output`: what the engine has computed; it is compared for equality, so it must not depend on chance. Greedy tokens
    are a good choice, a digest of the prompt's KV is a sharper one. None after an abort.
    `hit_tokens`: tokens of the prompt whose KV came out of the cache.
    """

    output: Any
    hit_tokens: int = 0


class Engine(ABC):
    """One engine that runs. Between two calls nothing is under way."""

    @abstractmethod
    def run(
        self, prompts: Sequence[Sequence[int]], *, salt: str = "", abort: Mapping[int, int] | None = None
    ) -> list[Answer]:
        """Computes prompts together, each to its end; one answer for each.

        `abort`: by index, after how many steps a prompt is given up; 0 is at once. An engine that cannot abort ignores
        it.
        """

    def settle(self, timeout_s: float) -> bool:
        """Waits until what was computed is stored, or given up, as far as the engine knows."""
        return True

    def held(self) -> int:
        """Blocks or pages of the engine's that requests hold which have ended. An engine that cannot tell says 0."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Ends it in an orderly way. Idempotent."""


class Driver(ABC):
    """Makes engines. Attributes may be overridden by a subclass."""

    vocabulary: int = 1000
    """Prompts are made of token ids from 10 up to here."""
    block_tokens: int = 128
    max_tokens: int = 1200
    """The longest prompt that the engine takes."""
    replayed_tokens: int = 0
    """Tokens at the end of a hit that the engine computes all the same, such as a sliding window."""
    salts: bool = True
    """Whether requests can carry a salt."""
    deadline_s: float = 60.0
    """Within which an answer must come, whatever the daemon does. Generous: it is to find hangs, not to measure."""

    @abstractmethod
    def open(self, address: str) -> Engine:
        """An engine with no KV of its own that uses the daemon at `address`, whether it runs or not.

        All engines of one driver serve the same model.
        """
