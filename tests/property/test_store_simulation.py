"""The store against a model, on a clock and a disk that the test holds: kills, losses of power, failing writes, damage.

What must be there: every block that was acknowledged as durable, or that a clean end or an earlier restart has shown,
until its TTL has passed since the last use that is on disk. What must never be: another byte than was saved. No thread
runs, so that a failure repeats.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from fault_files import ERRORS, FaultFiles
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cachesvc.classes import TrafficClasses
from cachesvc.clock import ManualClock
from cachesvc.errors import BlockUnreadable, WriteRefused
from cachesvc.index.table import Entry
from cachesvc.record import PAGE, checksum, record_bytes
from cachesvc.segments.format import footer_bytes, shape_of
from cachesvc.store import Store

SIZE = 600
STRIDE = record_bytes(SIZE)
SHAPE = shape_of("ab" * 32, SIZE)
CLASSES = TrafficClasses({"agent": 1_000.0, "chat": 3_000.0})
POOL = [bytes([number]) * 16 for number in range(48)]
SAVED_SECONDS = 21.0
"""Uses of longer ago are in the durable index, if housekeeping has run since."""
NEVER = -1e18


def content(identity: bytes) -> bytes:
    return random.Random(identity).randbytes(SIZE)


@dataclass
class Block:
    kept_from: float = NEVER
    """Its last use that no crash forgets, if the block must be there."""
    acknowledged: bool = False
    used: float = NEVER
    traffic_class: str = "agent"
    saved: float = NEVER
    """When it was written first: what is left of its uses when the index is deleted."""


class StoreMachine(RuleBasedStateMachine):
    steps = 0
    found: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(
            tempfile.mkdtemp(prefix="simulation-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        )
        self.patch = pytest.MonkeyPatch()
        self.clock = ManualClock()
        self.number = self.step = 0
        self.blocks: dict[bytes, Block] = {}
        self.files = FaultFiles(self.path, self.patch)
        self.open()

    @property
    def path(self) -> Path:
        return self.directory / f"store{self.number}"

    def open(self) -> None:
        self.store = Store(
            self.path,
            budget=1 << 30,
            segment_bytes=PAGE + 4 * STRIDE,
            arena_bytes=1 << 20,
            slab_bytes=1 << 18,
            arena_policy="lru",
            classes=CLASSES,
            clock=self.clock,
            rewrite_rate=4 << 20,
            background=False,
        )

    def teardown(self) -> None:
        self.files.broken = 0
        self.store.close()
        self.patch.undo()
        shutil.rmtree(self.directory)

    # ---- what clients do -----------------------------------------------------------------------------------------

    @rule(first=st.integers(0, len(POOL) - 1), count=st.integers(1, 6), durable=st.booleans(), chat=st.booleans())
    def save(self, first: int, count: int, durable: bool, chat: bool) -> None:
        name = "chat" if chat else "agent"
        traffic_class = CLASSES.named(name)
        wanted = POOL[first : first + count]
        held = self.store.catalog.holds(wanted, SHAPE, traffic_class)
        for identity in [i for i, there in zip(wanted, held, strict=True) if there]:
            self.used(identity, name)
        slots = self.store.reserve([i for i, there in zip(wanted, held, strict=True) if not there], SIZE)
        for slot in slots:
            self.store.arena.view(slot)[:] = content(slot.identity)
        sums = [checksum(self.store.arena.view(slot)) for slot in slots]
        try:
            self.store.commit(slots, sums, SHAPE, traffic_class, verified=True, durable=durable)
        except WriteRefused:
            for slot in slots:
                self.blocks[slot.identity] = Block()  # it may be there
            return
        now = self.clock.now()
        for slot in slots:
            self.blocks[slot.identity] = Block(now if durable else NEVER, True, now, name, now)

    @rule(first=st.integers(0, len(POOL) - 1), count=st.integers(1, 8), chat=st.booleans())
    def use(self, first: int, count: int, chat: bool) -> None:
        name = "chat" if chat else "agent"
        traffic_class = CLASSES.named(name)
        for identity in POOL[first : first + count]:
            if self.store.catalog.match([[identity]], [SHAPE], traffic_class).entries[0]:
                self.store.touch([[identity]], traffic_class, None)
                self.used(identity, name)

    def used(self, identity: bytes, name: str) -> None:
        block = self.blocks.setdefault(identity, Block())
        block.used = self.clock.now()
        if name == "chat":
            block.traffic_class = name

    @rule()
    def drain(self) -> None:
        self.store.drain()

    # ---- time ----------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from((1.0, 25.0, 120.0, 400.0, 900.0)))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(rounds=st.integers(1, 40))
    def maintain(self, rounds: int) -> None:
        for _ in range(rounds):
            self.store.maintain()
            self.clock.advance(0.05)

    # ---- what goes wrong -----------------------------------------------------------------------------------------

    @rule(error=st.sampled_from(ERRORS), short=st.booleans())
    def writes_fail(self, error: int, short: bool) -> None:
        self.files.broken, self.files.short = error, short

    @rule()
    def writes_work(self) -> None:
        self.files.broken = 0

    @rule(index=st.sampled_from(("kept", "kept", "deleted")))
    def kill(self, index: str) -> None:
        """SIGKILL: every write that was made is there."""
        target = self.directory / f"store{self.number + 1}"
        shutil.copytree(self.path, target)
        self.restart(target, index)

    @rule(index=st.sampled_from(("kept", "deleted")), seed=st.integers(0, 2**32))
    def lose_power(self, index: str, seed: int) -> None:
        self.files.lose_power(self.directory / f"store{self.number + 1}", random.Random(seed))
        self.restart(self.directory / f"store{self.number + 1}", index)

    @rule()
    def end(self) -> None:
        self.files.broken = 0
        self.clock.advance(6)  # past the time for which the disk is left alone after a refusal
        self.store.drain()
        self.store.close()
        for block in self.blocks.values():
            if block.acknowledged:
                block.kept_from = max(block.kept_from, block.used)
        self.open()
        self.files.moved(self.path)
        self.see()

    @rule(pick=st.integers(0, 2**32), bit=st.integers(0, 7))
    def flip_a_bit(self, pick: int, bit: int) -> None:
        """In any byte of any record on disk; the block in it need not be there any more."""
        entries = [(i, e) for i in POOL if (e := self.store.catalog.where(i)) is not None and e.segment is not None]
        if not entries:
            return
        identity, entry = entries[pick % len(entries)]
        assert entry.segment is not None
        offset = entry.segment.head.offset(entry.record) + pick % STRIDE
        with contextlib.suppress(FileNotFoundError), entry.segment.path.open("r+b", buffering=0) as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1 << bit]))
        self.blocks[identity] = Block(used=self.blocks.get(identity, Block()).used)
        self.count("flipped bits")

    def restart(self, target: Path, index: str) -> None:
        old, self.files.broken = self.store, 0
        if index == "deleted":
            shutil.rmtree(target / "index", ignore_errors=True)
            for block in self.blocks.values():
                block.kept_from = min(block.kept_from, block.saved)
        self.number += 1
        with self.others():
            old.close()
        shutil.rmtree(self.directory / f"store{self.number - 1}")
        self.open()
        self.files.moved(self.path)
        self.see()
        self.count(f"restarts, index {index}")

    @contextlib.contextmanager
    def others(self) -> Iterator[None]:
        """While the store that was left behind is closed: nobody looks at its files any more."""
        self.files.root = Path("/nowhere")
        yield

    def see(self) -> None:
        """After a start: what was lost was allowed to be; what is there has come from files, and so must stay."""
        for identity in POOL:
            block = self.blocks.setdefault(identity, Block())
            entry = self.store.catalog.where(identity)
            if entry is None or entry.expires <= self.clock.now() or not self.readable(identity, entry):
                assert not self.required(identity), f"block {identity[0]} is lost"
                self.blocks[identity] = Block()
            else:
                block.used, block.acknowledged = entry.used, True
                block.traffic_class = entry.traffic_class.name
                block.kept_from = max(block.kept_from, entry.used)

    def readable(self, identity: bytes, entry: Entry) -> bool:
        try:
            ((payload, _),) = next(self.store.read([identity], [entry], 1))
        except BlockUnreadable:
            self.count("counted misses")
            return False
        assert payload == content(identity), f"block {identity[0]} has wrong bytes"
        return True

    def required(self, identity: bytes) -> bool:
        block = self.blocks[identity]
        return block.kept_from + 1_000.0 > self.clock.now()

    # ---- what always holds ---------------------------------------------------------------------------------------

    @invariant()
    def what_must_be_there_is_there_and_right(self) -> None:
        StoreMachine.steps += 1
        self.step += 1
        for identity in self.blocks:
            entry = self.store.catalog.where(identity)
            if entry is None:
                assert not self.required(identity), f"block {identity[0]} is lost"
                continue
            if self.step % 7 == 0:  # reading all of them each time is slow
                assert self.readable(identity, entry) or not self.required(identity), f"block {identity[0]} is lost"

    @invariant()
    def files_are_what_the_store_thinks(self) -> None:
        known = self.store.disk._files.segments.values()
        assert sum(segment.size for segment in known) == self.store.disk._files.used
        if not self.files.broken and self.store.disk.health == "ok":
            for segment in known:
                to_come = 0 if segment.sealed else footer_bytes(segment.records)
                assert segment.size - to_come <= os.path.getsize(segment.path) <= segment.size, segment.path

    @initialize()
    def begin(self) -> None:
        self.files.moved(self.path)

    @classmethod
    def count(cls, name: str) -> None:
        cls.found[name] += 1


def simulate(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def test_whatever_fails_nothing_durable_is_lost_and_no_byte_is_wrong() -> None:
    simulate(10, 30)


@pytest.mark.long
@pytest.mark.timeout(1_800)
def test_the_same_for_many_steps() -> None:
    simulate(int(os.environ.get("SIMULATION_EXAMPLES", "100")), 100)
    assert StoreMachine.found["flipped bits"] > 100 < StoreMachine.found["restarts, index kept"]
