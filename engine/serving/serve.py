"""One process of the engine: a worker for prompts, for answers, for both with the HTTP front, or a front alone."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import torch
import uvicorn
from starlette.types import ASGIApp

from cachesvc.connector.base import BasePrefixCache
from cachesvc.connector.prefix_cache import NullPrefixCache, PrefixCache
from cachesvc.engine.cache import block_layout, cache_namespace
from cachesvc.engine.engine import Engine, EngineConfig
from cachesvc.engine.errors import EngineError
from cachesvc.engine.handoff import HANDOFF_CLASS, handoff_namespace, record_bytes
from cachesvc.engine.models.config import read_json
from cachesvc.engine.models.loading import load_model
from cachesvc.engine.serving.chat import Chat
from cachesvc.engine.serving.openai import OpenAIServer
from cachesvc.engine.serving.router import Router
from cachesvc.engine.serving.thread import EngineThread
from cachesvc.engine.serving.worker import worker_app

Role = Literal["both", "prefill", "decode", "front"]
ROLES: Final[tuple[Role, ...]] = ("both", "prefill", "decode", "front")
_READY_TIMEOUT_S: Final = 5.0


class ServeError(EngineError):
    """The process cannot serve: an address that is taken, a role without what it needs."""


@dataclass(frozen=True)
class ServeSettings:
    """`prefill` and `decode` are the workers of a front, as URLs. `cache` None: the daemon's usual address."""

    model: Path
    role: Role = "both"
    host: str = "127.0.0.1"
    port: int = 8000
    cache: str | None = None
    no_cache: bool = False
    traffic_class: str = "agent"
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(async_scheduling=True))
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


def serve(settings: ServeSettings) -> None:
    """Serves until it is told to stop. Raises `EngineError` when it cannot begin."""
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(settings.host, settings.port))
        app = stack.enter_context(_app(settings))
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
        port = listener.getsockname()[1]
        print(f"{settings.role}: {settings.model.name} on http://{settings.host}:{port}", flush=True)
        uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(128)  # whoever is told the address may come at once
        except OSError as error:
            raise ServeError(f"cannot listen on {host}:{port}: {error}; choose another --port") from error
        yield listener


@contextmanager
def _app(settings: ServeSettings) -> Iterator[ASGIApp]:
    name, path = settings.model.name, settings.model
    if settings.role == "front":
        try:
            router = Router(list(settings.prefill), list(settings.decode))
        except ValueError as error:
            raise ServeError(f"{error}: give --prefill URL and --decode URL") from error
        context = int(read_json(path)["max_position_embeddings"])
        yield OpenAIServer(router, Chat(path, name), model=name, context=context).app
        return
    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
    dtype = getattr(torch, settings.dtype)
    model = load_model(path, dtype=dtype, device=settings.device)
    caches: list[BasePrefixCache] = []
    try:
        if settings.no_cache:
            caches = [NullPrefixCache()]
        else:
            layout = block_layout(model.config, dtype, settings.engine.windows)
            namespace = cache_namespace(
                path, model.config, dtype, windows=settings.engine.windows, replay=settings.engine.replay
            )
            address = settings.cache
            caches.append(
                PrefixCache(
                    namespace,
                    layout.payload_bytes,
                    address=address,
                    traffic_class=settings.traffic_class,
                    checkpoint_bytes=layout.checkpoint_bytes,
                )
            )
            if settings.role in ("prefill", "decode"):
                records = handoff_namespace(namespace)
                size = record_bytes(layout)
                caches.append(PrefixCache(records, size, address=address, traffic_class=HANDOFF_CLASS))
            for cache in caches:
                if not cache.ready(_READY_TIMEOUT_S):
                    logging.getLogger("cachesvc.engine").warning("the cache does not answer yet; going on without it")
        engine = Engine(model, caches[0], settings.engine, handoffs=caches[1] if len(caches) > 1 else None)
        thread = EngineThread(engine)
        try:
            if settings.role == "both":
                context = model.config.max_position_embeddings
                yield OpenAIServer(thread, Chat(path, name), model=name, context=context).app
            else:
                yield worker_app(thread, caches)
        finally:
            thread.close()
    finally:
        for cache in caches:
            cache.close()
