"""The wire contract against a real daemon process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from conftest import Client, Daemon, make_payloads, wait_until

from cachesvc.keys import Namespace, canonical_json, chain_keys
from cachesvc.record import checksum
from cachesvc.rpc import cache_pb2 as pb

STORED, GRANTED, PRESENT, BUSY, REFUSED = (
    pb.CommitState.STORED,
    pb.ReserveState.GRANTED,
    pb.ReserveState.PRESENT,
    pb.ReserveState.BUSY,
    pb.ReserveState.REFUSED,
)


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Daemon:
    """One for the whole module: each test has a namespace of its own."""
    return shared_daemon


@pytest.fixture
def own_daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """For tests that stop it or look at totals."""
    return make_daemon().start()


@pytest.fixture
def own_client(own_daemon: Daemon, namespace: Namespace) -> Iterator[Client]:
    with Client(own_daemon.address) as made:
        made.attach(namespace, 1000)
        yield made


@pytest.fixture
def keys(namespace: Namespace) -> list[bytes]:
    return chain_keys(namespace, range(128 * 8))


def test_what_is_saved_is_found_and_loaded_also_after_a_restart(
    own_daemon: Daemon, own_client: Client, namespace: Namespace, keys: list[bytes]
) -> None:
    payloads = make_payloads(8, 1000)
    assert own_client.save(keys, payloads) == [STORED] * 8
    assert own_client.fetch(keys) == payloads
    own_daemon.restart()
    own_client.attach(namespace, 1000)
    assert own_client.fetch(keys) == payloads


def test_a_match_is_the_longest_prefix_without_holes(client: Client, keys: list[bytes]) -> None:
    payloads = make_payloads(8, 1000)
    client.save(keys[:3], payloads[:3])
    client.save(keys[4:], payloads[4:])
    match = client.match(keys)
    assert match.matched_blocks == 3
    assert match.first_miss == pb.MissReason.NEVER_SEEN
    assert list(match.tiers) == [pb.Tier.TIER_DRAM] * 3


def test_nothing_is_visible_before_its_commit(client: Client, keys: list[bytes]) -> None:
    payloads = make_payloads(2, 1000)
    reply = client.reserve(keys[:2])
    assert list(reply.states) == [GRANTED] * 2
    client.put(reply.lease_id, {0: payloads[0], 1: payloads[1]})
    assert client.match(keys[:2]).matched_blocks == 0
    assert client.commit(reply.lease_id, {0: checksum(payloads[0])}) == [STORED]
    assert client.match(keys[:2]).matched_blocks == 1


def test_of_two_writers_the_first_wins_and_the_second_is_told(client: Client, keys: list[bytes]) -> None:
    first = client.reserve(keys[:1])
    second = client.reserve(keys[:1])
    assert (list(first.states), list(second.states)) == ([GRANTED], [BUSY])
    assert second.lease_id == b""
    payload = make_payloads(1, 1000)[0]
    client.put(first.lease_id, {0: payload})
    client.commit(first.lease_id, {0: checksum(payload)})
    assert list(client.reserve(keys[:1]).states) == [PRESENT]


def test_a_key_named_twice_in_one_reservation_is_granted_once(client: Client, keys: list[bytes]) -> None:
    assert list(client.reserve([keys[0], keys[0]]).states) == [GRANTED, BUSY]


def test_an_aborted_reservation_never_existed(client: Client, keys: list[bytes]) -> None:
    reply = client.reserve(keys[:1])
    client.put(reply.lease_id, {0: make_payloads(1, 1000)[0]})
    for _ in range(2):
        client.stub.Abort(pb.AbortRequest(lease_id=reply.lease_id), timeout=5)
    assert list(client.reserve(keys[:1]).states) == [GRANTED]
    assert client.match(keys[:1]).matched_blocks == 0


def test_a_client_that_dies_between_reserve_and_commit_leaves_nothing(
    own_daemon: Daemon, namespace: Namespace, keys: list[bytes]
) -> None:
    with Client(own_daemon.address) as dying:
        dying.attach(namespace, 1000)
        reply = dying.reserve(keys[:1], lease_ms=700)
        dying.put(reply.lease_id, {0: make_payloads(1, 1000)[0]})
    with Client(own_daemon.address) as other:
        other.attach(namespace, 1000)
        assert list(other.reserve(keys[:1]).states) == [BUSY]
        wait_until(lambda: list(other.reserve(keys[:1]).states) == [GRANTED])
        assert other.match(keys[:1]).matched_blocks == 0
        assert other.report().staged_bytes == 1000


def test_an_ended_lease_is_refused_by_name(client: Client, keys: list[bytes]) -> None:
    payload = make_payloads(1, 1000)[0]
    reply = client.reserve(keys[:1], lease_ms=300)
    time.sleep(0.5)
    for call in (
        lambda: client.put(reply.lease_id, {0: payload}),
        lambda: client.commit(reply.lease_id, {0: checksum(payload)}),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert reply.lease_id.hex() in caught.value.details()


def test_an_ended_read_lease_is_refused_and_its_tokens_time_out(own_client: Client, keys: list[bytes]) -> None:
    own_client.save(keys[:2], make_payloads(2, 1000))
    match = own_client.match(keys[:2], lease_ms=300)
    time.sleep(0.5)
    with pytest.raises(grpc.RpcError) as caught:
        own_client.load(match)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    wait_until(lambda: own_client.report().read_leases == 0)
    assert dict(own_client.report().lookups[0].miss_tokens)["timed_out"] == 256


def test_a_repeated_commit_is_answered_alike_and_stores_nothing_twice(own_client: Client, keys: list[bytes]) -> None:
    payload = make_payloads(1, 1000)[0]
    reply = own_client.reserve(keys[:1])
    own_client.put(reply.lease_id, {0: payload})
    for _ in range(2):
        assert own_client.commit(reply.lease_id, {0: checksum(payload)}) == [STORED]
    wait_until(lambda: own_client.report().arena_dirty_bytes == 0)
    assert own_client.report().events["written_blocks"] == 1


def test_a_payload_that_is_not_the_one_that_was_sent_is_dropped(client: Client, keys: list[bytes]) -> None:
    payload = make_payloads(1, 1000)[0]
    reply = client.reserve(keys[:1])
    client.put(reply.lease_id, {0: payload})
    assert client.commit(reply.lease_id, {0: checksum(payload) ^ 1}) == [pb.CommitState.CHECKSUM_MISMATCH]
    assert client.match(keys[:1]).matched_blocks == 0
    assert list(client.reserve(keys[:1]).states) == [GRANTED]


def test_a_payload_with_bytes_missing_is_dropped(client: Client, keys: list[bytes]) -> None:
    payload = make_payloads(1, 1000)[0]
    reply = client.reserve(keys[:1])
    client.put(reply.lease_id, {0: payload[:600]})
    assert client.commit(reply.lease_id, {0: checksum(payload), 5: 0}) == [
        pb.CommitState.INCOMPLETE,
        pb.CommitState.NOT_GRANTED,
    ]


def test_chunks_are_put_together_and_may_be_repeated(client: Client, keys: list[bytes]) -> None:
    payload = make_payloads(1, 1000)[0]
    reply = client.reserve(keys[:1])
    for _ in range(2):
        client.put(reply.lease_id, {0: payload}, chunk=333)
    assert client.commit(reply.lease_id, {0: checksum(payload)}) == [STORED]
    assert client.fetch(keys[:1]) == [payload]


def test_large_payloads_travel_in_chunks(daemon: Daemon, keys: list[bytes]) -> None:
    namespace = Namespace(model="large", revision="1", dtype="float32")
    size = 5 * 1024 * 1024 + 17
    payloads = make_payloads(3, size)
    with Client(daemon.address) as client:
        client.attach(namespace, size)
        assert client.save(keys[:3], payloads) == [STORED] * 3
        assert client.fetch(keys[:3]) == payloads


def test_a_block_counts_only_with_all_its_shards(daemon: Daemon, keys: list[bytes]) -> None:
    namespace = Namespace(model="sharded", revision="1", dtype="float32", shards=2)
    with Client(daemon.address) as client:
        client.attach(namespace, 1000, 2000)
        for shard, size in enumerate((1000, 2000)):
            assert client.match(keys[:1]).matched_blocks == 0
            payload = make_payloads(1, size, seed=shard)[0]
            reply = client.reserve(keys[:1], shard=shard)
            client.put(reply.lease_id, {0: payload})
            assert client.commit(reply.lease_id, {0: checksum(payload)}) == [STORED]
        match = client.match(keys[:1])
        assert [client.load(match, shard=s) for s in (0, 1)] == [make_payloads(1, 1000, 0), make_payloads(1, 2000, 1)]


def test_another_namespace_misses_even_with_the_same_keys(daemon: Daemon, client: Client, keys: list[bytes]) -> None:
    client.save(keys[:2], make_payloads(2, 1000))
    with Client(daemon.address) as other:
        other.attach(Namespace(model="other", revision="1", dtype="float32"), 1000)
        assert other.match(keys[:2]).matched_blocks == 0


def namespace_text(**changes: object) -> str:
    return canonical_json({"model": "m", "block_tokens": 128, "shards": 1, **changes})


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"namespace_json": "{"}, grpc.StatusCode.INVALID_ARGUMENT, "namespace_json"),
        ({"namespace_json": '{"model": "a"}'}, grpc.StatusCode.INVALID_ARGUMENT, "namespace_json"),
        ({"namespace_json": namespace_text(model="\ud800")}, grpc.StatusCode.INVALID_ARGUMENT, "surrogates"),
        ({"namespace_json": namespace_text(model="m" * 300)}, grpc.StatusCode.INVALID_ARGUMENT, "256 bytes"),
        ({"namespace_json": namespace_text(shards=True)}, grpc.StatusCode.INVALID_ARGUMENT, "integers"),
        ({"namespace_json": "x" * 70_000}, grpc.StatusCode.INVALID_ARGUMENT, "70000"),
        ({"self_test_vector": b"x" * 16}, grpc.StatusCode.FAILED_PRECONDITION, "same release"),
        ({"key_scheme": 9}, grpc.StatusCode.FAILED_PRECONDITION, "scheme 9"),
        ({"payload_bytes": [1, 2]}, grpc.StatusCode.INVALID_ARGUMENT, "1 shards"),
        ({"payload_bytes": [1 << 30]}, grpc.StatusCode.INVALID_ARGUMENT, "[1073741824]"),
        ({"payload_bytes": [999]}, grpc.StatusCode.INVALID_ARGUMENT, "1000"),
    ],
)
def test_a_wrong_attachment_is_refused(
    daemon: Daemon,
    client: Client,
    namespace: Namespace,
    changes: dict[str, object],
    code: grpc.StatusCode,
    word: str,
) -> None:
    with Client(daemon.address) as other, pytest.raises(grpc.RpcError) as caught:
        other.attach(namespace, 1000, **changes)
    assert (caught.value.code(), word in caught.value.details()) == (code, True), caught.value.details()


def test_malformed_calls_are_refused_and_say_why(client: Client, keys: list[bytes]) -> None:
    lease = client.reserve(keys[:1]).lease_id
    attachment = client.attachment
    stub = client.stub
    cases: list[tuple[Callable[[], object], grpc.StatusCode, str]] = [
        (lambda: client.match([keys[0][:15]]), grpc.StatusCode.INVALID_ARGUMENT, "15 bytes"),
        (lambda: client.match(keys * 2500), grpc.StatusCode.INVALID_ARGUMENT, "20000 keys"),
        (lambda: client.match(keys[:1], traffic_class="bulk"), grpc.StatusCode.INVALID_ARGUMENT, "'bulk'"),
        (lambda: client.match(keys[:1], tail=-1), grpc.StatusCode.INVALID_ARGUMENT, "input_tokens 127"),
        (lambda: client.match(keys[:1], pass_id=b"short"), grpc.StatusCode.INVALID_ARGUMENT, "5 bytes"),
        (lambda: client.reserve(keys[:1], shard=3), grpc.StatusCode.INVALID_ARGUMENT, "shard 3"),
        (lambda: client.reserve(keys[:1], traffic_class="bulk"), grpc.StatusCode.INVALID_ARGUMENT, "agent, chat"),
        (lambda: client.put(lease, {0: b"x" * 1001}), grpc.StatusCode.INVALID_ARGUMENT, "1000 bytes"),
        (lambda: client.put(lease, {7: b"x"}), grpc.StatusCode.INVALID_ARGUMENT, "index 7"),
        (
            lambda: stub.Put(iter([pb.PutRequest(lease_id=lease, offset=9, data=b"x")]), timeout=5),
            grpc.StatusCode.INVALID_ARGUMENT,
            "gap",
        ),
        (lambda: client.commit(b"none", {0: 0}), grpc.StatusCode.NOT_FOUND, "lease"),
        (
            lambda: stub.Commit(pb.CommitRequest(lease_id=lease, indices=[0]), timeout=5),
            grpc.StatusCode.INVALID_ARGUMENT,
            "checksums",
        ),
        (
            lambda: stub.Match(pb.MatchRequest(attachment=attachment + 1), timeout=5),
            grpc.StatusCode.FAILED_PRECONDITION,
            "attach again",
        ),
        (lambda: stub.Report(pb.ReportRequest()), grpc.StatusCode.INVALID_ARGUMENT, "deadline"),
        (lambda: stub.Report(pb.ReportRequest(), timeout=9999), grpc.StatusCode.INVALID_ARGUMENT, "600 s"),
        (
            lambda: stub.Release(pb.ReleaseRequest(lease_id=lease, not_loaded=77), timeout=5),  # type: ignore[arg-type]
            grpc.StatusCode.INVALID_ARGUMENT,
            "77",
        ),
    ]
    for call, code, word in cases:
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert (caught.value.code(), word in caught.value.details()) == (code, True), caught.value.details()


def test_get_refuses_blocks_outside_the_match(client: Client, keys: list[bytes]) -> None:
    client.save(keys[:2], make_payloads(2, 1000))
    match = client.match(keys[:2])
    for fields in ({"first": 1, "count": 2}, {"count": 0}, {"count": 1, "shard": 1}):
        with pytest.raises(grpc.RpcError) as caught:
            list(client.stub.Get(pb.GetRequest(lease_id=match.lease_id, **fields), timeout=5))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_reservations_past_the_staging_memory_are_refused_not_queued(
    make_daemon: Callable[..., Daemon], namespace: Namespace, keys: list[bytes]
) -> None:
    daemon = make_daemon("--arena-bytes", "1MiB").start()
    with Client(daemon.address) as client:
        client.attach(namespace, 1000)
        # half of the arena is for what is not yet on disk: 128 slots of a page
        reply = client.reserve([bytes([i]) * 16 for i in range(130)])
        assert list(reply.states) == [GRANTED] * 128 + [REFUSED] * 2
        client.stub.Abort(pb.AbortRequest(lease_id=reply.lease_id), timeout=5)
        assert list(client.reserve(keys[:2]).states) == [GRANTED, GRANTED]


def test_traffic_classes_expire_after_their_own_ttl_since_last_use(
    make_daemon: Callable[..., Daemon], namespace: Namespace, keys: list[bytes], tmp_path: Path
) -> None:
    offset = tmp_path / "offset"
    day = 86_400
    daemon = make_daemon("--clock-offset-file", str(offset)).start()
    with Client(daemon.address) as client:
        client.attach(namespace, 1000)
        payloads = make_payloads(3, 1000)
        client.save(keys[:1], payloads[:1], traffic_class="agent")
        other = chain_keys(namespace, range(1, 257))
        client.save(other[:1], payloads[1:2], traffic_class="chat")
        client.save(other[1:], payloads[2:], traffic_class="agent")
        offset.write_text(str(2.9 * day))
        assert client.fetch(keys[:1]) == payloads[:1]  # slides on use
        offset.write_text(str(5.5 * day))
        assert client.fetch(keys[:1]) == payloads[:1]
        assert client.lookup(other) == (1, pb.MissReason.EXPIRED)
        offset.write_text(str(9 * day))
        assert client.lookup(keys[:1]) == (0, pb.MissReason.EXPIRED)
        assert client.lookup(other[:1])[0] == 1
        offset.write_text(str(17 * day))
        assert client.lookup(other[:1]) == (0, pb.MissReason.EXPIRED)
        wait_until(lambda: client.report().segments == 0)
        assert list((tmp_path / "store").glob("*/*/*/*.seg")) == []


def test_used_blocks_outlive_their_file(
    make_daemon: Callable[..., Daemon], namespace: Namespace, keys: list[bytes], tmp_path: Path
) -> None:
    offset = tmp_path / "offset"
    daemon = make_daemon("--clock-offset-file", str(offset)).start()
    with Client(daemon.address) as client:
        client.attach(namespace, 1000)
        payloads = make_payloads(8, 1000)
        client.save(keys, payloads)
        wait_until(lambda: client.report().arena_dirty_bytes == 0)
        offset.write_text(str(2.5 * 86_400))
        assert client.fetch(keys[:4]) == payloads[:4]
        offset.write_text(str(3.5 * 86_400))
        wait_until(lambda: client.report().events["reclaimed_segments"] > 0)
        assert client.report().events["rewritten_blocks"] == 4
        assert client.report().events["expired_blocks"] == 4
        assert client.fetch(keys) == payloads[:4]
    daemon.restart()
    with Client(daemon.address) as client:
        client.attach(namespace, 1000)
        assert client.fetch(keys) == payloads[:4]


def bytes_of_segments(store: Path) -> int:
    total = 0
    for path in store.glob("*/*/*/*.seg"):
        with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
            total += path.stat().st_size
    return total


def test_the_byte_budget_holds_and_the_oldest_go_first(
    make_daemon: Callable[..., Daemon], namespace: Namespace
) -> None:
    budget = 4_000_000
    daemon = make_daemon("--store-bytes", str(budget)).start()
    with Client(daemon.address) as client:
        client.attach(namespace, 50_000)
        prompts = [chain_keys(namespace, range(i, i + 512)) for i in range(60)]
        for number, keys in enumerate(prompts):
            assert client.save(keys, make_payloads(4, 50_000, seed=number)) == [STORED] * 4
            assert bytes_of_segments(daemon.store) <= budget
        wait_until(lambda: client.report().arena_dirty_bytes == 0)
        assert bytes_of_segments(daemon.store) <= budget
        assert client.fetch(prompts[-1]) == make_payloads(4, 50_000, seed=59)
        first = client.match(prompts[0])
        assert (first.matched_blocks, first.first_miss) == (0, pb.MissReason.EVICTED)
        assert client.report().events["evicted_blocks"] > 100


def test_eight_writers_and_readers_at_once_see_only_whole_blocks(own_daemon: Daemon, namespace: Namespace) -> None:
    prompts = [chain_keys(namespace, range(i, i + 512)) for i in range(12)]
    payloads = [make_payloads(4, 60_000, seed=i) for i in range(12)]
    wrong: list[str] = []

    def work(worker: int) -> None:
        with Client(own_daemon.address) as client:
            client.attach(namespace, 60_000)
            for step in range(24):
                number = (worker * 5 + step) % 12
                got = client.fetch(prompts[number])
                if got != payloads[number][: len(got)]:
                    wrong.append(f"worker {worker} step {step}")
                client.save(prompts[number], payloads[number])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    with Client(own_daemon.address) as client:
        client.attach(namespace, 60_000)
        assert [client.fetch(keys) for keys in prompts] == payloads
        wait_until(lambda: client.report().arena_dirty_bytes == 0)
        report = client.report()
        assert (report.blocks, report.events["written_blocks"]) == (48, 48)
        assert (report.read_leases, report.staged_bytes) == (0, 0)


def test_health_and_reflection_answer(daemon: Daemon) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    with grpc.insecure_channel(daemon.address) as channel:
        status = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="cachesvc.v1.Cache"), timeout=5
        )
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        replies = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5
        )
        names = {service.name for service in next(iter(replies)).list_services_response.service}
        assert {"cachesvc.v1.Cache", "grpc.health.v1.Health"} <= names
