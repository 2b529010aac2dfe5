"""Thirty simulated days of agent and chat traffic against the store, on a clock that the test sets."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from store_bench import AGENT, CHAT, DAY, SEGMENT, SHAPE, Bench

from cachesvc.classes import TrafficClass, slice_width
from cachesvc.rpc.cache_pb2 import MissReason

STEP = 1_800.0
HOUR = 3_600.0


@dataclass
class Session:
    """A conversation: its blocks so far, when it goes on, and when it was last used."""

    number: int
    traffic_class: TrafficClass
    turns: list[float]
    """When each of the turns to come begins."""
    blocks: list[bytes] = field(default_factory=list)
    used: float = 0.0

    def grow(self, count: int) -> list[bytes]:
        first = len(self.blocks)
        self.blocks += [
            self.number.to_bytes(8, "little") + index.to_bytes(8, "little") for index in range(first, first + count)
        ]
        return self.blocks[first:]


class Traffic:
    """Agents: many turns minutes apart, some that come back after days. Chats: few turns, hours or days apart."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.sessions: list[Session] = []

    def begin(self, now: float) -> None:
        source = self._random
        if source.random() < 0.6:
            turns = [now]
            for _ in range(source.randrange(3, 10)):
                turns.append(turns[-1] + source.expovariate(1 / HOUR))
            if source.random() < 0.3:
                turns.append(turns[-1] + source.uniform(1.5, 2.9) * DAY)
            self.sessions.append(Session(len(self.sessions), AGENT, turns))
        else:
            turns = [now]
            for _ in range(source.randrange(0, 4)):
                turns.append(turns[-1] + source.uniform(0.01, 6.8) * DAY)
            self.sessions.append(Session(len(self.sessions), CHAT, turns))

    def blocks_of_a_turn(self) -> int:
        return self._random.randrange(1, 5)

    def starts(self) -> int:
        return self._random.randrange(0, 3)


def files_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and file.name not in ("LOCK", "SCRUB"))


@pytest.mark.long
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(("days", "budget"), [(30, 2_200 * SEGMENT), (6, 200 * SEGMENT)])
def test_days_of_traffic_expire_what_is_over_keep_what_is_in_use_and_fit_the_disk(
    tmp_path: Path, days: int, budget: int
) -> None:
    roomy = budget > 1_000 * SEGMENT
    bench = Bench(tmp_path / "store", budget=budget, rewrite_rate=64 << 20, scrub_rate=0, background=False)
    traffic = Traffic(seed=days)
    began, source, gone = bench.clock.now(), random.Random(1), 0
    while bench.clock.now() < began + days * DAY:
        now = bench.clock.now()
        for _ in range(traffic.starts()):
            traffic.begin(now)
        for session in traffic.sessions:
            while session.turns and session.turns[0] <= now:
                session.turns.pop(0)
                bench.use(session.blocks, session.traffic_class)
                held = bench.store.catalog.holds(session.blocks, SHAPE, session.traffic_class)
                missing = [block for block, there in zip(session.blocks, held, strict=True) if not there]
                if roomy and session.used + session.traffic_class.ttl > now:
                    assert not missing, f"{len(missing)} blocks of session {session.number} in use were dropped"
                bench.save(missing + session.grow(traffic.blocks_of_a_turn()), session.traffic_class, durable=False)
                bench.store.drain()
                session.used = now
        bench.settle()
        assert files_bytes(bench.path) <= budget, "the disk is over budget"
        for session in source.sample(traffic.sessions, min(len(traffic.sessions), 40)):
            ttl = session.traffic_class.ttl
            there = bench.stored(session.blocks)
            if session.used + ttl > now:
                assert there == sorted(there, reverse=True), "a head is gone before its tail"
            if roomy and session.used + ttl > now:
                assert all(there), f"session {session.number}, used {now - session.used:.0f} s ago, was dropped"
            if session.used + ttl + slice_width(ttl) + STEP < now:
                assert not any(there), f"session {session.number} is still there after {now - session.used:.0f} s"
                found = bench.store.catalog.match([session.blocks], [SHAPE], session.traffic_class)
                assert found.reason in (MissReason.EXPIRED, MissReason.EVICTED, MissReason.NEVER_SEEN)
                gone += 1
        bench.clock.advance(STEP)
    events = bench.store.events
    assert gone > 100 and events["rewritten_blocks"] > 50
    if roomy:
        assert events["expired_blocks"] > 1_000 and events["evicted_blocks"] == 0
    else:
        assert events["evicted_blocks"] > 1_000
    assert events["corrupt_blocks"] == 0
    bench.store.close()
