"""What is leased on a connection to the arena is good only as long as that connection lives."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Client, Daemon, make_payloads, wait_until

from cachesvc.connector import storing
from cachesvc.connector.arena import Arena, ArenaUnavailable
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.prefix_cache import PrefixCache
from cachesvc.keys import KEY_SCHEME_VERSION, Namespace, chain_keys, self_test_vector
from cachesvc.rpc import cache_pb2 as pb

SIZE = 1 << 20
BLOCKS = 8
PROMPT = list(range(128 * BLOCKS + 1))


@pytest.fixture
def small(make_daemon: Callable[..., Daemon]) -> Daemon:
    """Its arena is soon full, so freed slots are used again at once."""
    return make_daemon("--arena-bytes", "32MiB").start()


@pytest.fixture
def cache(small: Daemon, namespace: Namespace) -> Iterator[PrefixCache]:
    options = CacheOptions(lookup_threads=1, match_budget_s=5.0, match_deadline_s=1.0, close_deadline_s=0.3)
    made = PrefixCache(namespace, SIZE, address=small.address, options=options)
    assert made.ready(20) and made._client.arena is not None
    yield made
    made.close()


def fill(cache: PrefixCache, payloads: list[bytes]) -> None:
    def gather(first: int, buffers: Sequence[memoryview]) -> None:
        for index, buffer in enumerate(buffers, first):
            buffer[:] = payloads[index]

    p = cache.match(PROMPT)
    assert cache.save(p, 128 * BLOCKS, gather) == BLOCKS
    cache.finish(p)
    assert cache.flush(20)


def others_fill_the_arena(daemon: Daemon) -> None:
    other = Namespace("other", "1", "float32")
    with Client(daemon.address) as client:
        client.attach(other, SIZE)
        for number in range(8):
            keys = chain_keys(other, range(number, number + 128 * 8))
            client.save(keys, make_payloads(8, SIZE, seed=number))
            wait_until(lambda: client.report().arena_dirty_bytes == 0)


@pytest.mark.parametrize("how", ["look-up times out", "cache is closed"])
def test_a_session_that_ends_under_a_load_makes_it_a_miss(
    small: Daemon, cache: PrefixCache, how: str, monkeypatch: Any
) -> None:
    del monkeypatch
    payloads = make_payloads(BLOCKS, SIZE, seed=99)
    fill(cache, payloads)
    with Client(small.address) as client:
        wait_until(lambda: client.report().arena_dirty_bytes == 0)
    p = cache.match(PROMPT)
    assert p.hit_tokens == 128 * BLOCKS
    got: dict[int, bytes] = {}

    def slow_scatter(first: int, views: Sequence[memoryview]) -> None:
        assert small.process is not None
        if how == "look-up times out":
            small.freeze()
            other = cache.begin(range(7, 500))  # on the thread, and so the session, that took our lease
            time.sleep(1.3)
            cache.finish(other)
            os.kill(small.process.pid, signal.SIGCONT)
        else:
            closing = threading.Thread(target=cache.close)
            closing.start()
            closing.join(20)
        others_fill_the_arena(small)
        got.update({first + i: bytes(view) for i, view in enumerate(views)})

    loaded = cache.load(p, slow_scatter) // 128
    assert all(got[index] == payloads[index] for index in range(loaded))
    assert loaded == 0


def test_a_saver_does_not_write_after_its_session_ended(
    small: Daemon, cache: PrefixCache, namespace: Namespace, monkeypatch: Any
) -> None:
    original = cache._client._copier.copy
    copying = threading.Event()

    def slow_copy(*what: Any, **how: Any) -> list[int]:
        copying.set()
        time.sleep(0.4)
        return original(*what, **how)

    monkeypatch.setattr(cache._client._copier, "copy", slow_copy)
    monkeypatch.setattr(storing, "_PART_BYTES", SIZE)  # look at the session before each of the blocks
    p = cache.match(PROMPT)
    cache.save(
        p, 128 * BLOCKS, lambda first, buffers: [b.__setitem__(slice(None), b"\xee" * SIZE) for b in buffers] and None
    )
    cache.finish(p)
    assert copying.wait(20)
    cache.close()
    payloads = make_payloads(BLOCKS, SIZE, seed=5)
    other = Namespace("other", "1", "float32")
    keys = chain_keys(other, range(128 * BLOCKS))
    with Client(small.address) as client:
        client.attach(other, SIZE)
        assert client.save(keys, payloads) == [pb.CommitState.STORED] * BLOCKS
        time.sleep(1.5)  # a saver that went on would write now
        assert client.fetch(keys) == payloads
        client.attach(namespace, SIZE)
        stored = client.fetch(chain_keys(namespace, PROMPT))
        assert len(stored) < BLOCKS and all(payload == b"\xee" * SIZE for payload in stored)


def test_threads_that_end_leave_no_connection(cache: PrefixCache, small: Daemon) -> None:
    fill(cache, make_payloads(BLOCKS, SIZE))

    def load() -> None:
        p = cache.match(PROMPT)
        cache.load(p, lambda first, views: None)
        cache.finish(p)

    load()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(40):
        thread = threading.Thread(target=load)
        thread.start()
        thread.join(20)
    assert len(os.listdir("/proc/self/fd")) <= before + 4


def attach_request(namespace: Namespace) -> pb.AttachRequest:
    return pb.AttachRequest(
        namespace_json=namespace.canonical_json(),
        self_test_vector=self_test_vector(),
        key_scheme=KEY_SCHEME_VERSION,
        payload_bytes=[SIZE],
    )


def connect_as(user: int, path: str, attach: pb.AttachRequest, boot_id: bytes) -> str:
    """What a process of another user gets from the arena's socket: "mapped", or why not."""
    reading, writing = os.pipe()
    answer = ""
    child = os.fork()
    if child == 0:
        try:
            os.setgid(user)
            os.setuid(user)
            arena = Arena(path, attach, boot_id, 5.0)
            answer = "mapped" if arena.readable([0], 4096)[0][0] == 0 else ""
        except (OSError, ArenaUnavailable) as error:
            answer = str(error)
        finally:
            os.write(writing, answer.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_needs_the_right_to_the_socket(make_daemon: Callable[..., Daemon], namespace: Namespace) -> None:
    daemon = make_daemon()
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        daemon.socket = Path(directory, "s")
        daemon.start()
        with Client(daemon.address) as client:
            reply = client.attach(namespace, SIZE)
        request = attach_request(namespace)
        assert "Permission denied" in connect_as(65534, reply.arena_socket, request, reply.boot_id)
        os.chmod(reply.arena_socket, 0o666)
        assert connect_as(65534, reply.arena_socket, request, reply.boot_id) == "mapped"
        daemon.kill()


def test_huge_pages_are_used_where_the_system_reserves_them(
    make_daemon: Callable[..., Daemon], namespace: Namespace
) -> None:
    pool = Path("/proc/sys/vm/nr_hugepages")
    before = pool.read_text()
    try:
        pool.write_text("128")  # four times what is needed: other tests' daemons take some
    except OSError:
        pytest.skip("this user cannot reserve huge pages")
    try:
        if int(pool.read_text()) < 128:
            pytest.skip("the system has no huge pages left")
        daemon = make_daemon("--arena-bytes", "64MiB").start()
        assert "of huge pages" in daemon.log.read_text()
        keys, payloads = chain_keys(namespace, PROMPT), make_payloads(BLOCKS, SIZE)
        with Client(daemon.address) as client:
            client.attach(namespace, SIZE)
            client.save(keys, payloads)
            assert client.fetch(keys) == payloads
        cache = PrefixCache(namespace, SIZE, address=daemon.address, options=CacheOptions(match_budget_s=5.0))
        assert cache.ready(20) and cache._client.arena is not None
        p = cache.match(PROMPT)
        assert cache.load(p, lambda first, views: None) == 128 * BLOCKS
        cache.close()
        daemon.kill()
    finally:
        pool.write_text(before)


def test_too_few_huge_pages_are_done_without(make_daemon: Callable[..., Daemon]) -> None:
    assert "of huge pages" not in make_daemon("--arena-bytes", "64MiB").start().log.read_text()


@pytest.fixture
def raw(small: Daemon, namespace: Namespace) -> Iterator[Arena]:
    """The arena's socket, spoken by hand."""
    with Client(small.address) as client:
        reply = client.attach(namespace, SIZE)
    request = attach_request(namespace)
    arena = Arena(reply.arena_socket, request, reply.boot_id, 20.0)
    arena.attachment = reply.attachment  # type: ignore[attr-defined]
    yield arena
    arena.close()


def reserve(arena: Arena, keys: list[bytes]) -> pb.ReserveReply:
    request = pb.ReserveRequest(attachment=arena.attachment, keys=b"".join(keys), traffic_class="agent")  # type: ignore[attr-defined]
    reply: pb.ReserveReply = arena.call("Reserve", request, 20.0)
    return reply


def test_slots_of_a_client_that_was_cut_off_stay_aside_until_it_closes(
    small: Daemon, raw: Arena, namespace: Namespace
) -> None:
    keys = chain_keys(namespace, PROMPT)[:2]
    assert list(reserve(raw, keys).states) == [pb.GRANTED] * 2
    session = raw.session
    session.frames.send(99, b"no such call", time.monotonic() + 20)
    wait_until(lambda: not session.alive)
    with Client(small.address) as client:
        client.attach(namespace, SIZE)
        time.sleep(0.5)  # it may still be writing: it has been told, but has not closed
        assert client.report().arena_used_bytes == 2 * SIZE
        assert list(client.reserve(keys).states) == [pb.BUSY] * 2
        session.end()
        wait_until(lambda: client.report().arena_used_bytes == 0)
        assert list(client.reserve(keys).states) == [pb.GRANTED] * 2


def test_a_durable_commit_of_other_bytes_than_its_checksum_says_so(
    small: Daemon, raw: Arena, namespace: Namespace
) -> None:
    keys = chain_keys(namespace, PROMPT)[:3]
    lease = reserve(raw, keys).lease_id
    request = pb.CommitRequest(lease_id=lease, indices=[0, 1, 2], checksums=[1, 2, 3], durable=True)
    assert list(raw.call("Commit", request, 20.0).states) == [pb.CHECKSUM_MISMATCH] * 3
    with Client(small.address) as client:
        client.attach(namespace, SIZE)
        assert client.lookup(keys)[0] == 0


def test_a_block_that_the_engine_partly_holds_is_not_lost_when_the_lease_ends_while_it_is_loaded(
    make_daemon: Callable[..., Daemon], namespace: Namespace
) -> None:
    daemon = make_daemon("--arena-bytes", "32MiB").start()
    payloads = make_payloads(BLOCKS, SIZE, seed=99)
    cache = PrefixCache(namespace, SIZE, address=daemon.address, options=CacheOptions(match_budget_s=5.0))
    assert cache.ready(20)
    p = cache.match(PROMPT)

    def gather(first: int, views: Sequence[memoryview]) -> None:
        for index, view in enumerate(views, first):
            view[:] = payloads[index]

    cache.save(p, 128 * BLOCKS, gather)
    cache.finish(p)
    assert cache.flush(20)
    other = Namespace("other", "1", "float32")
    taken: dict[int, bytes] = {}

    def scatter(first: int, views: Sequence[memoryview]) -> None:
        session = lease.match.session
        assert session is not None
        session.end()
        with Client(daemon.address) as client:  # until every slot of the arena holds something else
            client.attach(other, SIZE)
            for seed in range(8):
                client.save(chain_keys(other, range(seed, seed + 128 * BLOCKS)), make_payloads(BLOCKS, SIZE, seed))
                wait_until(lambda: client.report().arena_dirty_bytes == 0)
        taken.update({first + i: bytes(view) for i, view in enumerate(views)})

    p = cache.match(PROMPT, local_tokens=320)
    lease = p.lease
    assert lease is not None and p.hit_tokens == 1024
    assert cache.load(p, scatter) == 0
    assert taken == {2: payloads[2]}
    cache.close()


def test_an_answer_to_attach_that_cannot_be_read_is_no_arena(tmp_path: Path) -> None:
    path = Path(tempfile.mkdtemp()) / "s"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def lie() -> None:
        connection, _ = listener.accept()
        connection.recv(4096)
        connection.sendall(b"\x0c\x00\x00\x00\x00\xff\xff\xff garbage")
        connection.recv(1)

    thread = threading.Thread(target=lie)
    thread.start()
    with pytest.raises(ArenaUnavailable, match="cannot be read"):
        Arena(str(path), pb.AttachRequest(), b"b" * 16, 5.0)
    thread.join(10)
    listener.close()
