"""A store without a daemon, on a clock that stands still: for tests of expiry, room and damage."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cachesvc.classes import DEFAULT_TTLS, TrafficClass, TrafficClasses
from cachesvc.clock import ManualClock
from cachesvc.record import PAGE, checksum, record_bytes
from cachesvc.segments.format import shape_of
from cachesvc.store import Store

DAY = 86_400.0
SIZE = 9_000
STRIDE = record_bytes(SIZE)
SEGMENT = PAGE + 8 * STRIDE
SHAPE = shape_of("ab" * 32, SIZE)
CLASSES = TrafficClasses(DEFAULT_TTLS)
AGENT, CHAT = CLASSES.named("agent"), CLASSES.named("chat")


class Bench:
    """A store without a daemon, on a clock that stands still."""

    def __init__(self, path: Path, *, segment_bytes: int = SEGMENT, budget: int = 1 << 30, **more: Any) -> None:
        self.clock = ManualClock()
        self.path = path
        self._options = {"segment_bytes": segment_bytes, "budget": budget, **more}
        self.open()

    def open(self) -> None:
        self.store = Store(
            self.path,
            arena_bytes=8 << 20,
            slab_bytes=1 << 20,
            arena_policy="lru",
            classes=CLASSES,
            clock=self.clock,
            **self._options,
        )

    def reopen(self) -> None:
        self.store.close()
        self.open()

    def save(self, identities: Sequence[bytes], traffic_class: TrafficClass = AGENT, *, durable: bool = True) -> None:
        for start in range(0, len(identities), 64):
            part = identities[start : start + 64]
            slots = self.store.reserve(part, SIZE)
            assert len(slots) == len(part)
            for slot in slots:
                self.store.arena.view(slot)[:] = content(slot.identity)
            sums = [checksum(self.store.arena.view(slot)) for slot in slots]
            self.store.commit(slots, sums, SHAPE, traffic_class, verified=True, durable=durable)

    def matched(self, identities: Sequence[bytes], traffic_class: TrafficClass = AGENT) -> int:
        return len(self.store.catalog.match([identities], [SHAPE], traffic_class).entries[0])

    def use(self, identities: Sequence[bytes], traffic_class: TrafficClass = AGENT) -> None:
        self.store.touch([identities[: self.matched(identities)]], traffic_class, None)

    def settle(self, rounds: int = 10_000) -> None:
        """Housekeeping until it has nothing left to do at once."""
        for _ in range(rounds):
            if self.store.maintain() >= 1.0:
                return
            self.clock.advance(0.01)
        raise AssertionError("housekeeping does not come to an end")

    def stored(self, identities: Sequence[bytes]) -> list[bool]:
        return [self.store.catalog.where(identity) is not None for identity in identities]


def content(identity: bytes) -> bytes:
    return random.Random(identity).randbytes(SIZE)


def ids(count: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(count)]
