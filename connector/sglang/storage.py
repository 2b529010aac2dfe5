"""SGLang's storage interface, each call handed to the pools concerned. No policy here.

Written for SGLang 0.5.23's ``HiCacheStorage``. Nothing here raises because of the cache: trouble is a miss.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from cachesvc.connector.payloads import Pieces
from cachesvc.connector.sglang.hits import find_hits
from cachesvc.connector.sglang.identity import namespace_of, revision_of, shard_of
from cachesvc.connector.sglang.pools import PageBuffers, PageStore, quietly
from cachesvc.connector.sglang.settings import parse_settings
from cachesvc.connector.stats import CacheStats
from cachesvc.connector.weights import nobody_elses

logger = logging.getLogger("cachesvc.connector")

FLAT = "flat"
"""Pages that SGLang copies together itself: those of the first interface, without pointers."""


class CacheStorage(HiCacheStorage):
    """Where a pool's pages cannot be stored, it says so once and every look-up of them is a miss.

    Raises `ValueError` for options that make no sense: that is found out when the engine starts.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._config = storage_config
        self._settings = parse_settings(storage_config.extra_config)
        self._revision = revision_of(storage_config, self._settings)
        self._lock = threading.Lock()
        self._buffers: dict[str, PageBuffers | None] = {}
        self._stores: dict[tuple[str, int], PageStore] = {}
        self.registered_pools: dict[str, Any] = {}
        self._by_pointer = bool((storage_config.extra_config or {}).get("interface_v1", 0))
        self._flat_bytes = 0
        self._closed = False
        atexit.register(self.close)

    # Pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool_name, host_pool)

    def _register(self, name: Any, pool: Any) -> None:
        """Attaches its namespace too, so that the first look-up can hit."""
        self.registered_pools[str(name)] = pool
        if str(name) == str(PoolName.KV) and not self._by_pointer:
            self._flat_bytes = _size(pool.get_dummy_flat_data_page())
            self._flat(self._flat_bytes).cache.ready(self._settings.options.match_deadline_s)
            return
        if getattr(pool, "kv_buffer", pool) is None:  # a pool without pages of its own: others stand for it
            self._buffers[str(name)] = None
            return
        try:
            self._buffers[str(name)] = PageBuffers(pool)
        except (ValueError, AttributeError, NotImplementedError) as error:
            logger.warning("pages of pool %s are not stored: %s", name, error)
            self._buffers[str(name)] = None
            return
        store = self._pages(name)
        if store is not None:
            store.cache.ready(self._settings.options.match_deadline_s)

    def _pages(self, name: Any) -> PageStore | None:
        buffers = self._buffers.get(str(name))
        return None if buffers is None else self._store(str(name), buffers.payload_bytes, "pages")

    def _kv(self) -> PageStore | None:
        """Where the KV pages are, by the interface that SGLang was told to use."""
        if self._by_pointer:
            return self._pages(PoolName.KV)
        return self._flat(self._flat_bytes) if self._flat_bytes else None

    def _flat(self, size: int) -> PageStore:
        return self._store(str(PoolName.KV), size, FLAT)

    def _store(self, name: str, payload_bytes: int, form: str) -> PageStore:
        with self._lock:
            if self._closed:
                raise RuntimeError("this storage is closed")
            known = self._stores.get((f"{name} {form}", payload_bytes))
            if known is None:
                config, pool = self._config, self.registered_pools.get(name)
                namespace = namespace_of(config, self._revision, name, pool, form)
                counted = name == str(PoolName.KV) and not (config.tp_rank or config.pp_rank or config.attn_cp_rank)
                known = PageStore(namespace, payload_bytes, shard_of(config, name), self._settings, counted=counted)
                self._stores[f"{name} {form}", payload_bytes] = known
                logger.info(
                    "cachesvc: namespace %s of pool %s, %d bytes per page of %d tokens, shard %d of %d",
                    namespace.digest.hex()[:16],
                    name,
                    payload_bytes,
                    namespace.block_tokens,
                    shard_of(config, name),
                    namespace.shards,
                )
            return known

    # Pages by pointer

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        def ask() -> int:
            store = self._kv()
            return store.leading(keys) if store is not None else 0

        return int(quietly("a look-up", ask, 0))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._get(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._set(PoolName.KV, keys, host_indices)

    def _get(self, name: Any, keys: list[str], host_indices: Any) -> list[bool]:
        def load() -> int:
            store, buffers = self._pages(name), self._buffers.get(str(name))
            return store.load(keys, buffers.of(host_indices, len(keys))) if store and buffers and keys else 0

        loaded = quietly("a load", load, 0)
        return [index < loaded for index in range(len(keys))]

    def _set(self, name: Any, keys: list[str], host_indices: Any) -> list[bool]:
        def save() -> list[bool]:
            store, buffers = self._pages(name), self._buffers.get(str(name))
            if not store or not buffers:
                return [False] * len(keys)
            return store.store(keys, buffers.of(host_indices, len(keys)) if keys else [])

        return list(quietly("a save", save, [False] * len(keys)))

    # Several pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        def ask() -> PoolTransferResult:
            anchored = getattr(getattr(self, "mem_pool_host", None), "kv_buffer", self) is not None
            kv = self._kv() if anchored else None
            if anchored and kv is None:
                return PoolTransferResult.empty()
            return find_hits(keys, kv, pool_transfers or [], self._pages)

        result: PoolTransferResult = quietly("a look-up", ask, PoolTransferResult.empty())
        return result

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._get(t.name, list(t.keys or ()), t.host_indices) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._set(t.name, list(t.keys or ()), t.host_indices) for t in transfers}

    # The first interface: pages as tensors

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[torch.Tensor | None] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        targets = list(target_locations or ())
        if len(targets) != len(keys) or not all(_usable(target) for target in targets):
            return [None] * len(keys)

        def load() -> int:
            return (
                self._flat(_size(targets[0])).load(list(keys), [_pieces(target) for target in targets]) if keys else 0
            )

        loaded = quietly("a load", load, 0)
        return [target if index < loaded else None for index, target in enumerate(targets)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        sources = [value.contiguous() if value is not None else None for value in values or ()]
        if len(sources) != len(keys) or not all(_usable(source) for source in sources):
            return False

        def save() -> list[bool]:
            return self._flat(_size(sources[0])).store(list(keys), [_pieces(source) for source in sources])

        return not keys or all(quietly("a save", save, [False]))

    def exists(self, key: str) -> bool:
        def ask() -> bool:
            store = self._kv()
            return store is not None and store.present([key])[0]

        return bool(quietly("a look-up", ask, False))

    # All of it

    def clear(self) -> bool:
        """Nothing stored so far is found any more, by this engine: it goes on in namespaces that nobody else has. What
        other engines have stored stays theirs."""
        self._revision = nobody_elses()
        self._close_stores()
        return True

    def get_stats(self) -> Any:
        """None: SGLang's own numbers of L3 traffic come from its controller; ours from `cache_stats` and the daemon."""
        return None

    @property
    def cache_stats(self) -> dict[str, CacheStats]:
        """Numbers by pool."""
        with self._lock:
            return {name: store.cache.stats for (name, _), store in self._stores.items()}

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._close_stores()

    def _close_stores(self) -> None:
        with self._lock:
            stores, self._stores = list(self._stores.values()), {}
        for store in stores:
            quietly("closing", store.close, None)


def _usable(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_contiguous() and tensor.device.type == "cpu"


def _size(tensor: torch.Tensor | None) -> int:
    assert tensor is not None
    return tensor.numel() * tensor.element_size()


def _pieces(tensor: torch.Tensor | None) -> Pieces:
    assert tensor is not None
    return Pieces([(tensor.data_ptr(), _size(tensor))])
