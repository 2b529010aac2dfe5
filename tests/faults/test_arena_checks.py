"""Shared memory that somebody wrote into: with `--verify-arena` readers find it, and the daemon serves it no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from conftest import Daemon, wait_until

from cachesvc.cli._daemon import fetch_report
from cachesvc.connector.client import Client
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.prefix_cache import PrefixCache
from cachesvc.keys import Namespace, chain_keys
from cachesvc.rpc.address import client_address

SIZE = 9_000
TOKENS = list(range(128 * 4 + 1))
PATIENT = CacheOptions(match_budget_s=20.0, match_deadline_s=20.0, load_deadline_s=20.0)


def load(daemon: Daemon, namespace: Namespace) -> list[bytes]:
    """What a new engine gets."""
    cache = PrefixCache(namespace, SIZE, address=daemon.address, options=PATIENT)
    found: dict[int, bytes] = {}

    def scatter(first: int, payloads: Sequence[memoryview]) -> None:
        found.update((first + i, bytes(payload)) for i, payload in enumerate(payloads))

    try:
        assert cache.ready(20.0)
        p = cache.match(TOKENS)
        count = cache.load(p, scatter) // 128
        cache.finish(p)
        return [found[index] for index in range(count)]
    finally:
        cache.close()


@pytest.mark.long
@pytest.mark.parametrize("verify", ["1", "0"])
def test_bytes_that_changed_in_the_arena_reach_nobody_when_readers_check(
    make_daemon: Callable[..., Daemon], namespace: Namespace, verify: str
) -> None:
    daemon = make_daemon("--verify-arena", verify).start()
    keys = chain_keys(namespace, TOKENS)
    payloads = [bytes([index + 1]) * SIZE for index in range(4)]
    client = Client(client_address(daemon.address), CacheOptions(durable=True))
    attachment = client.attach(namespace.canonical_json(), [SIZE])
    client.store(attachment, keys, [memoryview(payload) for payload in payloads], "agent")
    assert load(daemon, namespace) == payloads
    match = client.match(
        attachment,
        keys,
        traffic_class="agent",
        input_tokens=len(TOKENS),
        local_tokens=0,
        min_blocks=1,
        pass_id=b"",
        unreachable_tokens=0,
        deadline_s=10.0,
    )
    assert match.arena is not None
    (view,) = match.arena.writable([match.slots[2]], SIZE)  # as an engine with a fault could
    view[17] ^= 1
    if verify == "0":
        assert load(daemon, namespace) != payloads, "this is what the check is for"
    else:
        got = load(daemon, namespace)
        assert got == payloads[: len(got)] and len(got) <= 2
        wait_until(lambda: fetch_report(daemon.address).events.get("arena_corrupt_blocks", 0) == 1)
        client.release(attachment, match, 4, 0)  # type: ignore[arg-type]
        assert load(daemon, namespace) == payloads, "what is on disk is sound"
    client.close()
