"""What a front needs of whoever computes: a job in, tokens out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from cachesvc.engine.errors import EngineError, RequestError
from cachesvc.engine.request import FinishReason, SamplingParams


class BackendError(EngineError):
    """Nobody can compute this now: the engine has stopped, all workers are gone, or too many requests wait."""


class BusyError(BackendError):
    """Too many requests wait. Try again later."""


@dataclass(frozen=True)
class Job:
    """One request, in tokens."""

    tokens: list[int]
    params: SamplingParams
    traffic_class: str | None = None
    salt: bytes = b""
    publish_as: str | None = None
    receive: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "params": vars(self.params),
            "traffic_class": self.traffic_class,
            "salt": self.salt.hex(),
            "publish_as": self.publish_as,
            "receive": self.receive,
        }

    @classmethod
    def from_json(cls, raw: Any) -> Job:
        """Raises `RequestError` for anything that is not what `to_json` makes."""
        try:
            params = dict(raw["params"])
            if params["stop_token_ids"] is not None:
                params["stop_token_ids"] = tuple(params["stop_token_ids"])
            return cls(
                tokens=[int(token) for token in raw["tokens"]],
                params=SamplingParams(**params),
                traffic_class=raw["traffic_class"],
                salt=bytes.fromhex(raw["salt"]),
                publish_as=raw["publish_as"],
                receive=raw["receive"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"this is not a job: {error}") from error


@dataclass(frozen=True)
class Event:
    """One token. `index` counts an answer's tokens from 0."""

    index: int
    token: int
    finish_reason: FinishReason | None
    hit_tokens: int | None
    """Input tokens that came out of the cache; None where that is another engine's to say."""
    replayed_tokens: int = 0


class Backend(Protocol):
    """Computes. Ending the iteration early aborts the request."""

    def generate(self, job: Job) -> AsyncGenerator[Event, None]:
        """The tokens of the answer. Raises `RequestError` for a job that can never run, `BackendError` otherwise."""
        ...

    async def healthy(self) -> bool: ...
