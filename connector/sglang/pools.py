"""Pages of one of SGLang's host pools: looked up, loaded straight into the pool, stored straight out of it.

A page is a block of a namespace of its own. On the daemon's host its bytes are copied once in each direction, between
the arena and the pool: SGLang calls from threads of its own, and keeps the pages as they are until a call returns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from cachesvc.connector.passes import KeyedPass
from cachesvc.connector.payloads import Pieces, addresses_of
from cachesvc.connector.sglang.identity import keys_of, page_tokens
from cachesvc.connector.sglang.settings import Settings
from cachesvc.connector.split import SplitPrefixCache
from cachesvc.keys import Namespace

logger = logging.getLogger("cachesvc.connector")

MAX_PROBES: Final = 512
"""Pages that are asked for one by one in a call; the rest count as missing."""


class PageBuffers:
    """Where the pages of a host pool lie. Raises `ValueError` for a pool that does not say."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.tokens = page_tokens(pool)
        self.payload_bytes = self.of(torch.arange(self.tokens), 1)[0].nbytes
        if self.payload_bytes <= 0:
            raise ValueError("its pages are empty")

    def of(self, host_indices: Any, pages: int) -> list[Pieces]:
        """Raises `ValueError` when there are not as many pages as keys."""
        if host_indices is None or len(host_indices) != pages * self.tokens:
            given = 0 if host_indices is None else len(host_indices)
            raise ValueError(f"{given} host indices for {pages} pages of {self.tokens}")
        pointers, sizes = self._pool.get_page_buffer_meta(host_indices)
        pieces, rest = divmod(len(pointers), pages)
        if rest or not pieces or len(sizes) != len(pointers):
            raise ValueError(f"{len(pointers)} buffers and {len(sizes)} sizes for {pages} pages")
        whole = list(zip(map(int, pointers), map(int, sizes), strict=True))
        return [Pieces(whole[start : start + pieces]) for start in range(0, len(whole), pieces)]


class PageStore:
    """Thread-safe: SGLang fetches and backs up in threads of their own."""

    def __init__(
        self, namespace: Namespace, payload_bytes: int, shard: int, settings: Settings, *, counted: bool
    ) -> None:
        """`counted`: its look-ups enter the daemon's accounts; one rank and one pool of an engine do."""
        self._counted = counted
        self.namespace = namespace
        self.payload_bytes = payload_bytes
        self.cache = SplitPrefixCache(
            namespace,
            payload_bytes,
            address=settings.address,
            traffic_class=settings.traffic_class,
            options=settings.options,
            shard=shard,
        )
        self._wait_s = settings.options.match_deadline_s
        self._kept = settings.lookups_kept
        self._found: OrderedDict[bytes, KeyedPass] = OrderedDict()
        self._lock = threading.Lock()

    def leading(self, hashes: list[str]) -> int:
        """How many pages of this chain are stored, from the first on. They stay readable for a while, for `load`."""
        if not hashes:
            return 0
        keys = keys_of(self.namespace, hashes)
        p = self._look_up(keys, counted=True)
        pages = p.hit_tokens // self.namespace.block_tokens
        if not pages:
            self.cache.finish(p)
            return 0
        with self._lock:
            old = self._found.pop(keys[0], None)
            self._found[keys[0]] = p
            stale = [old] if old is not None else []
            if len(self._found) > self._kept:
                stale.append(self._found.popitem(last=False)[1])
        for other in stale:
            self.cache.finish(other)
        return pages

    def present(self, hashes: Sequence[str]) -> list[bool]:
        """Which of these pages are stored; not a chain, so each is asked for. The last `MAX_PROBES` only."""
        keys = keys_of(self.namespace, list(hashes))
        there = [False] * len(keys)
        deadline = time.monotonic() + self._wait_s
        index = max(0, len(keys) - MAX_PROBES)
        while index < len(keys) and time.monotonic() < deadline:
            p = self._look_up(keys[index:], counted=False)
            run = p.hit_tokens // self.namespace.block_tokens
            self.cache.finish(p)
            there[index : index + run] = [True] * run
            index += run + 1
        return there

    def load(self, hashes: list[str], pieces: Sequence[Pieces]) -> int:
        """Fills pages in order; returns how many, from the first on."""
        if not hashes:
            return 0
        keys = keys_of(self.namespace, hashes)
        with self._lock:
            p = self._found.pop(keys[0], None)
        if p is None or p.keys[: len(keys)] != keys:
            if p is not None:
                self.cache.finish(p)
            p = self._look_up(keys, counted=True)

        def scatter(first: int, payloads: Sequence[memoryview]) -> None:
            for target, address in zip(pieces[first:], addresses_of(payloads), strict=False):
                target.fill_from(address)

        try:
            wanted = len(keys) * self.namespace.block_tokens
            p.trimmed, p.hit_tokens = p.hit_tokens > wanted, min(p.hit_tokens, wanted)
            return self.cache.load(p, scatter) // self.namespace.block_tokens
        finally:
            self.cache.finish(p)

    def store(self, hashes: list[str], pieces: Sequence[Pieces]) -> list[bool]:
        return self.cache.store_now(keys_of(self.namespace, hashes), pieces) if hashes else []

    def close(self) -> None:
        with self._lock:
            found, self._found = list(self._found.values()), OrderedDict()
        for p in found:
            self.cache.finish(p)
        self.cache.close()

    def _look_up(self, keys: list[bytes], *, counted: bool) -> KeyedPass:
        """Settled. One token more than the pages have: that which every engine computes itself."""
        tokens = len(keys) * self.namespace.block_tokens + 1
        p = self.cache.begin_keys(keys, tokens, pass_id=None)
        p.counted = counted and self._counted
        self.cache.look_up(p)
        self.cache.wait(p, self._wait_s)
        self.cache.poll(p)
        return p


def quietly(what: str, call: Callable[[], Any], otherwise: Any) -> Any:
    """What goes wrong in here is a miss, and does not reach SGLang."""
    try:
        return call()
    except Exception:
        logger.exception("%s failed", what)
        return otherwise
