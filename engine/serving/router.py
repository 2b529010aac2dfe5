"""A backend made of workers: some compute prompts, some go on with the answers. The cache carries what they hand over.

Both get a request at once. The one that will decode loads the prompt's blocks while the other still computes. A worker
that fails or dies is left aside for a while and its part is done by another one: a prompt is computed again, an answer
is decoded again from its start. Sampling depends on the seed and the place alone, so it is the same answer, and the
tokens that the client has already are left out.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from typing import Any, Final

import httpx2

from cachesvc.engine.errors import RequestError
from cachesvc.engine.serving.backend import BackendError, Event, Job
from cachesvc.engine.serving.worker import GENERATE, HEALTH

_ASIDE_S: Final = 5.0
"""How long a worker that failed is asked only when there is no other."""
_CONNECT_TIMEOUT_S: Final = 5.0
_SILENCE_TIMEOUT_S: Final = 120.0
"""A worker that says nothing for so long counts as dead."""


class _Failed(Exception):
    """A worker could not do its part."""


class _Pool:
    """Workers of one role, taken in turn."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses
        self._turn = itertools.count()
        self._aside: dict[str, float] = {}

    def __iter__(self) -> Iterator[str]:
        """Every worker once: the next in turn first, those set aside last."""
        start = next(self._turn) % len(self._addresses)
        order = self._addresses[start:] + self._addresses[:start]
        now = time.monotonic()
        yield from sorted(order, key=lambda address: self._aside.get(address, 0.0) > now)

    def set_aside(self, address: str) -> None:
        self._aside[address] = time.monotonic() + _ASIDE_S

    @property
    def addresses(self) -> list[str]:
        return self._addresses


class Router:
    """Addresses are URLs such as ``http://127.0.0.1:8001``. Raises `ValueError` when a role has none."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        if not prefill or not decode:
            raise ValueError("the front needs at least one prefill worker and one decode worker")
        self._prefill = _Pool(prefill)
        self._decode = _Pool(decode)
        self._client: httpx2.AsyncClient | None = None

    async def healthy(self) -> bool:
        """Whether somebody can decode: a decode worker computes prompts too, if it must."""
        for address in self._decode.addresses:
            try:
                if (await self._http().get(address + HEALTH)).status_code == 200:
                    return True
            except httpx2.HTTPError:
                continue
        return False

    async def generate(self, job: Job) -> AsyncGenerator[Event, None]:
        name = uuid.uuid4().hex
        inbox: asyncio.Queue[Event | Exception] = asyncio.Queue()
        prefill = asyncio.create_task(self._compute_prompt(replace(job, publish_as=name), inbox))
        decode = asyncio.create_task(self._go_on(replace(job, receive=name), inbox))
        sent, hits = 0, None
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, _Failed):
                    # No prompt will come: whoever decodes computes it too.
                    decode.cancel()
                    decode = asyncio.create_task(self._go_on(job, inbox))
                    continue
                if isinstance(item, Exception):
                    raise item
                hits = item.hit_tokens if item.hit_tokens is not None else hits
                if item.index == sent:
                    sent += 1
                    yield replace(item, hit_tokens=hits)
                    if item.finish_reason is not None:
                        return
        finally:
            prefill.cancel()
            decode.cancel()
            await asyncio.gather(prefill, decode, return_exceptions=True)

    async def _compute_prompt(self, job: Job, inbox: asyncio.Queue[Event | Exception]) -> None:
        """Has the prompt computed up to its first token, by one worker after the other until one succeeds."""
        one = replace(job, params=replace(job.params, max_new_tokens=1))
        for address in self._prefill:
            try:
                async for line in self._lines(address, one):
                    if "stored" in line:
                        return
                    event = _event(line)
                    if event.finish_reason == "length" and job.params.max_new_tokens > 1:
                        event = replace(event, finish_reason=None)
                    inbox.put_nowait(event)
            except _Failed:
                self._prefill.set_aside(address)
                continue
            except RequestError as error:
                inbox.put_nowait(error)
                return
            self._prefill.set_aside(address)  # It ended without having stored anything.
        inbox.put_nowait(_Failed())

    async def _go_on(self, job: Job, inbox: asyncio.Queue[Event | Exception]) -> None:
        """Has the answer decoded, from its first token on, by one worker after the other until one succeeds."""
        for address in self._decode:
            try:
                async for line in self._lines(address, job):
                    event = _event(line)
                    inbox.put_nowait(event)
                    if event.finish_reason is not None:
                        return
            except _Failed:
                pass
            except RequestError as error:
                inbox.put_nowait(error)
                return
            self._decode.set_aside(address)
        inbox.put_nowait(BackendError(f"none of the {len(self._decode.addresses)} decode workers answers"))

    async def _lines(self, address: str, job: Job) -> AsyncIterator[dict[str, Any]]:
        """What a worker says. Raises `_Failed` when it dies, `RequestError` when it refuses the job."""
        try:
            async with self._http().stream("POST", address + GENERATE, json=job.to_json()) as response:
                if response.status_code != 200:
                    raise _Failed(f"{address} answers {response.status_code}")
                async for text in response.aiter_lines():
                    line = json.loads(text)
                    if "refused" in line:
                        raise RequestError(line["refused"])
                    if "failed" in line:
                        raise _Failed(line["failed"])
                    yield line
        except (httpx2.HTTPError, json.JSONDecodeError) as error:
            raise _Failed(f"{address}: {error}") from error

    def _http(self) -> httpx2.AsyncClient:
        """Made where it is used: it belongs to one event loop."""
        if self._client is None:
            timeout = httpx2.Timeout(_SILENCE_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
            self._client = httpx2.AsyncClient(timeout=timeout, limits=httpx2.Limits(max_connections=None))
        return self._client


def _event(line: dict[str, Any]) -> Event:
    return Event(**line)
