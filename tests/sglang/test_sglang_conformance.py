"""The conformance suite on SGLang's storage interface: an engine that computes pages, fetches and backs up as SGLang
does."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from host_pools import HostPool
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo
from test_sglang import config_of

from cachesvc.connector.conformance import Answer, Driver, Engine, check
from cachesvc.connector.sglang import CacheStorage

PAGE = 64


class SGLang(Driver):
    block_tokens = PAGE

    def open(self, address: str) -> Engine:
        options = {"match_deadline_s": 0.5, "load_deadline_s": 1.0, "save_deadline_s": 2.0, "breaker_max_s": 0.5}
        return Opened(CacheStorage(config_of(address, options=options)))


class Opened(Engine):
    """KV of a page is made from its name, so what is fetched can be told from what should have been computed."""

    def __init__(self, storage: CacheStorage) -> None:
        self._storage = storage
        self._pool = HostPool(pages=64, page_size=PAGE, layout="page_first")
        storage.register_mem_pool_host(self._pool)

    def run(
        self, prompts: Sequence[Sequence[int]], *, salt: str = "", abort: Mapping[int, int] | None = None
    ) -> list[Answer]:
        return [self._one(list(prompt), salt) for prompt in prompts]

    def _one(self, prompt: list[int], salt: str) -> Answer:
        names, last = [], salt.encode()
        for start in range(0, len(prompt) - PAGE, PAGE):
            last = hashlib.sha256(last + repr(prompt[start : start + PAGE]).encode()).digest()
            names.append(last.hex())
        self._pool.kv_buffer.zero_()
        found = self._storage.batch_exists(names, HiCacheStorageExtraInfo())
        got = self._storage.batch_get_v1(names[:found], self._pool.indices(*range(found))) if found else []
        pages = got.index(False) if False in got else len(got)
        for page in range(pages, len(names)):
            self._pool.fill(page, int(names[page][:8], 16))
        if len(names) > pages:
            new = range(pages, len(names))
            self._storage.batch_set_v1(names[pages:], self._pool.indices(*new))
        content = b"".join(self._pool.content(page) for page in range(len(names)))
        return Answer(hashlib.sha256(content).hexdigest(), pages * PAGE)

    def close(self) -> None:
        self._storage.close()


@pytest.mark.timeout(600)
def test_every_rule_holds(tmp_path: Path) -> None:
    assert [(result.rule, result.violation) for result in check(SGLang(), tmp_path) if result.violation] == []
