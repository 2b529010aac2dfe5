"""Shards that are stored at checkpoints only: a match ends where one is, and says where another is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc
import pytest
from conftest import Client, Daemon, cli_json, make_payloads

from cachesvc.keys import Namespace, chain_keys
from cachesvc.record import checksum
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.cache_pb2 import MissReason

SIZES = (1000, 1000, 3000, 5000)
"""Of two ranks: the payload of every block, and that of a checkpoint."""


@pytest.fixture
def client(daemon: Daemon) -> Client:
    made = Client(daemon.address)
    made.attach(Namespace("windows", "1", "uint8", shards=4), *SIZES, checkpoint_shards=2)
    return made


def store(client: Client, keys: Sequence[bytes], shard: int, seed: int = 0) -> None:
    payloads = make_payloads(len(keys), SIZES[shard], seed + shard)
    reply = client.reserve(keys, shard=shard)
    assert set(reply.states) <= {pb.ReserveState.GRANTED, pb.ReserveState.PRESENT}
    granted = [i for i, state in enumerate(reply.states) if state == pb.ReserveState.GRANTED]
    client.put(reply.lease_id, {i: payloads[i] for i in granted})
    assert set(client.commit(reply.lease_id, {i: checksum(payloads[i]) for i in granted})) == {pb.CommitState.STORED}


def found(client: Client, keys: Sequence[bytes]) -> tuple[int, int, int]:
    """Matched and stored blocks, and why the match ended."""
    match = client.match(keys)
    if match.lease_id:
        client.release(match, match.matched_blocks)
    return match.matched_blocks, match.stored_blocks, match.first_miss


def test_a_match_ends_at_the_last_checkpoint_of_all_shards(client: Client) -> None:
    keys = chain_keys(Namespace("windows", "1", "uint8", shards=4), range(128 * 10))
    assert found(client, keys) == (0, 0, MissReason.NEVER_SEEN)
    for shard in (0, 1):
        store(client, keys[:8], shard)
    assert found(client, keys) == (0, 8, MissReason.NEVER_SEEN)
    store(client, [keys[2], keys[4], keys[6]], 2)
    store(client, [keys[2], keys[4]], 3)
    assert found(client, keys) == (5, 8, MissReason.NEVER_SEEN)
    assert found(client, keys[:4]) == (3, 4, MissReason.NEVER_SEEN)
    assert found(client, keys[:2]) == (0, 2, MissReason.NEVER_SEEN)
    store(client, [keys[6], keys[7]], 3)
    assert found(client, keys) == (7, 8, MissReason.NEVER_SEEN)
    store(client, [keys[7], keys[9]], 2)
    assert found(client, keys) == (8, 8, MissReason.NEVER_SEEN)


def test_of_a_checkpoint_shard_the_lease_holds_one_block(client: Client) -> None:
    keys = chain_keys(Namespace("windows", "1", "uint8", shards=4), range(128 * 4))
    for shard in (0, 1):
        store(client, keys, shard)
    for shard in (2, 3):
        store(client, [keys[1], keys[3]], shard)
    match = client.match(keys)
    assert (match.matched_blocks, match.stored_blocks) == (4, 4)
    assert client.load(match) == make_payloads(4, SIZES[0], 0)

    def last(shard: int) -> bytes:
        replies = client.stub.Get(pb.GetRequest(lease_id=match.lease_id, first=0, count=1, shard=shard), timeout=20)
        return b"".join(reply.data for reply in replies)

    assert [last(shard) for shard in (2, 3)] == [make_payloads(2, SIZES[shard], shard)[1] for shard in (2, 3)]
    with pytest.raises(grpc.RpcError, match="the lease holds, by shard"):
        list(client.stub.Get(pb.GetRequest(lease_id=match.lease_id, first=0, count=2, shard=2), timeout=20))
    client.release(match, 4)
    row = client.report().lookups[0]
    assert row.hit_tokens["dram"] == 512 and row.loaded_bytes == 4 * sum(SIZES[:2]) + sum(SIZES[2:])


def test_an_evicted_checkpoint_is_said_and_recorded(make_daemon: Callable[..., Daemon]) -> None:
    """And a recording says the same as the daemon did."""
    daemon = make_daemon("--record").start()
    client = Client(daemon.address)
    namespace = Namespace("windows", "1", "uint8", shards=2)
    client.attach(namespace, 1000, 3000, checkpoint_shards=1)
    keys = chain_keys(namespace, range(128 * 6))
    for shard, some in ((0, keys), (1, [keys[1], keys[3]])):
        reply = client.reserve(some, shard=shard)
        payloads = dict(enumerate(make_payloads(len(some), SIZES[0] if not shard else 3000)))
        client.put(reply.lease_id, payloads)
        client.commit(reply.lease_id, {i: checksum(p) for i, p in payloads.items()})
    assert [found(client, keys[:n])[0] for n in (6, 4, 3, 1)] == [4, 4, 2, 0]
    live = cli_json("report", "--address", daemon.address)["total"]
    assert isinstance(live, dict)
    assert daemon.stop() == 0
    traces = sorted((daemon.store / "trace").glob("*.jsonl"))
    told = cli_json("replay", *map(str, traces), "--policy", "recorded")["total"]
    assert isinstance(told, dict)
    for name in ("input_tokens", "hit_tokens", "miss_tokens_by_reason"):
        assert told[name] == live[name]


def test_all_shards_cannot_be_checkpoints(daemon: Daemon) -> None:
    with Client(daemon.address) as client, pytest.raises(grpc.RpcError, match="checkpoint_shards is 1"):
        client.attach(Namespace("windows", "2", "uint8"), 1000, checkpoint_shards=1)
