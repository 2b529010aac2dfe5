"""The engine on a thread of its own, for callers in an event loop."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Final

from cachesvc.engine.engine import Engine
from cachesvc.engine.errors import RequestError
from cachesvc.engine.request import RequestOutput
from cachesvc.engine.serving.backend import BackendError, BusyError, Event, Job

MAX_REQUESTS: Final = 1024
"""Requests in the engine, running or waiting. One more is refused."""

_STOP_TIMEOUT_S: Final = 30.0


@dataclass
class _Client:
    """Who waits for a request's tokens."""

    job: Job
    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[Event | Exception] = field(default_factory=asyncio.Queue)
    sent: int = 0

    def put(self, item: Event | Exception) -> None:
        """From the engine's thread. A loop that is gone wants nothing any more."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.inbox.put_nowait, item)


class EngineThread:
    """A backend in this process. Nothing else may use the engine from now on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[tuple[str, _Client | None]] = queue.SimpleQueue()
        self._clients: dict[str, _Client] = {}
        self._numbers = itertools.count()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, job: Job) -> AsyncGenerator[Event, None]:
        if not self._thread.is_alive():
            raise BackendError("the engine has stopped; restart the server")
        if len(self._clients) >= MAX_REQUESTS:
            raise BusyError(f"{MAX_REQUESTS} requests are waiting already; try again later")
        name = f"job-{next(self._numbers)}"
        client = self._clients[name] = _Client(job, asyncio.get_running_loop())
        self._commands.put((name, client))
        try:
            while True:
                item = await client.inbox.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._clients.pop(name, None)
            self._commands.put((name, None))

    async def healthy(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Aborts what runs and ends the thread."""
        self._stopping = True
        self._commands.put(("", None))
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if self._engine.has_requests:
                    for output in self._engine.step():
                        self._deliver(output)
            self._engine.close()
        finally:
            # Whatever ended the thread: nobody may wait for it for ever.
            for client in list(self._clients.values()):
                client.put(BackendError("the engine has stopped; restart the server"))

    def _take_commands(self) -> None:
        """All that wait; the thread sleeps here while there is nothing to do."""
        wait = not self._engine.has_requests
        while True:
            try:
                name, client = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if client is not None:
                self._add(name, client)
            elif name:
                self._engine.abort(name)

    def _add(self, name: str, client: _Client) -> None:
        job = client.job
        try:
            self._engine.add_request(
                job.tokens,
                job.params,
                request_id=name,
                traffic_class=job.traffic_class,
                salt=job.salt,
                publish_as=job.publish_as,
                receive=job.receive,
            )
        except RequestError as error:
            client.put(error)

    def _deliver(self, output: RequestOutput) -> None:
        client = self._clients.get(output.request_id)
        if client is None:
            return
        while client.sent < len(output.tokens):
            last = client.sent + 1 == len(output.tokens)
            client.put(
                Event(
                    index=client.sent,
                    token=output.tokens[client.sent],
                    finish_reason=output.finish_reason if last else None,
                    hit_tokens=None if output.handed_over else output.hit_tokens,
                    replayed_tokens=output.replayed_tokens,
                )
            )
            client.sent += 1
