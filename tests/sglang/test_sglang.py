"""The storage backend, loaded by SGLang's real factory, behind its real failure injector, and beside its file
backend."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Client, Daemon, wait_until
from host_pools import HostPool, anchor_without_pages
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from cachesvc.connector.sglang import CacheStorage


def hashes_of(seed: object, pages: int) -> list[str]:
    """Page names as SGLang makes them: each hashes all before it."""
    made, last = [], repr(seed).encode()
    for page in range(pages):
        last = hashlib.sha256(last + page.to_bytes(4, "little")).digest()
        made.append(last.hex())
    return made


def config_of(address: str, v1: bool = True, **changes: Any) -> HiCacheStorageConfig:
    fields: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "tiny/model",
    }
    revision = changes.pop("revision", "1")
    options = changes.pop("options", {})
    extra = {
        "backend_name": "cachesvc",
        "module_path": "cachesvc.connector.sglang",
        "class_name": "CacheStorage",
        "interface_v1": int(v1),
        "cachesvc": {"address": address, "revision": revision, "failed_hit_s": 0.2, "breaker_max_s": 0.3, **options},
    }
    return HiCacheStorageConfig(**fields | changes, extra_config=extra)


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Backends as SGLang makes them, with a host pool registered. On a daemon of the test's own, if it has one."""
    alone = "daemon" in request.fixturenames
    daemon: Daemon = request.getfixturevalue("daemon" if alone else "shared_daemon")
    made: list[Any] = []

    def make(pool: HostPool | None, config: HiCacheStorageConfig | None = None, **changes: Any) -> Any:
        config = config or config_of(daemon.address, **changes)
        backend = StorageBackendFactory.create_backend("dynamic", config, pool)
        if pool is not None:
            backend.register_mem_pool_host(pool)
            backend.on_host_pools_registered()
        made.append(backend)
        return backend

    yield make
    for backend in made:
        getattr(backend, "_backend", backend).close()


def small(**changes: Any) -> HostPool:
    return HostPool(**{"layout": "page_first", **changes})


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("planes", [1, 2])
def test_pages_come_back_byte_by_byte(make: Callable[..., Any], layout: str, page_size: int, planes: int) -> None:
    shape = {"layout": layout, "page_size": page_size, "planes": planes, "pages": 24}
    writer, reader = small(**shape), small(**shape)
    hashes = hashes_of((layout, page_size, planes), 12)
    for page in range(12):
        writer.fill(page, page)
    storing, loading = make(writer), make(reader)
    assert isinstance(storing, CacheStorage)
    assert storing.batch_exists(hashes) == 0
    assert storing.batch_set_v1(hashes, writer.indices(*range(12))) == [True] * 12
    assert loading.batch_exists(hashes) == 12
    order = list(range(12, 24))
    random.Random(0).shuffle(order)
    assert loading.batch_get_v1(hashes, reader.indices(*order)) == [True] * 12
    for page, target in enumerate(order):
        assert reader.content(target) == writer.content(page)


def test_a_hit_ends_at_the_first_missing_page(make: Callable[..., Any]) -> None:
    pool = small()
    backend = make(pool)
    hashes = hashes_of("holes", 10)
    assert backend.batch_set_v1(hashes[:4], pool.indices(*range(4))) == [True] * 4
    assert backend.batch_set_v1(hashes[5:], pool.indices(*range(5, 10))) == [True] * 5
    assert backend.batch_exists(hashes) == 4
    assert [backend.exists(name) for name in hashes] == [True] * 4 + [False] + [True] * 5
    assert backend.batch_get_v1(hashes, pool.indices(*range(20, 30))) == [True] * 4 + [False] * 6
    assert backend.batch_exists(hashes[5:]) == 5  # a chain that begins in the middle, where a prefix is local
    assert backend.batch_exists([]) == 0 and backend.batch_get_v1([], torch.empty(0, dtype=torch.int64)) == []


def test_a_prefix_shorter_than_what_was_found_is_enough(make: Callable[..., Any], daemon: Daemon) -> None:
    """Ranks agree on the least: SGLang then fetches fewer pages than this rank has found."""
    pool = small()
    backend = make(pool)
    hashes = hashes_of("trim", 8)
    for page in range(8):
        pool.fill(page, page)
    backend.batch_set_v1(hashes, pool.indices(*range(8)))
    assert backend.batch_exists(hashes) == 8
    assert backend.batch_get_v1(hashes[:5], pool.indices(*range(20, 25))) == [True] * 5
    assert [pool.content(20 + page) for page in range(5)] == [pool.content(page) for page in range(5)]
    with Client(daemon.address) as client:
        wait_until(lambda: sum(sum(row.hit_tokens.values()) for row in client.report().lookups) == 5 * 16)
        misses = {reason for row in client.report().lookups for reason, tokens in row.miss_tokens.items() if tokens}
    assert 6 not in misses  # LOAD_ERROR


def test_what_the_file_backend_does_in_the_same_calls(make: Callable[..., Any], tmp_path: Path) -> None:
    """Random calls on both, in SGLang's first interface and in the one for several pools."""
    pool, other = small(), small(width=4)
    ours = make(pool, v1=False)
    config = config_of("unix:/nowhere")
    theirs = HiCacheFile(config, str(tmp_path / "files"))
    theirs.register_mem_pool_host(pool)
    for backend in (ours, theirs):
        backend.register_mem_host_pool_v2(pool, PoolName.KV)
        backend.register_mem_host_pool_v2(other, PoolName.INDEXER)
        backend.register_mem_host_pool_v2(other, PoolName.SWA)
    source = random.Random(3)
    chains = [hashes_of(("both", number), 12) for number in range(3)]
    for round_ in range(60):
        chain = source.choice(chains)
        first = source.randrange(12)
        names = chain[first : first + source.randrange(1, 6)]
        pages = source.sample(range(40), len(names))
        for page in pages:
            pool.fill(page, int(names[0][:6], 16) + page)
        action = source.randrange(4)
        if action == 0:
            values = [pool.get_data_page(page * pool.page_size) for page in pages]
            new = [not theirs.exists(name) for name in names]
            assert ours.batch_set(names, values) is theirs.batch_set(names, values) is True, (round_, new)
        elif action == 1:
            side = source.choice((PoolName.INDEXER, PoolName.SWA))
            for page in pages:
                other.fill(page, page + 1000 * round_)
            transfer = PoolTransfer(side, host_indices=other.indices(*pages), keys=names)
            assert ours.batch_set_v2([transfer]) == theirs.batch_set_v2([transfer])
        elif action == 2:
            targets = [[pool.get_dummy_flat_data_page() for _ in names] for _ in range(2)]
            got, expected = ours.batch_get(names, targets[0]), theirs.batch_get(names, targets[1])
            run = next((i for i, page in enumerate(expected) if page is None), len(names))
            assert [page is not None for page in got] == [i < run for i in range(len(names))]
            for mine, wanted in zip(got[:run], expected[:run], strict=True):
                assert torch.equal(mine, wanted)
        else:
            transfers = [
                PoolTransfer(PoolName.INDEXER, keys=names),
                PoolTransfer(
                    PoolName.SWA, keys=names[: source.randrange(1, 3)], hit_policy=PoolHitPolicy.TRAILING_PAGES
                ),
            ]
            wanted = transfers[: source.randrange(3)]
            assert ours.batch_exists_v2(chain, wanted) == theirs.batch_exists_v2(chain, wanted)
            assert ours.batch_exists(chain) == theirs.batch_exists(chain)


def test_groups_report_and_never_shorten_the_hit(make: Callable[..., Any]) -> None:
    kv, side = small(), small(width=4)
    backend = make(kv)
    backend.register_mem_host_pool_v2(side, PoolName.DEEPSEEK_V4_C4)
    hashes, groups = hashes_of("kv", 8), hashes_of("groups", 6)
    backend.batch_set_v1(hashes, kv.indices(*range(8)))
    backend.batch_set_v2([PoolTransfer(PoolName.DEEPSEEK_V4_C4, host_indices=side.indices(*range(5)), keys=groups[:5])])
    transfer = PoolTransfer(
        PoolName.DEEPSEEK_V4_C4, keys=groups, hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=4, group_pages=2
    )
    result = backend.batch_exists_v2(hashes, [transfer])
    assert result.kv_hit_pages == 8 and result.restorable_prefix_pages == list(range(1, 9))
    assert result.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.DEEPSEEK_V4_C4: 8}  # two whole groups of two


def test_pools_without_kv_pages_of_their_own(make: Callable[..., Any]) -> None:
    side = small(width=4)
    backend = make(None)
    backend.register_mem_pool_host(anchor_without_pages(16))
    backend.register_mem_host_pool_v2(side, PoolName.DEEPSEEK_V4_C1)
    hashes = hashes_of("logical", 6)
    transfer = PoolTransfer(PoolName.DEEPSEEK_V4_C1, host_indices=side.indices(*range(4)), keys=hashes[:4])
    assert backend.batch_set_v2([transfer]) == {PoolName.DEEPSEEK_V4_C1: [True] * 4}
    result = backend.batch_exists_v2(hashes, [PoolTransfer(PoolName.DEEPSEEK_V4_C1, keys=hashes)])
    assert result.kv_hit_pages == 4


def test_what_differs_never_meets(make: Callable[..., Any]) -> None:
    pool = small()
    hashes = hashes_of("identity", 3)
    make(pool).batch_set_v1(hashes, pool.indices(0, 1, 2))
    assert make(small()).batch_exists(hashes) == 3
    assert make(small(), revision="2").batch_exists(hashes) == 0
    assert make(small(), model_name="tiny/other").batch_exists(hashes) == 0
    assert make(small(page_size=32)).batch_exists(hashes) == 0
    assert make(small(layout="layer_first")).batch_exists(hashes) == 0
    assert make(small(width=16)).batch_exists(hashes) == 0
    assert make(small(), pp_size=2, pp_rank=1).batch_exists(hashes) == 0
    assert make(small(), v1=False).batch_exists(hashes) == 0
    assert make(small()).batch_exists(hashes_of("another salt", 3)) == 0


def test_ranks_store_their_shards_and_mla_stores_once(make: Callable[..., Any], daemon: Daemon) -> None:
    hashes = hashes_of("ranks", 4)
    pools = [small(), small()]
    for page in range(4):
        for rank, pool in enumerate(pools):
            pool.fill(page, 10 * page + rank)
    ranks = [make(pool, tp_size=2, tp_rank=rank) for rank, pool in enumerate(pools)]
    assert ranks[0].batch_set_v1(hashes, pools[0].indices(*range(4))) == [True] * 4
    assert ranks[0].batch_exists(hashes) == ranks[1].batch_exists(hashes) == 0  # half a page is none
    assert ranks[1].batch_set_v1(hashes, pools[1].indices(*range(4))) == [True] * 4
    for rank, pool in enumerate(pools):
        assert ranks[rank].batch_exists(hashes) == 4
        assert ranks[rank].batch_get_v1(hashes, pool.indices(*range(20, 24))) == [True] * 4
        assert [pool.content(20 + page) for page in range(4)] == [pool.content(page) for page in range(4)]
    mla = [make(small(planes=1), tp_size=2, tp_rank=rank, is_mla_model=True) for rank in range(2)]
    assert mla[0].batch_set_v1(hashes, small(planes=1).indices(*range(4))) == [True] * 4
    assert mla[1].batch_exists(hashes) == 4
    with Client(daemon.address) as client:
        assert client.report().blocks == 12  # four of two shards, four of one


def test_clear_and_a_restart(make: Callable[..., Any], daemon: Daemon) -> None:
    pool = small()
    hashes = hashes_of("clear", 4)
    pool.fill(0, 1)
    backend, other = make(pool), make(small())
    assert all(backend.batch_set_v1(hashes, pool.indices(0, 1, 2, 3)))
    with Client(daemon.address) as client:
        wait_until(lambda: client.report().blocks == 4)
    daemon.restart()
    wait_until(lambda: backend.batch_exists(hashes) == 4)
    assert backend.batch_get_v1(hashes, pool.indices(10, 11, 12, 13)) == [True] * 4
    assert pool.content(10) == pool.content(0)
    assert backend.clear()
    assert backend.batch_exists(hashes) == 0
    wait_until(lambda: other.batch_exists(hashes) == 4)
    backend.get_stats()


def test_a_killed_daemon_and_a_frozen_one_are_misses(make: Callable[..., Any], daemon: Daemon) -> None:
    pool = small()
    hashes = hashes_of("failures", 6)
    backend = make(pool, options={"match_deadline_s": 0.3, "load_deadline_s": 0.5, "save_deadline_s": 0.5})
    assert all(backend.batch_set_v1(hashes, pool.indices(*range(6))))
    assert backend.batch_exists(hashes) == 6
    daemon.freeze()
    assert backend.batch_exists(hashes) == 0
    assert backend.batch_set_v1(hashes_of("new", 2), pool.indices(0, 1)) == [False] * 2
    daemon.kill()
    assert backend.batch_get_v1(hashes, pool.indices(*range(6))) == [False] * 6
    daemon.start()
    wait_until(lambda: backend.batch_exists(hashes) >= 0 and backend.batch_set_v1(hashes, pool.indices(*range(6)))[0])
    wait_until(lambda: backend.batch_exists(hashes) == 6)


def test_no_daemon_at_all(make: Callable[..., Any], tmp_path: Path) -> None:
    pool = small()
    backend = make(pool, config_of(f"unix:{tmp_path}/none"))
    hashes = hashes_of("nobody", 2)
    assert backend.batch_exists(hashes) == 0
    assert backend.batch_set_v1(hashes, pool.indices(0, 1)) == [False, False]
    assert backend.batch_get_v1(hashes, pool.indices(0, 1)) == [False, False]


def test_behind_sglangs_own_failure_injection(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes through it is right or a miss, whatever was left out before."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    assert envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.get() == 0.3
    pool, seen = small(), small()
    for page in range(30):
        pool.fill(page, page)
    backend = make(pool)
    assert type(backend).__name__ == "HiCacheStorageFailureInjector"
    reader = make(seen)
    hashes = hashes_of("injected", 30)
    hits = 0
    for round_ in range(60):
        first = round_ % 25
        names, pages = hashes[first : first + 5], range(first, first + 5)
        backend.batch_set_v1(names, pool.indices(*pages), HiCacheStorageExtraInfo(prefix_keys=hashes[:first]))
        found = reader.batch_exists(names)
        got = reader.batch_get_v1(names[:found], seen.indices(*range(40, 40 + found))) if found else []
        for number, good in enumerate(got):
            if good:
                hits += 1
                assert seen.content(40 + number) == pool.content(first + number)
    assert hits > 50


def test_what_makes_no_sense_is_said(make: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="cachesvc has no option colour"):
        make(small(), options={"colour": "red"})
    with pytest.raises(ValueError, match="lookups_kept is 0"):
        make(small(), options={"lookups_kept": 0})
    pool = small()
    backend = make(pool)
    assert backend.batch_set_v1(["a", "b"], pool.indices(0)) == [False, False]  # two names, one page
    assert "1 pages" in caplog.text or "2 pages" in caplog.text
    del pool.kv_buffer
    silent = make(None)
    silent.register_mem_pool_host(object())
    assert silent.batch_exists(["a"]) == 0
    assert "pages of pool kv are not stored" in caplog.text
