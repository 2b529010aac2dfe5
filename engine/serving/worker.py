"""An engine behind HTTP, for our own processes: a job as JSON in, a line of JSON per token out.

A prompt that is to be handed over ends with the line ``{"stored": …}``, when the cache has everything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cachesvc.connector.base import BasePrefixCache
from cachesvc.engine.errors import RequestError
from cachesvc.engine.serving.backend import Backend, BackendError, Job

GENERATE: Final = "/internal/generate"
HEALTH: Final = "/health"
_FLUSH_TIMEOUT_S: Final = 30.0
MAX_BODY_BYTES: Final = 64 << 20
"""A job of four million tokens; a larger one is refused."""


def worker_app(backend: Backend, caches: Sequence[BasePrefixCache]) -> Starlette:
    """`caches` are flushed before a prompt counts as handed over."""

    async def generate(request: Request) -> Response:
        if int(request.headers.get("content-length") or 0) > MAX_BODY_BYTES:
            return _problem(413, f"a job may have {MAX_BODY_BYTES} bytes")
        try:
            job = Job.from_json(await request.json())
        except (RequestError, json.JSONDecodeError) as error:
            return _problem(400, str(error))
        return StreamingResponse(lines(job), media_type="application/x-ndjson")

    async def lines(job: Job) -> AsyncIterator[str]:
        try:
            async with aclosing(backend.generate(job)) as events:
                async for event in events:
                    yield json.dumps(asdict(event)) + "\n"
            if job.publish_as is not None:
                stored = [await asyncio.to_thread(cache.flush, _FLUSH_TIMEOUT_S) for cache in caches]
                yield json.dumps({"stored": all(stored)}) + "\n"
        except RequestError as error:
            yield json.dumps({"refused": str(error)}) + "\n"
        except BackendError as error:
            yield json.dumps({"failed": str(error)}) + "\n"

    async def health(_: Request) -> Response:
        good = await backend.healthy()
        return JSONResponse({"healthy": good}, 200 if good else 503)

    return Starlette(routes=[Route(GENERATE, generate, methods=["POST"]), Route(HEALTH, health)])


def _problem(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)
