"""The small parts: what is remembered, buffers, threads, the save queue's accounting, addresses."""

from __future__ import annotations

import mmap
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cachesvc.connector.buffers import LoadBuffers, Slots
from cachesvc.connector.checkpoints import checkpoints_due
from cachesvc.connector.client import Attachment, Match
from cachesvc.connector.errors import CacheError, Unreachable
from cachesvc.connector.memory import FailedKeys, KnownKeys
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.passes import Answer, Lease, Pass
from cachesvc.connector.staging import HostStaging, Saver
from cachesvc.connector.stats import Counters
from cachesvc.connector.storing import Stored
from cachesvc.connector.workers import Workers
from cachesvc.keys import Namespace, PrefixHasher, chain_keys
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.address import ADDRESS_ENV, client_address, default_address, parse_address

KEYS = [bytes([i]) * 16 for i in range(64)]
ATTACHMENT = Attachment(1, b"b" * 16, 16384, 1 << 26, 1 << 21, 600_000, ("agent",))
LOADED_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Memory


@settings(LOADED_MACHINE)
@given(st.lists(st.tuples(st.sampled_from(["add", "discard"]), st.lists(st.sampled_from(KEYS[:12]), max_size=5))))
def test_known_keys_are_the_most_recent_ones(steps: list[tuple[str, list[bytes]]]) -> None:
    known, model = KnownKeys(5), list[bytes]()
    for step, keys in steps:
        getattr(known, step)(keys)
        for key in keys:
            if key in model:
                model.remove(key)
            if step == "add":
                model.append(key)
        model = model[-5:]
        assert [key for key in KEYS if key in known] == sorted(model, key=KEYS.index) and len(known) == len(model)


def test_failed_keys_cut_a_match_short_for_a_while() -> None:
    now = [0.0]
    failed = FailedKeys(3, 60.0, lambda: now[0])
    assert failed.good_prefix(KEYS[:8]) == 8
    failed.add(KEYS[5])
    now[0] = 30.0
    failed.add(KEYS[2])
    assert failed.good_prefix(KEYS[:8]) == 2 and failed.good_prefix([]) == 0
    failed.discard([KEYS[2]])
    assert failed.good_prefix(KEYS[:8]) == 5
    now[0] = 60.0
    assert failed.good_prefix(KEYS[:8]) == 8
    for key in KEYS[:5]:
        failed.add(key)
    assert failed.good_prefix([KEYS[0], KEYS[1], KEYS[2]]) == 2, "bounded: the oldest are forgotten"


# Buffers


@settings(LOADED_MACHINE, max_examples=50)
@given(st.integers(1, 20_000), st.integers(0, 9), st.lists(st.integers(0, 12), max_size=12))
def test_slots_are_never_handed_out_twice(size: int, count: int, wishes: list[int]) -> None:
    slots = Slots(size, count)
    taken: list[list[int]] = []
    for wish in wishes:
        got = slots.take(wish)
        assert len(got) == min(wish, count - sum(map(len, taken)))
        taken.append(got)
        flat = [slot for some in taken for slot in some]
        assert len(set(flat)) == len(flat) and slots.used_bytes == size * len(flat)
        if len(taken) > 3:
            slots.give(taken.pop(0))
    for mark, slot in enumerate(slot for some in taken for slot in some):
        slots.view(slot)[:] = bytes([mark + 1]) * size
    for mark, slot in enumerate(slot for some in taken for slot in some):
        assert bytes(slots.view(slot)) == bytes([mark + 1]) * size, "buffers overlap"


def test_slots_lie_on_pages() -> None:
    import ctypes

    slots = Slots(5000, 3)
    for slot in range(3):
        assert ctypes.addressof(ctypes.c_char.from_buffer(slots.view(slot))) % mmap.PAGESIZE == 0


def test_load_buffers_are_reused_and_bounded() -> None:
    buffers = LoadBuffers(1000, 2500, keep=1)
    first, second = buffers.take(), buffers.take()
    assert first is not second and first.count == 2
    buffers.give(first)
    buffers.give(second)
    assert buffers.take() is first and buffers.take() not in (first, second)
    assert LoadBuffers(1000, 10, keep=1).take().count == 1, "at least one block"


# Threads


def test_workers_are_bounded_and_survive_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers("test", threads=1, limit=2)
    gate, done = threading.Event(), list[int]()
    running = threading.Event()
    assert workers.submit(lambda: (running.set(), gate.wait(10)))  # type: ignore[arg-type,return-value]
    assert running.wait(10)
    assert workers.submit(lambda: 1 // 0) and workers.submit(lambda: done.append(1))  # type: ignore[arg-type,return-value]
    assert not workers.submit(lambda: done.append(2)), "the queue is full"
    assert not workers.wait_idle(0.01)
    gate.set()
    assert workers.wait_idle(10) and done == [1]
    assert "ZeroDivisionError" in caplog.text
    workers.close(10)
    assert not workers.submit(lambda: done.append(3))
    assert not [t for t in threading.enumerate() if t.name.startswith("test-")]


# The save queue


class ScriptedDaemon:
    """Stands in for client and link: each reserve takes the next outcome of the script."""

    def __init__(self, script: list[list[int] | str]) -> None:
        self.script = script
        self.states: bytes = b""
        self.failures = 0
        self.longest = 0

    def use(self, call: Any, *, renew_s: float, engine_waited: bool) -> Any:
        if not self.script:
            raise CacheError("no daemon")
        return call(ATTACHMENT)

    def failure(self, attachment: Attachment, error: CacheError, *, engine_waited: bool) -> None:
        self.failures += 1

    def store(
        self,
        attachment: Attachment,
        keys: list[bytes],
        payloads: Sequence[memoryview],
        traffic_class: str,
        *,
        shard: int,
    ) -> Stored:
        assert len(payloads) == len(keys) and shard == 3
        self.longest = max(self.longest, len(keys))
        outcome = self.script.pop(0)
        if outcome == "fails":
            raise Unreachable("store")
        states = [pb.GRANTED] * len(keys) if outcome == "lost" else (outcome * len(keys))[: len(keys)]
        end = pb.INCOMPLETE if outcome == "lost" else pb.STORED
        return Stored(bytes(states), bytes(end if state == pb.GRANTED else 0 for state in states))


OUTCOMES = st.one_of(
    st.sampled_from(["fails", "lost"]),
    st.lists(st.sampled_from([pb.GRANTED, pb.PRESENT, pb.BUSY, pb.REFUSED]), min_size=1, max_size=4),
)


@settings(LOADED_MACHINE, max_examples=60)
@given(
    slots=st.integers(1, 6),
    batch=st.integers(1, 4),
    wishes=st.lists(st.integers(1, 8), max_size=8),
    script=st.lists(OUTCOMES, max_size=12),
)
@example(slots=6, batch=4, wishes=[6], script=[[pb.GRANTED], [pb.GRANTED]])
def test_every_queued_block_is_accounted_once_and_every_buffer_comes_back(
    slots: int, batch: int, wishes: list[int], script: list[list[int] | str]
) -> None:
    size = 100
    options = CacheOptions(save_queue_bytes=slots * size + 99, save_batch_bytes=batch * size, saves_refused_pause_s=0)
    daemon: Any = ScriptedDaemon(script)
    counters, known = Counters(), KnownKeys(1000)
    failed = FailedKeys(10, 60.0, lambda: 0.0)
    saver = Saver(daemon, daemon, known, failed, counters, options, 3, size, lambda keys: None, HostStaging(1))
    filled, queued = 0, 0
    for number, wish in enumerate(wishes):
        keys = [bytes([number, i]) * 8 for i in range(wish)]

        def fill(buffers: Any) -> None:
            nonlocal filled
            filled += len(buffers)
            for buffer in buffers:
                assert buffer.nbytes == size
                buffer[:] = bytes(size)

        taken = saver.take(keys, fill, traffic_class="agent", max_keys=3)
        assert 0 <= taken <= min(wish, slots)
        queued += taken
        assert saver.queued_bytes <= options.save_queue_bytes
    assert saver.flush(20)
    saver.close(10)
    sums = counters.snapshot()
    ends = ("stored_blocks", "present_blocks", "busy_blocks", "refused_blocks", "failed_blocks")
    assert queued == filled == sums.get("queued_blocks", 0) == sum(sums.get(end, 0) for end in ends)
    assert saver.queued_bytes == 0 and daemon.longest <= min(batch, 3)
    assert len(known) == sums.get("stored_blocks", 0) + sums.get("present_blocks", 0)
    assert sums.get("stored_bytes", 0) == size * sums.get("stored_blocks", 0)


# Passes


def a_pass(tokens: Any, **more: Any) -> Pass:
    return Pass(tokens, PrefixHasher(Namespace("m", "1", "uint8")), traffic_class="agent", **more)


@settings(LOADED_MACHINE, max_examples=40)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=6), st.integers(0, 10))
def test_tokens_added_in_any_pieces_give_the_same_keys(pieces: list[int], hash_every: int) -> None:
    whole = list(range(sum(pieces)))
    p = a_pass(whole[: pieces[0]])
    at = pieces[0]
    for number, size in enumerate(pieces[1:]):
        p.add(array("i", whole[at : at + size]))
        at += size
        if hash_every and number % hash_every == 0:
            assert p.hash(wait=True)
    assert p.hash(wait=True)
    assert p.keys == chain_keys(Namespace("m", "1", "uint8"), whole)


def test_a_pass_is_settled_once() -> None:
    late = a_pass([1], wait_s=0.0)
    assert late.take_answer() == Answer(reason="timed out")
    assert not late.put_answer(Answer(3, Lease(Match(3, b"l"), ATTACHMENT), "hit")) and late.take_lease() is None
    early = a_pass([1], wait_s=60.0)
    assert early.take_answer() is None
    assert early.put_answer(Answer(3, Lease(Match(3, b"l"), ATTACHMENT), "hit"))
    assert early.take_lease() is not None and early.take_lease() is None


# Addresses


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("unix:/run/c.sock", "unix:/run/c.sock"),
        ("unix:///run/c.sock", "unix:/run/c.sock"),
        ("localhost:7070", "localhost:7070"),
        ("[::1]:7070", "[::1]:7070"),
        ("127.0.0.1:0", "127.0.0.1:0"),
    ],
)
def test_addresses_are_read_and_written(text: str, shown: str) -> None:
    assert str(parse_address(text)) == shown
    assert parse_address(shown) == parse_address(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "unix:", "unix:c.sock", "unix://c.sock", "unix:/" + "x" * 107),
        *("host", "host:", ":7070", "host:x", "h:²", "h:-1", "host:70000", "::1:7070"),
    ],
)
def test_other_texts_are_refused_with_the_text_in_the_message(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|socket path"):
        parse_address(text)


def test_which_address_a_client_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(ADDRESS_ENV, raising=False)
    assert client_address() == default_address()
    assert str(default_address()) == f"unix:{tmp_path}/cachesvc/cachesvc.sock"
    monkeypatch.setenv(ADDRESS_ENV, "there:1")
    assert str(client_address()) == "there:1" and str(client_address("here:2")) == "here:2"


@pytest.mark.parametrize(
    ("prompt", "wanted", "start", "end", "due"),
    [
        (1000, 0, 0, 1000, {7: True}),
        (1024, 0, 0, 1024, {7: True, 8: False}),  # the same prompt can hit 7; the turn after it 8
        (1000, 5, 0, 1000, {5: True, 7: True}),
        (1000, 5, 640, 1000, {7: True}),  # the hit ended there
        (1000, 5, 639, 640, {5: True}),
        (1000, 0, 1000, 1023, {}),
        (1000, 0, 1023, 1024, {8: False}),
        (3000, 0, 0, 2000, {10: True}),
        (3000, 0, 2000, 3000, {20: True, 23: True}),
        (1000, 0, 1279, 1280, {10: True}),  # at an interval it is stored at once, in the answer too
        (100, 0, 0, 100, {}),
        (100, 0, 100, 140, {1: False}),
    ],
)
def test_checkpoints_that_are_due(prompt: int, wanted: int, start: int, end: int, due: dict[int, bool]) -> None:
    assert checkpoints_due(prompt, wanted, start, end, block_tokens=128, interval_tokens=1280) == due
