"""Leases, reservations and sessions against a model, by the service's own calls and without a network.

Writers write whenever they may: also late, after their lease has ended, as long as their session lives. Whatever
happens in whatever order, a visible block holds what its writer committed, and no reader's bytes change under it.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachesvc.arena.arena import NO_SLOT, Slot
from cachesvc.classes import DEFAULT_TTLS, TrafficClasses
from cachesvc.clock import ManualClock
from cachesvc.errors import CallError
from cachesvc.keys import KEY_SCHEME_VERSION, Namespace, self_test_vector
from cachesvc.leases import Session, WriteLease
from cachesvc.record import checksum
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.service import Service
from cachesvc.store import Store

SIZE = 4096
KEYS = [bytes([number]) * 16 for number in range(10)]
SOME = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)


@dataclass
class Writer:
    session: Session | None
    lease_id: bytes
    keys: list[bytes]
    slots: dict[int, int]
    """Offsets by index, of what was granted and is not settled."""
    contents: dict[int, bytes] = field(default_factory=dict)


@dataclass
class Reader:
    session: Session
    lease_id: bytes
    contents: dict[int, bytes]
    """By offset: what it found there."""


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.clock = ManualClock()
        classes = TrafficClasses(DEFAULT_TTLS)
        self.store = Store(
            self.directory / "store",
            budget=64 << 20,
            segment_bytes=1 << 20,
            arena_bytes=64 << 12,
            slab_bytes=8 << 12,
            arena_policy="lru",
            classes=classes,
            clock=self.clock,
        )
        self.service = Service(self.store, classes, self.clock)
        namespace = Namespace("leases", "1", "uint8")
        request = pb.AttachRequest(
            namespace_json=namespace.canonical_json(),
            self_test_vector=self_test_vector(),
            key_scheme=KEY_SCHEME_VERSION,
            payload_bytes=[SIZE],
        )
        self.attachment = self.service.attach(request).attachment
        self.sessions = [Session() for _ in range(3)]
        self.writers: list[Writer] = []
        self.late: list[Writer] = []
        """Writers whose lease has ended while their session lives: they do not know it, and may still write."""
        self.filling: list[tuple[WriteLease, int, Slot, bytes]] = []
        self.readers: list[Reader] = []
        self.visible: dict[bytes, bytes] = {}
        self.counter = 0

    def teardown(self) -> None:
        for session in self.sessions:
            self.service.end_session(session)
        for lease, index, _, _ in self.filling:
            self.service.end_put(lease, [index], complete=False)
        self.clock.advance(10_000)
        self.service.maintain()
        self.store.arena.check()
        held = [slot for slot in self.store.arena._at.values() if slot.identity not in self.visible]
        assert held == [], "slots are held by nobody"
        assert self.service._being_written == set()
        self.store.close()
        shutil.rmtree(self.directory)

    def text(self) -> bytes:
        self.counter += 1
        return struct.pack("<Q", self.counter) * (SIZE // 8)

    def write(self, offset: int, content: bytes) -> None:
        self.store.arena.memory.view[offset : offset + SIZE] = content

    # ---- writers -------------------------------------------------------------------------------------------------

    @rule(keys=SOME, number=st.integers(0, 2), seconds=st.sampled_from([5, 50]))
    def reserve(self, keys: list[bytes], number: int, seconds: int) -> None:
        session = self.sessions[number]
        request = pb.ReserveRequest(
            attachment=self.attachment, keys=b"".join(keys), traffic_class="agent", lease_ms=1000 * seconds
        )
        reply = self.service.reserve(request, session)
        offsets = struct.unpack(f"<{len(keys)}Q", reply.slots)
        granted = {i: offset for i, offset in enumerate(offsets) if reply.states[i] == pb.GRANTED}
        assert all(offsets[i] == NO_SLOT for i in range(len(keys)) if i not in granted)
        assert not {keys[i] for i in granted} & set(self.visible), "what is stored is not to be written again"
        others = {o for w in (*self.writers, *self.late) for o in w.slots.values()}
        others |= {offset for reader in self.readers for offset in reader.contents}
        assert not others & set(granted.values()), "a slot was given away that somebody may still touch"
        if granted:
            self.writers.append(Writer(session, reply.lease_id, keys, granted))

    @precondition(lambda self: self.writers or self.late)
    @rule(data=st.data())
    def write_some(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from([*self.writers, *self.late]))
        for index, offset in writer.slots.items():
            writer.contents[index] = self.text()
            self.write(offset, writer.contents[index])

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), summed=st.booleans())
    def commit(self, data: st.DataObject, summed: bool) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        indices = data.draw(st.lists(st.sampled_from(sorted(writer.slots)), unique=True)) if writer.slots else []
        for index in indices:
            writer.contents[index] = self.text()
            self.write(writer.slots[index], writer.contents[index])
        sums = [checksum(writer.contents[index]) for index in indices] if summed else []
        request = pb.CommitRequest(lease_id=writer.lease_id, indices=indices, checksums=sums)
        states = self.service.commit(request, writer.session).states
        assert list(states) == [pb.STORED] * len(indices)
        for index in indices:
            del writer.slots[index]
            self.visible[writer.keys[index]] = writer.contents[index]

    @precondition(lambda self: self.writers or self.late)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from([*self.writers, *self.late]))
        self.service.abort(pb.AbortRequest(lease_id=writer.lease_id), writer.session)
        for group in (self.writers, self.late):
            if writer in group:
                group.remove(writer)

    # ---- writers whose payloads travel ---------------------------------------------------------------------------

    @rule(key=st.sampled_from(KEYS), seconds=st.sampled_from([5, 50]))
    def begin_put(self, key: bytes, seconds: int) -> None:
        request = pb.ReserveRequest(
            attachment=self.attachment, keys=key, traffic_class="agent", lease_ms=1000 * seconds
        )
        reply = self.service.reserve(request)
        if reply.states[0] == pb.GRANTED:
            lease, slots = self.service.begin_put(reply.lease_id, {0: SIZE})
            self.filling.append((lease, 0, slots[0], reply.lease_id))

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), complete=st.booleans(), right=st.booleans())
    def end_put(self, data: st.DataObject, complete: bool, right: bool) -> None:
        lease, index, slot, lease_id = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        content = self.text()
        self.write(slot.offset, content)
        slot.checksum = checksum(content)
        ended = lease.ended
        self.service.end_put(lease, [index], complete=complete)
        total = checksum(content) if right else 1
        try:
            reply = self.service.commit(pb.CommitRequest(lease_id=lease_id, indices=[0], checksums=[total]))
        except CallError:
            assert ended or lease.expires <= self.clock.monotonic()
            return
        stored = list(reply.states) == [pb.STORED]
        assert stored == (complete and right and not ended), "only what is whole and right is stored"
        if stored:
            self.visible[slot.identity] = content

    # ---- readers -------------------------------------------------------------------------------------------------

    @rule(keys=SOME, number=st.integers(0, 2), seconds=st.sampled_from([5, 50]))
    def match(self, keys: list[bytes], number: int, seconds: int) -> None:
        session = self.sessions[number]
        request = pb.MatchRequest(
            attachment=self.attachment,
            keys=b"".join(keys),
            traffic_class="agent",
            input_tokens=128 * len(keys),
            lease_ms=1000 * seconds,
        )
        reply = self.service.match(request, session)
        if session.later is not None:
            session.later()
            session.later = None
        expected = next((i for i, key in enumerate(keys) if key not in self.visible), len(keys))
        assert reply.matched_blocks == expected, "exactly what is visible is found"
        if not reply.lease_id:
            return
        found: dict[int, bytes] = {}
        for key, offset in zip(keys, struct.unpack(f"<{expected}Q", reply.slots), strict=False):
            if offset != NO_SLOT:
                found[offset] = self.visible[key]
        self.readers.append(Reader(session, reply.lease_id, found))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reader = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        self.service.release(pb.ReleaseRequest(lease_id=reader.lease_id, loaded_blocks=1))

    # ---- time, and ends ------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([3, 30]))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)
        self.service.maintain()
        alive = self.service._writes._leases
        for writer in [w for w in self.writers if w.lease_id not in alive]:
            self.writers.remove(writer)
            self.late.append(writer)
        self.readers = [r for r in self.readers if r.lease_id in self.service._reads._leases]

    @rule(number=st.integers(0, 2))
    def a_client_dies(self, number: int) -> None:
        session = self.sessions[number]
        self.service.end_session(session)
        self.sessions[number] = Session()
        self.writers = [writer for writer in self.writers if writer.session is not session]
        self.late = [writer for writer in self.late if writer.session is not session]
        self.readers = [reader for reader in self.readers if reader.session is not session]

    @invariant()
    def readers_see_what_was_committed(self) -> None:
        self.store.arena.check()
        view = self.store.arena.memory.view
        for reader in self.readers:
            for offset, content in reader.contents.items():
                assert view[offset : offset + SIZE] == content, "a reader's bytes changed under it"


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
