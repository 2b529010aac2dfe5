"""One load under way: blocks of one shard and lease, from the arena if it is mapped, else fetched."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cachesvc.connector.base import Scatter
from cachesvc.connector.buffers import LoadBuffers
from cachesvc.connector.client import Client
from cachesvc.connector.errors import BlockMissing, CacheError, NotAttached, TimedOut
from cachesvc.connector.link import Link
from cachesvc.connector.loading import BlockReader, BulkReader, Reader, SlotReader, Stream
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.passes import Lease, Pass
from cachesvc.rpc import cache_pb2 as pb

logger = logging.getLogger("cachesvc.connector")


class Loading:
    """Blocks `first` to `end` (exclusive) of a lease: what came so far, from whichever reader."""

    def __init__(self, p: Pass, lease: Lease, first: int, end: int) -> None:
        self.p = p
        self.lease = lease
        self.first = self.loaded = first
        self.end = end
        self.started = time.monotonic()
        self.error: CacheError | None = None
        self.idle_s = 0.0

    @property
    def arena_is_full(self) -> bool:
        """The daemon has no room to bring the next block into its arena; it can still be fetched."""
        return isinstance(self.error, BlockMissing) and self.error.miss == pb.LOAD_ERROR and not self.p.finished

    def run(self, reader: Reader, scatter: Scatter) -> None:
        """Hands what `reader` brings to the engine. What `scatter` raises goes to the caller."""
        with self.p.lock:
            self.p.reader = reader
            if self.p.finished:
                reader.cancel()
        try:
            for index, payloads in reader.batches():
                scatter(index, payloads)
                if not reader.still_good():
                    break
                self.loaded = index + len(payloads)
        finally:
            reader.cancel()
            self.p.reader = None
            self.error, self.idle_s = reader.error, reader.idle_s


class Loader:
    """Loads of one shard, whose payloads have one size. Thread-safe."""

    def __init__(self, client: Client, link: Link, options: CacheOptions, shard: int, payload_bytes: int) -> None:
        self._client = client
        self._link = link
        self._options = options
        self._shard = shard
        self._payload_bytes = payload_bytes
        self._buffers = LoadBuffers(payload_bytes, options.load_batch_bytes, options.load_buffers_kept)

    def bring(self, loading: Loading, scatter: Scatter, *, copy_first: bool = False) -> None:
        """See `SlotReader` for `copy_first`. Trouble is in `loading.error`."""
        if loading.lease.match.arena is not None:
            self._from_arena(loading, scatter, copy_first=copy_first)
        if loading.lease.match.arena is None or loading.arena_is_full:
            self._by_get(loading, scatter)

    def _from_arena(self, loading: Loading, scatter: Scatter, *, copy_first: bool) -> None:
        match = loading.lease.match
        loading.run(
            SlotReader(
                partial(self._client.load, match, self._shard),
                match,
                payload_bytes=self._payload_bytes,
                first=loading.loaded,
                end=loading.end,
                batch_blocks=max(1, self._options.load_batch_bytes // self._payload_bytes),
                deadline_s=self._options.load_deadline_s,
                copy_first=copy_first,
            ),
            scatter,
        )

    def _by_get(self, loading: Loading, scatter: Scatter) -> None:
        try:
            slots = self._buffers.take()
        except OSError as error:
            loading.error = CacheError(f"no memory for loading: {error}")
            logger.error("%s", loading.error)
            return
        first, end = loading.loaded, loading.end
        begin = partial(self._begin_get, loading)
        reader: Reader
        if self._client.has_bulk:
            reader = BulkReader(partial(begin, self._client.bulk_get), slots, first=first, end=end)
        else:
            boot_id = loading.lease.attachment.boot_id
            reader = BlockReader(partial(begin, self._client.get), slots, first=first, end=end, boot_id=boot_id)
        try:
            loading.run(reader, scatter)
        finally:
            self._buffers.give(slots)

    def _begin_get(self, loading: Loading, get: Callable[..., Stream]) -> Any:
        attachment, lease, first = self._link.current(), loading.lease, loading.loaded
        if attachment is None or attachment.boot_id != lease.attachment.boot_id:
            raise NotAttached("Get: the lease is of a daemon that is gone")
        remaining = loading.started + self._options.load_deadline_s - time.monotonic()
        if remaining <= 0:
            raise TimedOut("Get: the load has taken too long before it")
        return get(lease.match.lease_id, self._shard, first=first, count=loading.end - first, deadline_s=remaining)
