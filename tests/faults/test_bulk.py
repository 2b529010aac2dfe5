"""The bulk channel, spoken by hand: leases that end meanwhile, clients that stop in the middle, and lies."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from conftest import Client, Daemon, make_payloads, wait_until

from cachesvc.keys import Namespace, chain_keys
from cachesvc.record import checksum
from cachesvc.rpc import bulk
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.frames import Frames

SIZE = 200_000
NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]
INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]


class Channel:
    """One connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 20)
        self.frames = Frames(self.socket, 1 << 20, ahead=False)

    def begin_put(self, lease_id: bytes) -> None:
        self.frames.send(bulk.PUT, pb.PutRequest(lease_id=lease_id).SerializeToString(), soon())

    def send(self, index: int, payload: bytes, *, size: int | None = None) -> None:
        head = bulk.Head(index, 0, len(payload) if size is None else size, 0)
        self.frames.send_with(bulk.BATCH, bulk.pack_heads([head]), [memoryview(payload)], soon())

    def end_put(self) -> tuple[int, bytes]:
        self.frames.send(bulk.BATCH, b"", soon())
        return self.frames.receive(soon())

    def get(self, request: pb.GetRequest) -> tuple[int, bytes]:
        self.frames.send(bulk.GET, request.SerializeToString(), soon())
        return self.frames.receive(soon())

    def payload(self, size: int) -> bytes:
        buffer = bytearray(size)
        self.frames.receive_into([memoryview(buffer)], soon())
        return bytes(buffer)


def soon() -> float:
    return time.monotonic() + 20


@pytest.fixture
def client(make_daemon: Callable[..., Daemon], namespace: Namespace) -> Iterator[Client]:
    daemon = make_daemon("--listen", "127.0.0.1:0").start()
    with Client(daemon.address) as made:
        made.attach(namespace, SIZE)
        yield made


@pytest.fixture
def channel(client: Client, namespace: Namespace) -> Iterator[Channel]:
    made = Channel(client.attach(namespace, SIZE).bulk_port)
    yield made
    made.socket.close()


def test_payloads_arrive_as_they_were_sent(client: Client, channel: Channel, namespace: Namespace) -> None:
    keys, payloads = chain_keys(namespace, range(128 * 4)), make_payloads(4, SIZE)
    lease = client.reserve(keys).lease_id
    channel.begin_put(lease)
    for index, payload in enumerate(payloads):
        channel.send(index, payload)
    code, body = channel.end_put()
    assert code == 0 and pb.PutReply.FromString(body).received_bytes == 4 * SIZE
    assert client.commit(lease, {i: checksum(p) for i, p in enumerate(payloads)}) == [pb.CommitState.STORED] * 4
    match = client.match(keys)
    code, heads = channel.get(pb.GetRequest(lease_id=match.lease_id, first=1, count=3))
    assert code == bulk.BATCH
    assert bulk.unpack_heads(heads) == [(index, 0, SIZE, checksum(payloads[index])) for index in (1, 2, 3)]
    assert channel.payload(3 * SIZE) == b"".join(payloads[1:])


def test_a_payload_that_changed_on_the_way_is_not_stored(
    client: Client, channel: Channel, namespace: Namespace
) -> None:
    keys, (payload,) = chain_keys(namespace, range(128)), make_payloads(1, SIZE)
    lease = client.reserve(keys).lease_id
    channel.begin_put(lease)
    channel.send(0, payload[:-1] + bytes([payload[-1] ^ 1]))
    assert channel.end_put()[0] == 0
    assert client.commit(lease, {0: checksum(payload)}) == [pb.CommitState.CHECKSUM_MISMATCH]
    assert client.lookup(keys)[0] == 0


def test_a_slot_that_is_being_filled_is_neither_committed_nor_given_away(
    client: Client, channel: Channel, namespace: Namespace
) -> None:
    keys, (payload,) = chain_keys(namespace, range(128)), make_payloads(1, SIZE)
    lease = client.reserve(keys, lease_ms=1500).lease_id
    channel.begin_put(lease)
    channel.send(0, payload[: SIZE // 2], size=SIZE)  # and stops
    time.sleep(0.5)  # the daemon waits for the rest by now
    assert client.commit(lease, {0: checksum(payload)}) == [pb.CommitState.NOT_GRANTED]
    wait_until(lambda: client.report().write_leases == 0)
    assert client.report().arena_used_bytes > 0, "the slot was given away while it is being written"
    assert list(client.reserve(keys).states) == [pb.ReserveState.BUSY]
    channel.socket.sendall(payload[SIZE // 2 :])
    assert channel.end_put()[0] == 0
    wait_until(lambda: client.report().arena_used_bytes == 0)
    assert list(client.reserve(keys).states) == [pb.ReserveState.GRANTED]


def test_a_client_that_goes_in_the_middle_leaves_nothing(
    client: Client, channel: Channel, namespace: Namespace
) -> None:
    keys, (payload,) = chain_keys(namespace, range(128)), make_payloads(1, SIZE)
    lease = client.reserve(keys).lease_id
    channel.begin_put(lease)
    channel.send(0, payload[:1000], size=SIZE)
    channel.socket.close()
    wait_until(lambda: client.commit(lease, {0: checksum(payload)}) == [pb.CommitState.INCOMPLETE])
    assert client.report().arena_used_bytes == 0


def test_what_is_refused_says_why_and_the_connection_goes_on(
    client: Client, channel: Channel, namespace: Namespace
) -> None:
    keys, (payload,) = chain_keys(namespace, range(128)), make_payloads(1, SIZE)
    channel.begin_put(b"no such lease...")
    channel.send(0, payload)
    assert channel.end_put()[0] == NOT_FOUND
    lease = client.reserve(keys).lease_id
    for index, data, text in ((5, payload, b"index 5"), (0, payload[1:], b"199999 bytes")):
        channel.begin_put(lease)
        channel.send(index, data)
        code, message = channel.end_put()
        assert code == INVALID and text in message
    assert channel.get(pb.GetRequest(lease_id=b"x" * 16, count=1))[0] == NOT_FOUND


def test_lies_end_the_connection(client: Client, channel: Channel) -> None:
    del client
    channel.begin_put(b"")
    channel.send(0, b"", size=1 << 40)
    with pytest.raises((EOFError, ConnectionError)):
        channel.frames.receive(soon())


@pytest.mark.long
def test_a_client_that_falls_silent_in_the_middle_is_cut_off(
    client: Client, channel: Channel, namespace: Namespace
) -> None:
    keys, (payload,) = chain_keys(namespace, range(128)), make_payloads(1, SIZE)
    lease = client.reserve(keys, lease_ms=500).lease_id
    channel.begin_put(lease)
    channel.send(0, payload[:1000], size=SIZE)
    wait_until(lambda: client.report().write_leases == 0)
    assert client.report().arena_used_bytes > 0
    wait_until(lambda: client.report().arena_used_bytes == 0, 30)
    assert list(client.reserve(keys).states) == [pb.ReserveState.GRANTED]
