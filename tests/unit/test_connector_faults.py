"""Whatever the daemon does, an engine sees fewer hits: no exception, no wrong byte, no long wait."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from connector_fakes import NAMESPACE, PAYLOAD_BYTES, QUICK, Engine, FakeDaemon, eventually, run

from cachesvc.connector.errors import TimedOut
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.prefix_cache import PrefixCache
from cachesvc.keys import BLOCK_TOKENS, chain_keys
from cachesvc.rpc import cache_pb2 as pb

BLOCKS = 6
PROMPT = list(range(BLOCKS * BLOCK_TOKENS + 1))
BOUND = 15.0  # seconds: far above every deadline used here, far below "for ever"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path)
    yield fake
    fake.stop()


@pytest.fixture
def make_cache(daemon: FakeDaemon) -> Iterator[Callable[..., PrefixCache]]:
    made: list[PrefixCache] = []

    def make(**changes: Any) -> PrefixCache:
        cache = PrefixCache(NAMESPACE, PAYLOAD_BYTES, address=daemon.address, options=replace(QUICK, **changes))
        made.append(cache)
        return cache

    yield make
    daemon.resume()
    for cache in made:
        cache.close()


@pytest.fixture
def cache(make_cache: Callable[..., PrefixCache]) -> PrefixCache:
    made = make_cache()
    assert made.ready(10)
    return made


def closed(cache: PrefixCache) -> bool:
    return cache.stats.breaker == "closed"


# Loads: streams that are not what they should be


def at_block(index: int, change: Callable[[list[pb.GetReply]], list[pb.GetReply]]) -> Callable[..., Any]:
    """Changes the chunks of one block."""

    def stream(replies: list[pb.GetReply]) -> Iterable[pb.GetReply]:
        chunks = [r for r in replies if r.index == index]
        return [
            *(r for r in replies if r.index < index),
            *(change(chunks) if chunks else ()),
            *(r for r in replies if r.index > index),
        ]

    return stream


def edit(position: int, **fields: Any) -> Callable[[list[pb.GetReply]], list[pb.GetReply]]:
    def change(chunks: list[pb.GetReply]) -> list[pb.GetReply]:
        for name, value in fields.items():
            setattr(chunks[position], name, value)
        return chunks

    return change


LIES: dict[str, Callable[..., Any]] = {
    "wrong checksum": at_block(3, edit(-1, checksum=1)),
    "flipped bit": at_block(3, lambda c: edit(1, data=bytes([c[1].data[0] ^ 1]) + c[1].data[1:])(c)),
    "chunks swapped": at_block(3, lambda c: [c[1], c[0], *c[2:]]),
    "chunk twice": at_block(3, lambda c: [c[0], *c]),
    "overlap": at_block(3, edit(1, offset=1)),
    "gap": at_block(3, lambda c: [c[0], *c[2:]]),
    "offset far out": at_block(3, edit(1, offset=1 << 60)),
    "too long": at_block(3, lambda c: edit(-1, data=c[-1].data + b"x")(c)),
    "too short": at_block(3, lambda c: edit(-1, data=c[-1].data[:-1])(c)),
    "ends early": at_block(3, edit(0, last=True)),
    "never ends": at_block(3, edit(-1, last=False)),
    "empty chunks": at_block(3, lambda c: [pb.GetReply(index=3)] * 1000 + c),
    "wrong index": at_block(3, edit(0, index=5)),
    "block left out": at_block(3, lambda c: []),
    "block of another": at_block(3, lambda c: [pb.GetReply(index=3, data=bytes(PAYLOAD_BYTES), last=True)]),
    "stream ends": lambda replies: [r for r in replies if r.index < 3],
    "miss": at_block(3, lambda c: [pb.GetReply(index=3, miss=pb.CORRUPT)]),
    "miss of an unknown kind": at_block(3, lambda c: [pb.GetReply(index=3, miss=77)]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("lie", LIES)
def test_a_load_ends_at_the_last_good_block(cache: PrefixCache, daemon: FakeDaemon, lie: str) -> None:
    run(cache, PROMPT)
    daemon.get_stream = LIES[lie]
    p, engine = run(cache, PROMPT)
    assert p.hit_tokens == BLOCKS * BLOCK_TOKENS
    assert sorted(engine.loaded) == [0, 1, 2] and p.loaded_tokens == 3 * BLOCK_TOKENS
    assert engine.gathered == [3, 4, 5], "what failed is offered for saving again"
    eventually(lambda: len(daemon.released) == 1)
    assert daemon.released[0][0] == 3 and daemon.released[0][1] not in (0, pb.BYPASSED)
    assert cache.stats.failed_loads == 1
    eventually(lambda: closed(cache))
    again, engine = run(cache, PROMPT)
    assert again.hit_tokens <= 3 * BLOCK_TOKENS, "the same failing hit is not offered twice"
    assert sorted(engine.loaded) == [0, 1, 2]


def test_the_reason_of_a_failed_load_is_told(cache: PrefixCache, daemon: FakeDaemon) -> None:
    run(cache, PROMPT)
    for lie, reason in (("wrong checksum", pb.CORRUPT), ("miss", pb.CORRUPT), ("stream ends", pb.LOAD_ERROR)):
        daemon.get_stream = LIES[lie]
        cache._failed.clear()
        eventually(lambda: closed(cache))
        run(cache, PROMPT)
        eventually(lambda reason=reason: daemon.released[-1:] == [(3, reason)])
    assert cache.stats.corrupt_blocks == 1


def test_a_block_stored_anew_is_offered_again(cache: PrefixCache, daemon: FakeDaemon) -> None:
    run(cache, PROMPT)
    daemon.get_stream = LIES["wrong checksum"]
    key = chain_keys(NAMESPACE, PROMPT)[3]
    run(cache, PROMPT)
    daemon.get_stream = lambda replies: replies
    del daemon.blocks[key]
    run(cache, PROMPT)  # saves it
    assert key in daemon.blocks
    assert run(cache, PROMPT)[0].hit_tokens == BLOCKS * BLOCK_TOKENS


def test_a_wrong_boot_id_in_the_stream_is_a_lost_lease(cache: PrefixCache, daemon: FakeDaemon) -> None:
    run(cache, PROMPT)
    daemon.get_stream = at_block(0, edit(0, boot_id=b"another boot id."))
    p, engine = run(cache, PROMPT)
    assert p.loaded_tokens == 0 and not engine.loaded
    daemon.get_stream = lambda replies: replies
    eventually(lambda: closed(cache))
    assert run(cache, PROMPT)[0].loaded_tokens == BLOCKS * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("code", "blamed"),
    [
        (grpc.StatusCode.UNAVAILABLE, True),
        (grpc.StatusCode.INTERNAL, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, True),
        (grpc.StatusCode.NOT_FOUND, False),
        (grpc.StatusCode.INVALID_ARGUMENT, False),
    ],
)
def test_get_refused(make_cache: Callable[..., PrefixCache], daemon: FakeDaemon, code: Any, blamed: bool) -> None:
    cache = make_cache(breaker_failures=1)
    assert cache.ready(10)
    run(cache, PROMPT)
    daemon.before["Get"] = daemon.fail(code)
    p, engine = run(cache, PROMPT)
    assert p.hit_tokens and p.loaded_tokens == 0 and not engine.loaded
    assert cache.stats.breaker_openings == int(blamed)


def test_a_load_that_hangs_ends_at_its_deadline(make_cache: Callable[..., PrefixCache], daemon: FakeDaemon) -> None:
    cache = make_cache(load_deadline_s=0.5, load_stall_s=0.2, probe_max_s=0.1)
    assert cache.ready(10)
    run(cache, PROMPT)

    def stream(replies: list[pb.GetReply]) -> Iterator[pb.GetReply]:
        yield from (r for r in replies if r.index < 2)
        daemon.hang()

    daemon.get_stream = stream
    p, engine = run(cache, PROMPT)
    assert sorted(engine.loaded) == [0, 1] and p.loaded_tokens == 2 * BLOCK_TOKENS
    assert cache.stats.breaker_openings == 1, "an engine waited in vain"
    daemon.resume()
    daemon.get_stream = lambda replies: replies
    eventually(lambda: closed(cache))
    assert run(cache, PROMPT)[0].hit_tokens == 2 * BLOCK_TOKENS


def test_a_slow_but_steady_load_is_not_held_against_the_daemon(
    make_cache: Callable[..., PrefixCache], daemon: FakeDaemon
) -> None:
    cache = make_cache(load_deadline_s=0.5, load_stall_s=5.0)
    assert cache.ready(10)
    run(cache, PROMPT)

    def stream(replies: list[pb.GetReply]) -> Iterator[pb.GetReply]:
        for reply in replies:
            time.sleep(0.1)
            yield reply

    daemon.get_stream = stream
    p, _ = run(cache, PROMPT)
    assert 0 < p.loaded_tokens < p.hit_tokens
    assert closed(cache)
    assert cache.match(PROMPT).hit_tokens == p.hit_tokens


def test_a_load_that_brings_no_block_in_time_is_a_failure_even_if_bytes_trickle(
    make_cache: Callable[..., PrefixCache], daemon: FakeDaemon
) -> None:
    cache = make_cache(load_deadline_s=0.4, load_stall_s=5.0)
    assert cache.ready(10)
    run(cache, PROMPT)

    def stream(replies: list[pb.GetReply]) -> Iterator[pb.GetReply]:
        for reply in replies:
            yield reply
            time.sleep(0.3)

    daemon.get_stream = stream
    assert run(cache, PROMPT)[0].loaded_tokens == 0
    assert cache.stats.breaker_openings == 1
    eventually(lambda: closed(cache))
    assert cache.match(PROMPT).hit_tokens == 0
    eventually(lambda: daemon.released[-1:] == [(0, pb.LOAD_ERROR)])  # matched, but not offered again


def test_finish_from_another_thread_ends_a_load(cache: PrefixCache, daemon: FakeDaemon) -> None:
    run(cache, PROMPT)
    sent = threading.Event()

    def stream(replies: list[pb.GetReply]) -> Iterator[pb.GetReply]:
        yield from (r for r in replies if r.index < 2)
        sent.set()
        daemon.hang()

    daemon.get_stream = stream
    engine = Engine(PROMPT)
    p = cache.match(PROMPT)

    thread = threading.Thread(target=cache.load, args=(p, engine.scatter))
    thread.start()
    assert sent.wait(BOUND)
    time.sleep(0.2)  # two good blocks are there by now, and wait for their batch to fill
    cache.finish(p)
    thread.join(BOUND)
    assert not thread.is_alive() and not engine.loaded
    assert closed(cache), "the engine ended it, not the daemon"
    eventually(lambda: daemon.released == [(0, pb.BYPASSED)])


# Matches


def test_match_waits_for_its_budget_only_and_the_answer_can_be_polled(
    make_cache: Callable[..., PrefixCache], daemon: FakeDaemon
) -> None:
    cache = make_cache(match_budget_s=0.01, match_deadline_s=60.0)
    assert cache.ready(10)
    p = cache.match(PROMPT)
    cache.wait(p, BOUND)
    engine = Engine(PROMPT)
    cache.save(p, len(PROMPT), engine.gather)
    assert cache.flush(10)
    daemon.before["Match"] = daemon.hang
    started = time.monotonic()
    p = cache.match(PROMPT)
    assert time.monotonic() - started < BOUND
    assert p.pending and p.hit_tokens == 0 and not cache.poll(p)
    assert cache.load(p, engine.scatter) == 0, "nothing to load as long as the answer is open"
    daemon.resume()
    assert cache.wait(p, BOUND) and not p.pending
    assert p.hit_tokens == BLOCKS * BLOCK_TOKENS
    assert cache.load(p, engine.scatter) == p.hit_tokens


def test_a_match_without_an_answer_is_settled_at_its_deadline(
    make_cache: Callable[..., PrefixCache], daemon: FakeDaemon
) -> None:
    cache = make_cache(match_budget_s=0.01, match_deadline_s=0.3, breaker_first_s=60.0, breaker_max_s=60.0)
    assert cache.ready(10)
    daemon.before["Match"] = daemon.hang
    p = cache.begin(PROMPT)
    eventually(lambda: cache.poll(p))
    assert (p.pending, p.hit_tokens, p.reason) == (False, 0, "timed out")
    eventually(lambda: cache.stats.breaker == "open")
    calls = daemon.count("Match")
    for _ in range(5):
        assert cache.match(PROMPT).reason == "unreachable", "at once, and nobody is asked"
    assert daemon.count("Match") == calls
    stats = cache.stats
    assert (stats.lookups, stats.misses, stats.timeouts, stats.unreachable) == (6, 6, 1, 5)


def test_the_lease_of_a_late_answer_is_released(make_cache: Callable[..., PrefixCache], daemon: FakeDaemon) -> None:
    cache = make_cache(match_budget_s=0.01, match_deadline_s=60.0)
    assert cache.ready(10)
    run_with_patience(cache)
    daemon.before["Match"] = daemon.hang
    p = cache.match(PROMPT)
    assert p.pending
    cache.finish(p)  # the engine has gone on
    daemon.resume()
    eventually(lambda: daemon.released == [(0, pb.TIMED_OUT)])
    assert daemon.read_leases == {}
    assert p.hit_tokens == 0 and cache.stats.late_answers == 1


def run_with_patience(cache: PrefixCache) -> None:
    engine = Engine(PROMPT)
    p = cache.begin(PROMPT)
    assert cache.wait(p, BOUND)
    cache.save(p, len(PROMPT), engine.gather)
    cache.finish(p)
    assert cache.flush(10)


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,
    ],
)
def test_failures_in_a_row_open_the_breaker_and_a_probe_closes_it(
    make_cache: Callable[..., PrefixCache], daemon: FakeDaemon, code: grpc.StatusCode
) -> None:
    cache = make_cache(breaker_first_s=0.3, breaker_max_s=0.3)
    assert cache.ready(10)
    daemon.before["Match"] = daemon.fail(code)
    for number in range(3):
        eventually(lambda: closed(cache))
        assert daemon.count("Match") == number and cache.stats.breaker_openings == 0
        assert cache.match(PROMPT).hit_tokens == 0
    assert cache.stats.breaker_openings == 1 and cache.stats.breaker != "closed"
    daemon.before.clear()
    eventually(lambda: closed(cache))
    run(cache, PROMPT)
    assert run(cache, PROMPT)[0].hit_tokens == BLOCKS * BLOCK_TOKENS


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND])
def test_a_match_refused_for_itself_does_not_open_the_breaker(
    cache: PrefixCache, daemon: FakeDaemon, code: grpc.StatusCode
) -> None:
    daemon.before["Match"] = daemon.fail(code)
    for _ in range(10):
        assert cache.match(PROMPT).hit_tokens == 0
    assert closed(cache) and daemon.count("Match") == 10


def test_a_daemon_that_never_accepts_its_own_attachment_causes_no_loop(cache: PrefixCache, daemon: FakeDaemon) -> None:
    daemon.before["Match"] = daemon.fail(grpc.StatusCode.FAILED_PRECONDITION)
    assert cache.match(PROMPT).hit_tokens == 0
    assert daemon.count("Match") == 2
    time.sleep(0.2)
    assert daemon.count("Match") == 2 and daemon.count("Attach") <= 10


def test_more_blocks_than_were_asked_are_not_believed(cache: PrefixCache, daemon: FakeDaemon) -> None:
    run(cache, PROMPT)
    daemon.matched = lambda blocks: blocks + 1
    p, engine = run(cache, PROMPT)
    assert p.hit_tokens == 0 and not engine.loaded


def test_too_many_lookups_at_once_are_no_hits(make_cache: Callable[..., PrefixCache], daemon: FakeDaemon) -> None:
    cache = make_cache(match_budget_s=0.0, match_deadline_s=60.0, lookup_threads=1, max_lookups=2)
    assert cache.ready(10)
    daemon.before["Match"] = daemon.hang
    first = cache.begin(PROMPT)
    eventually(lambda: daemon.count("Match") == 1)
    passes = [cache.begin(PROMPT) for _ in range(5)]
    assert [cache.poll(p) for p in passes] == [False, False, True, True, True]
    daemon.resume()
    assert all(cache.wait(p, BOUND) for p in (first, *passes))


# Attaching, restarts


def test_no_daemon_then_one_appears(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path)
    daemon.stop()
    cache = PrefixCache(NAMESPACE, PAYLOAD_BYTES, address=daemon.address, options=QUICK)
    try:
        for _ in range(3):
            p, engine = run(cache, PROMPT)
            assert (p.hit_tokens, p.reason, engine.gathered) == (0, "unreachable", [])
        assert not cache.ready(0.05)
        stats = cache.stats
        assert (stats.unreachable, stats.unsaved_blocks, stats.attached) == (3, 3 * BLOCKS, False)
        daemon.start()
        eventually(lambda: cache.stats.attached)
        run(cache, PROMPT)
        run(cache, PROMPT)
        assert [r.unreachable_tokens for r in daemon.requests["Match"]] == [3 * len(PROMPT), 0]
        assert cache.stats.hits == 1
    finally:
        cache.close()
        daemon.stop()


def test_a_daemon_that_appears_within_a_pass_gets_its_blocks(tmp_path: Path) -> None:
    daemon = FakeDaemon(tmp_path)
    daemon.stop()
    cache = PrefixCache(NAMESPACE, PAYLOAD_BYTES, address=daemon.address, options=QUICK)
    engine = Engine(PROMPT)
    p = cache.match(PROMPT)
    assert cache.save(p, 2 * BLOCK_TOKENS, engine.gather) == 0
    daemon.start()
    assert cache.ready(BOUND)
    assert cache.save(p, len(PROMPT), engine.gather) == BLOCKS
    cache.finish(p)
    assert cache.stats.unsaved_blocks == 0
    cache.close()
    assert len(daemon.blocks) == BLOCKS, "close stores what is queued"
    daemon.stop()


def test_tokens_that_could_not_be_asked_for_are_told_once(cache: PrefixCache, daemon: FakeDaemon) -> None:
    for _ in range(2):
        daemon.before["Match"] = daemon.fail(grpc.StatusCode.INVALID_ARGUMENT)
        cache.match(PROMPT)
        cache.match(PROMPT[:300])
        daemon.before.clear()
        cache.match(PROMPT)
    told = [r.unreachable_tokens for r in daemon.requests["Match"]]
    assert told == 2 * [0, len(PROMPT), len(PROMPT) + 300]


def test_both_connections_are_proven_at_attach(daemon: FakeDaemon, make_cache: Callable[..., PrefixCache]) -> None:
    cache = make_cache()
    eventually(lambda: closed(cache))
    assert daemon.count("Attach") == 2


def test_another_boot_id_in_any_reply_is_a_restart(cache: PrefixCache, daemon: FakeDaemon) -> None:
    run(cache, PROMPT)
    daemon.boot_id = os.urandom(16)  # the attachment is still good, as it could be by chance
    assert run(cache, PROMPT)[0].loaded_tokens == BLOCKS * BLOCK_TOKENS
    assert cache.stats.boot_changes == 1


def test_what_was_known_of_another_boot_is_forgotten(cache: PrefixCache, daemon: FakeDaemon) -> None:
    run(cache, PROMPT)
    daemon.get_stream = LIES["wrong checksum"]
    run(cache, PROMPT)
    daemon.get_stream = lambda replies: replies
    assert cache.match(PROMPT).hit_tokens == 3 * BLOCK_TOKENS and len(cache._known) == BLOCKS
    daemon.restart()
    assert cache.ready(BOUND) and len(cache._known) == 0
    assert cache.match(PROMPT).hit_tokens == BLOCKS * BLOCK_TOKENS


def test_a_failure_of_an_earlier_boot_is_not_held_against_this_one(cache: PrefixCache, daemon: FakeDaemon) -> None:
    before = cache._link.current()
    assert before is not None
    daemon.restart()
    assert cache.ready(BOUND)
    openings = cache.stats.breaker_openings
    cache._link.failure(before, TimedOut("of before"), engine_waited=True)
    assert closed(cache) and cache.stats.breaker_openings == openings


def test_after_a_restart_the_next_match_hits(cache: PrefixCache, daemon: FakeDaemon) -> None:
    run(cache, PROMPT)
    for number in (1, 2):
        daemon.restart()
        p, _ = run(cache, PROMPT)
        if p.reason == "unreachable":  # the connection had not yet been found broken
            eventually(lambda: closed(cache))
            p, _ = run(cache, PROMPT)
        assert p.loaded_tokens == BLOCKS * BLOCK_TOKENS
        assert cache.stats.boot_changes == number


def test_ready_notices_a_restart(cache: PrefixCache, daemon: FakeDaemon) -> None:
    run(cache, PROMPT)
    daemon.restart()
    assert cache.ready(BOUND) and cache.stats.boot_changes == 1
    assert run(cache, PROMPT)[0].loaded_tokens == BLOCKS * BLOCK_TOKENS
    daemon.stop()
    assert not cache.ready(0.2)


def test_leases_of_another_boot_are_lost(cache: PrefixCache, daemon: FakeDaemon) -> None:
    run(cache, PROMPT)
    p = cache.match(PROMPT)
    engine = Engine(PROMPT)
    daemon.restart()
    assert cache.ready(BOUND)
    assert cache.load(p, engine.scatter) == 0 and not engine.loaded
    cache.finish(p)
    assert daemon.count("Get") == daemon.count("Release") == 0
    assert cache.match(PROMPT).hit_tokens == BLOCKS * BLOCK_TOKENS, "a restart makes no block a failed one"


def test_a_save_survives_a_restart_in_between(cache: PrefixCache, daemon: FakeDaemon) -> None:
    engine = Engine(PROMPT)
    p = cache.match(PROMPT)
    daemon.attachment += 1  # as after a restart, but the connection lives
    daemon.boot_id = os.urandom(16)
    assert cache.save(p, len(PROMPT), engine.gather) == BLOCKS
    assert cache.flush(10)
    assert len(daemon.blocks) == BLOCKS and cache.stats.failed_blocks == 0


@pytest.mark.parametrize("why", ["key scheme", "too large", "namespace"])
def test_an_attach_refused_for_good_is_said_once(
    daemon: FakeDaemon, make_cache: Callable[..., PrefixCache], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    if why == "key scheme":
        daemon.key_scheme = 2
    elif why == "too large":
        daemon.max_payload_bytes = PAYLOAD_BYTES - 1
    else:
        daemon.before["Attach"] = daemon.fail(grpc.StatusCode.INVALID_ARGUMENT)
    with caplog.at_level(logging.INFO, "cachesvc.connector"):
        cache = make_cache(refused_retry_s=0.05)
        eventually(lambda: daemon.count("Attach") >= 3)
        assert not cache.ready(0.1)
    p, engine = run(cache, PROMPT)
    assert p.hit_tokens == 0 and engine.gathered == []
    assert len([r for r in caplog.records if "refuses" in r.message]) == 1
    daemon.key_scheme, daemon.max_payload_bytes = 1, 1 << 20
    daemon.before.clear()
    eventually(lambda: closed(cache))


def test_a_refused_client_does_not_ask_again_soon(daemon: FakeDaemon, make_cache: Callable[..., PrefixCache]) -> None:
    daemon.key_scheme = 2
    make_cache(refused_retry_s=3600.0)
    eventually(lambda: daemon.count("Attach") == 1)  # the first of the two connections is enough to know
    time.sleep(0.5)
    assert daemon.count("Attach") == 1


def test_a_server_that_speaks_nonsense(tmp_path: Path) -> None:
    class Nonsense(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"\xff" * 40)

    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((Nonsense(),))
    server.add_insecure_port(f"unix:{tmp_path}/n.sock")
    server.start()
    cache = PrefixCache(NAMESPACE, PAYLOAD_BYTES, address=f"unix:{tmp_path}/n.sock", options=QUICK)
    assert not cache.ready(0.3)
    assert run(cache, PROMPT)[0].reason == "unreachable"
    cache.close()
    server.stop(0)


# Saves


@pytest.mark.parametrize("call", ["Reserve", "Put", "Commit"])
@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND])
def test_a_save_that_fails_leaves_nothing_and_is_counted(
    cache: PrefixCache, daemon: FakeDaemon, call: str, code: grpc.StatusCode
) -> None:
    daemon.before[call] = daemon.fail(code)
    run(cache, PROMPT)
    stats = cache.stats
    assert (stats.queued_blocks, stats.failed_blocks, stats.queued_bytes) == (BLOCKS, BLOCKS, 0)
    assert daemon.write_leases == {} and daemon.count("Abort") == (call != "Reserve")
    daemon.before.clear()
    eventually(lambda: closed(cache))
    _, engine = run(cache, PROMPT)
    assert len(engine.gathered) == BLOCKS == len(daemon.blocks), "the next pass saves them"


def test_commit_states_are_counted(make_cache: Callable[..., PrefixCache], daemon: FakeDaemon) -> None:
    cache = make_cache(saves_refused_pause_s=0)
    assert cache.ready(10)
    keys = chain_keys(NAMESPACE, PROMPT)
    forced = {keys[0]: pb.CHECKSUM_MISMATCH, keys[1]: pb.INCOMPLETE, keys[2]: pb.WRITE_REFUSED, keys[3]: pb.NOT_GRANTED}
    daemon.commit_states = forced.get
    run(cache, PROMPT)
    stats = cache.stats
    assert (stats.stored_blocks, stats.refused_blocks, stats.failed_blocks) == (2, 1, 3)
    daemon.commit_states = lambda key: None
    run(cache, PROMPT)
    stats = cache.stats
    assert len(daemon.blocks) == BLOCKS and (stats.stored_blocks, stats.present_blocks) == (6, 2)


@pytest.mark.parametrize("where", ["reserve", "commit"])
def test_a_daemon_without_room_is_not_bothered_for_a_while(
    make_cache: Callable[..., PrefixCache], daemon: FakeDaemon, where: str
) -> None:
    cache = make_cache(saves_refused_pause_s=3600.0)
    assert cache.ready(10)
    if where == "reserve":
        daemon.reserve_states = lambda key: pb.REFUSED
    else:
        daemon.commit_states = lambda key: pb.WRITE_REFUSED
    run(cache, PROMPT)
    _, engine = run(cache, PROMPT)
    stats = cache.stats
    assert engine.gathered == [] and daemon.count("Reserve") == 1
    assert (stats.refused_blocks, stats.dropped_blocks) == (BLOCKS, BLOCKS)
    assert closed(cache)


def test_a_daemon_with_some_room_is_asked_again(make_cache: Callable[..., PrefixCache], daemon: FakeDaemon) -> None:
    cache = make_cache(saves_refused_pause_s=3600.0)
    assert cache.ready(10)
    keys = chain_keys(NAMESPACE, PROMPT)
    daemon.reserve_states = {keys[4]: pb.REFUSED, keys[5]: pb.REFUSED}.get
    run(cache, PROMPT)
    daemon.reserve_states = lambda key: None
    assert run(cache, PROMPT)[1].gathered == [4, 5] and len(daemon.blocks) == BLOCKS


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        ("Reserve", {"states": b"\x01"}),
        ("Reserve", {"lease_id": b""}),
        ("Put", {"received_bytes": 1}),
        ("Commit", {"states": b""}),
    ],
)
def test_replies_to_a_save_that_contradict_the_contract(
    cache: PrefixCache,
    daemon: FakeDaemon,
    call: str,
    fields: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    truth = getattr(FakeDaemon, call)

    def lie(self: FakeDaemon, request: Any, context: Any) -> Any:
        reply = truth(self, request, context)
        for name, value in fields.items():
            setattr(reply, name, value)
        return reply

    daemon.stop()
    monkeypatch.setattr(FakeDaemon, call, lie)
    daemon.start()
    assert cache.ready(BOUND)
    run(cache, PROMPT)
    assert cache.stats.failed_blocks == BLOCKS and cache.stats.queued_bytes == 0
    assert "background job" not in caplog.text


def test_a_hanging_daemon_fills_the_queue_and_never_the_engines_time(
    make_cache: Callable[..., PrefixCache], daemon: FakeDaemon
) -> None:
    cache = make_cache(save_queue_bytes=4 * PAYLOAD_BYTES, save_batch_bytes=PAYLOAD_BYTES, save_deadline_s=30.0)
    assert cache.ready(10)
    daemon.before["Reserve"] = daemon.hang
    engine = Engine(PROMPT)
    p = cache.match(PROMPT)
    started = time.monotonic()
    assert cache.save(p, len(PROMPT), engine.gather) == 4
    assert cache.save(p, len(PROMPT), engine.gather) == 0
    assert time.monotonic() - started < BOUND
    assert cache.stats.queued_bytes == 4 * PAYLOAD_BYTES and not cache.flush(0.05)
    daemon.resume()
    assert cache.flush(10)
    assert cache.save(p, len(PROMPT), engine.gather) == 2, "the rest is taken once there is room"
    cache.finish(p)
    assert cache.flush(10) and cache.stats.dropped_blocks == 0 and len(daemon.blocks) == BLOCKS


def test_blocks_left_out_are_counted_as_dropped(make_cache: Callable[..., PrefixCache], daemon: FakeDaemon) -> None:
    cache = make_cache(save_queue_bytes=2 * PAYLOAD_BYTES, save_deadline_s=30.0)
    assert cache.ready(10)
    daemon.before["Reserve"] = daemon.hang
    run(cache, PROMPT, flush=False)
    assert cache.stats.dropped_blocks == BLOCKS - 2


def test_saving_can_be_turned_off(make_cache: Callable[..., PrefixCache], daemon: FakeDaemon) -> None:
    cache = make_cache(save_queue_bytes=0)
    assert cache.ready(10)
    _, engine = run(cache, PROMPT)
    assert engine.gathered == [] and cache.stats.dropped_blocks == 0


# Closing


def test_close_is_bounded_whatever_hangs(make_cache: Callable[..., PrefixCache], daemon: FakeDaemon) -> None:
    cache = make_cache(match_deadline_s=3600.0, save_deadline_s=3600.0, close_deadline_s=0.3, match_budget_s=0.01)
    assert cache.ready(10)
    p = cache.match(PROMPT)
    cache.wait(p, BOUND)
    daemon.before |= {"Reserve": daemon.hang, "Match": daemon.hang, "Attach": daemon.hang}
    engine = Engine(PROMPT)
    cache.save(p, len(PROMPT), engine.gather)
    cache.begin(PROMPT)
    eventually(lambda: daemon.count("Match") == 2)
    started = time.monotonic()
    cache.close()
    cache.close()
    assert time.monotonic() - started < BOUND
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("cachesvc-")])
    late = cache.match(PROMPT)
    assert late.reason == "unreachable" and cache.load(late, engine.scatter) == 0
    assert cache.save(late, len(PROMPT), engine.gather) == 0 and not cache.ready(0)
    cache.finish(late)
    cache.finish(p)


def test_options_that_make_no_sense_are_refused() -> None:
    for name, value in (("load_deadline_s", 0), ("save_queue_bytes", -1), ("breaker_failures", 0)):
        with pytest.raises(ValueError, match=name):
            CacheOptions(**{name: value})
