"""Handing a prompt from the engine that has computed it to the engine that goes on, through the cache.

Full blocks travel as always: the one engine saves them as they become full, the other loads them while the first still
computes. What blocks do not hold travels in one *record*: the unfinished last block of what is stored, the windows that
are not, and the first token, with what is needed to see that it belongs to this prompt. Sampling has no state beyond
that: the random number of a token follows from its request's seed and its place.

Records have a namespace of their own and a traffic class of their own, `handoff`, which the daemon is given with a
short TTL (``--class handoff=10m``). A record that does not come, comes late or is not right is no error: what has been
loaded by then is kept, and the rest is computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch

from cachesvc.connector.base import BasePrefixCache
from cachesvc.connector.layout import BlockLayout, KVGroup
from cachesvc.connector.passes import Pass
from cachesvc.engine.kv import PagePool
from cachesvc.engine.request import Request
from cachesvc.kernels import BlockKernels
from cachesvc.keys import BLOCK_TOKENS, Namespace

HANDOFF_CLASS: Final = "handoff"
_HEADER_BYTES: Final = 4096
_PUBLISH_WAIT_S: Final = 0.5


def handoff_namespace(namespace: Namespace) -> Namespace:
    """Records of engines whose blocks are in `namespace`."""
    return replace(namespace, layout={**namespace.layout, "handoff": 1})


def record_bytes(layout: BlockLayout) -> int:
    """Size of a record of a model with this layout."""
    return _HEADER_BYTES + sum(group.bytes_of(_span(group)) for group in layout.groups)


@dataclass(frozen=True)
class Handed:
    """What a record says."""

    tokens: int
    first_token: int


class HandoffStore:
    """Writes and reads records; both directions work on the pages of one request."""

    def __init__(self, cache: BasePrefixCache, layout: BlockLayout, pool: PagePool, kernels: BlockKernels) -> None:
        self._cache = cache
        self._layout = layout
        self._pool = pool
        self._kernels = kernels

    @property
    def cache(self) -> BasePrefixCache:
        return self._cache

    def publish(self, handoff: str, request: Request) -> None:
        """Stores the state of `request`, whose prompt is computed and whose first token is known, as `handoff`."""
        prompt = request.tokens[: request.input_tokens]
        header = {
            "tokens": len(prompt),
            "first_token": request.tokens[request.input_tokens],
            "digest": _digest(prompt, request),
        }

        def gather(_: int, payloads: Sequence[memoryview]) -> None:
            text = json.dumps(header).encode()
            payloads[0][: len(text) + 1] = text + b"\0"
            for layers, slots, part in self._parts(request, len(prompt), payloads[0]):
                self._kernels.gather(layers, slots, [part])

        p = self._begin(handoff)
        # The look-up makes the key; nothing can be saved while it does.
        self._cache.wait(p, _PUBLISH_WAIT_S)
        self._cache.save(p, BLOCK_TOKENS, gather)
        self._cache.finish(p)

    def ask(self, handoff: str) -> Pass:
        """Begins to look for a record."""
        return self._begin(handoff)

    def take(self, p: Pass, request: Request) -> Handed | None:
        """What a settled pass has found: loads it into the request's pages. None when it is not there, or not right."""
        found: list[Handed] = []

        def scatter(_: int, payloads: Sequence[memoryview]) -> None:
            header = _header(payloads[0])
            if header is None or header["tokens"] != request.input_tokens:
                return
            if header["digest"] != _digest(request.tokens[: request.input_tokens], request):
                return
            for layers, slots, part in self._parts(request, header["tokens"], payloads[0]):
                self._kernels.scatter([part], layers, slots)
            found.append(Handed(header["tokens"], header["first_token"]))

        loaded = self._cache.load(p, scatter) if p.hit_tokens else 0
        return found[0] if loaded and found else None

    def _begin(self, handoff: str) -> Pass:
        return self._cache.begin(_name(handoff), traffic_class=HANDOFF_CLASS, counted=False)

    def _parts(
        self, request: Request, tokens: int, payload: memoryview
    ) -> list[tuple[list[torch.Tensor], torch.Tensor, memoryview]]:
        """For each group its layers, the slots of what the record holds of it, and where in the payload that lies."""
        parts, offset = [], _HEADER_BYTES
        for index, group in enumerate(self._layout.groups):
            start = tokens - tokens % BLOCK_TOKENS
            if group.policy != "every_block":
                start = max(0, tokens - _span(group))
            stop = tokens - tokens % group.tokens_per_record
            size = group.bytes_of(stop - start)
            if size:
                slots = request.table.records(start, stop, group.tokens_per_record)
                parts.append((self._pool.layers(index), slots, payload[offset : offset + size]))
            offset += group.bytes_of(_span(group))
        return parts


def _span(group: KVGroup) -> int:
    """Tokens of a group in a record: the unfinished block of what is stored, the window of what is not."""
    return BLOCK_TOKENS if group.policy == "every_block" or group.window is None else group.window


def _name(handoff: str) -> list[int]:
    """Tokens whose first block stands for `handoff`, and one more, since a hit always leaves one to compute."""
    digest = hashlib.sha256(handoff.encode()).digest()
    return [byte for byte in digest for _ in range(BLOCK_TOKENS // len(digest))] + [0]


def _digest(prompt: Sequence[int], request: Request) -> str:
    """Of everything that decides what a first token is: the record of another request must not be taken for it."""
    params = asdict(request.params) | {"max_new_tokens": 0}
    text = json.dumps([list(prompt), params, request.salt.hex()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _header(payload: memoryview) -> dict[str, Any] | None:
    text = bytes(payload[:_HEADER_BYTES]).split(b"\0")[0]
    try:
        header = json.loads(text)
    except ValueError:
        return None
    wanted = {"tokens": int, "first_token": int, "digest": str}
    good = isinstance(header, dict) and all(isinstance(header.get(name), kind) for name, kind in wanted.items())
    return header if good else None
