"""The HTTP API that OpenAI's clients know: chat completions, completions, models; whole answers and streams.

Beyond OpenAI's fields, a request may name its `traffic_class` and a `cache_salt` that keeps a tenant's blocks apart.
Usage says what came out of the cache, in OpenAI's words (`prompt_tokens_details.cached_tokens`) and in DeepSeek's
(`prompt_cache_hit_tokens` and `prompt_cache_miss_tokens`, which sum to `prompt_tokens`).
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cachesvc.engine.errors import RequestError
from cachesvc.engine.request import SamplingParams
from cachesvc.engine.serving.backend import Backend, BackendError, BusyError, Job
from cachesvc.engine.serving.chat import Chat, TextStream

MAX_BODY_BYTES: Final = 16 << 20
"""A larger request is refused."""
MAX_STOPS: Final = 16
DEFAULT_COMPLETION_TOKENS: Final = 16
"""Of `/v1/completions`, as OpenAI has it."""

StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Common(BaseModel):
    """What both kinds of request share. Fields that would change the answer and are not implemented are refused."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(1.0, ge=0)
    top_p: float | None = Field(1.0, gt=0, le=1)
    seed: int | None = None
    stop: StopText | list[StopText] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    n: Literal[1] | None = 1
    logprobs: Literal[False, None] = None
    traffic_class: str | None = None
    cache_salt: str | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def params(self, room: int, wanted: int | None) -> SamplingParams:
        """`room` is what the context leaves for the answer."""
        if len(self.stops) > MAX_STOPS:
            raise RequestError(f"stop has {len(self.stops)} entries; at most {MAX_STOPS} are allowed")
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            # Without a seed two requests get different answers.
            seed=uuid.uuid4().int & 0x7FFFFFFF if self.seed is None else self.seed,
            max_new_tokens=room if wanted is None else wanted,
        )


class _ChatBody(_Common):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: Literal[None] = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None


class _TextBody(_Common):
    prompt: str | list[int] | list[str]
    echo: Literal[False] = False


@dataclass(frozen=True)
class _Answer:
    """A request under way, in the form that both endpoints go on with."""

    name: str
    job: Job
    body: _Common
    chat: bool


class OpenAIServer:
    """`app` is the ASGI application. `context` is the model's limit in tokens."""

    def __init__(self, backend: Backend, chat: Chat, *, model: str, context: int) -> None:
        self._backend = backend
        self._chat = chat
        self._model = model
        self._context = context
        self._since = int(time.time())
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/health", self._health),
            ]
        )

    async def _models(self, _: Request) -> Response:
        card = {"id": self._model, "object": "model", "created": self._since, "owned_by": "cachesvc"}
        return JSONResponse({"object": "list", "data": [card]})

    async def _health(self, _: Request) -> Response:
        good = await self._backend.healthy()
        return JSONResponse({"healthy": good}, 200 if good else 503)

    async def _chat_completions(self, request: Request) -> Response:
        return await self._respond(request, _ChatBody)

    async def _completions(self, request: Request) -> Response:
        return await self._respond(request, _TextBody)

    async def _respond(self, request: Request, kind: type[_ChatBody | _TextBody]) -> Response:
        try:
            answer = self._accept(await _read(request), kind)
            if answer.body.stream:
                return await self._stream(answer)
            return JSONResponse(await self._whole(answer))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            return _problem(400, f"{where}: {first['msg']}", "invalid_request_error")
        except RequestError as error:
            return _problem(400, str(error), "invalid_request_error")
        except BusyError as error:
            return _problem(429, str(error), "rate_limit_error")
        except BackendError as error:
            return _problem(503, str(error), "server_error")

    def _accept(self, raw: dict[str, Any], kind: type[_ChatBody | _TextBody]) -> _Answer:
        body = kind.model_validate(raw)
        if body.model != self._model:
            raise RequestError(f"model {body.model!r} is not served here, only {self._model!r}")
        if isinstance(body, _ChatBody):
            tokens = self._chat.prompt(raw)
            wanted = body.max_completion_tokens or body.max_tokens
        else:
            tokens = self._prompt_tokens(body.prompt)
            wanted = body.max_tokens or DEFAULT_COMPLETION_TOKENS
        room = self._context - len(tokens)
        if room < 1:
            raise RequestError(f"the prompt has {len(tokens)} tokens; the model's context is {self._context}")
        job = Job(
            tokens=tokens,
            params=body.params(room, wanted),
            traffic_class=body.traffic_class,
            salt=(body.cache_salt or "").encode(),
        )
        chat = isinstance(body, _ChatBody)
        return _Answer(("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex, job, body, chat)

    def _prompt_tokens(self, prompt: str | list[int] | list[str]) -> list[int]:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            if len(prompt) > 1:
                raise RequestError(f"prompt holds {len(prompt)} texts; send one request for each")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._chat.encode(prompt)
        return [int(token) for token in prompt]

    async def _pieces(self, answer: _Answer) -> AsyncIterator[tuple[str, str | None, dict[str, Any]]]:
        """(text, finish reason at the end, usage so far) for every token."""
        text = TextStream(self._chat, answer.body.stops)
        async with aclosing(self._backend.generate(answer.job)) as events:
            async for event in events:
                said = text.push(event.token, last=event.finish_reason is not None)
                reason = "stop" if text.stopped else event.finish_reason
                yield said, reason, _usage(len(answer.job.tokens), event.index + 1, event.hit_tokens or 0)
                if reason is not None:
                    return

    async def _whole(self, answer: _Answer) -> dict[str, Any]:
        pieces = [piece async for piece in self._pieces(answer)]
        text, (_, reason, usage) = "".join(said for said, _, _ in pieces), pieces[-1]
        content = {"message": {"role": "assistant", "content": text}} if answer.chat else {"text": text}
        choice = {"index": 0, **content, "finish_reason": reason, "logprobs": None}
        kind = "chat.completion" if answer.chat else "text_completion"
        return {**self._head(answer, kind), "choices": [choice], "usage": usage}

    async def _stream(self, answer: _Answer) -> Response:
        pieces = self._pieces(answer)
        # The first token decides between an answer and an error: after it the status is sent.
        first = await anext(pieces)
        return StreamingResponse(self._sent(answer, first, pieces), media_type="text/event-stream")

    async def _sent(
        self,
        answer: _Answer,
        first: tuple[str, str | None, dict[str, Any]],
        pieces: AsyncIterator[tuple[str, str | None, dict[str, Any]]],
    ) -> AsyncIterator[str]:
        kind = "chat.completion.chunk" if answer.chat else "text_completion"
        head = self._head(answer, kind)
        wants_usage = answer.body.stream_options is not None and answer.body.stream_options.include_usage
        empty = {"usage": None} if wants_usage else {}

        def chunk(said: str, reason: str | None, opening: bool) -> str:
            delta = {"role": "assistant"} if opening else {}
            content = {"delta": {**delta, "content": said}} if answer.chat else {"text": said}
            choice = {"index": 0, **content, "finish_reason": reason, "logprobs": None}
            return _sse({**head, "choices": [choice], **empty})

        said, reason, usage = first
        yield chunk(said, reason, True)
        try:
            async for said, reason, now in pieces:
                usage = now
                if said or reason is not None:
                    yield chunk(said, reason, False)
        except BackendError as error:
            yield _sse({"error": {"message": str(error), "type": "server_error", "param": None, "code": None}})
            return
        if wants_usage:
            yield _sse({**head, "choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def _head(self, answer: _Answer, kind: str) -> dict[str, Any]:
        return {"id": answer.name, "object": kind, "created": int(time.time()), "model": self._model}


async def _read(request: Request) -> dict[str, Any]:
    if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
        raise RequestError(f"the request is larger than {MAX_BODY_BYTES} bytes")
    try:
        raw = await request.json()
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise RequestError("the body is not a JSON object")
    return raw


def _usage(prompt: int, completion: int, hit: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": hit},
        "prompt_cache_hit_tokens": hit,
        "prompt_cache_miss_tokens": prompt - hit,
    }


def _sse(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def _problem(status: int, text: str, kind: str) -> Response:
    return JSONResponse({"error": {"message": text, "type": kind, "param": None, "code": None}}, status)
