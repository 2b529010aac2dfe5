"""What each call means. Speaks the messages of `cachesvc.rpc` and knows no transport: gRPC and the arena's socket are
shells around it.

Every method may raise `CallError`; anything else is a fault of the daemon. A `session` is given by clients that map the
arena: they are told slot positions instead of being sent bytes.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Final

from cachesvc.accounting import UNCOUNTED, Pass, RowKey
from cachesvc.arena.arena import NO_SLOT, Slot, SlotState, pack_positions
from cachesvc.attachments import Attachments
from cachesvc.classes import TrafficClass, TrafficClasses
from cachesvc.clock import Clock
from cachesvc.errors import BlockUnreadable, CallError, InvalidCall, StoreUnusable, WriteRefused
from cachesvc.index.prefix import Prefix
from cachesvc.index.table import block_ids
from cachesvc.keys import KEY_BYTES, TENANT_BYTES
from cachesvc.leases import LeaseTable, ReadLease, Session, WriteLease, put_chunk
from cachesvc.limits import (
    DEFAULT_RECORD_BYTES,
    MAX_CHUNK_BYTES,
    MAX_KEYS,
    MAX_LEASE_SECONDS,
    MAX_LOAD_WAIT_MS,
    MAX_PAYLOAD_BYTES,
)
from cachesvc.observer import Observer
from cachesvc.promoter import Hold
from cachesvc.record import checksum
from cachesvc.reports import add_lookups, add_store, history, record
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.bulk import MAX_HEADS
from cachesvc.store import Store

_REASONS: Final = frozenset(pb.MissReason.values())
_DRAM: Final = int(pb.Tier.TIER_DRAM)
_DISK: Final = int(pb.Tier.TIER_DISK)
_PRESENT_OR_GRANTED: Final = (int(pb.ReserveState.GRANTED), int(pb.ReserveState.PRESENT))
_NOT_GRANTED: Final = int(pb.CommitState.NOT_GRANTED)
_NOWHERE: Final = Slot(b"", 0, 0, SlotState.LOADING)

# Blocks that are checked again when a reader says that one was damaged: it tells only how many it used before.
_SUSPECTS: Final = 64

# A lease whose keys are all settled is kept this long (seconds) so that a repeated Commit is answered alike.
_SETTLED_LEASE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class Payload:
    """One block on its way to a client. `miss` says why there are no data."""

    number: int
    """Within the match."""
    data: memoryview
    checksum: int
    miss: pb.MissReason.ValueType = pb.MissReason.MISS_REASON_UNSPECIFIED


class Service:
    bulk_port = 0
    """Of the bulk channel, as clients are told; 0 when there is none."""

    def __init__(
        self,
        store: Store,
        classes: TrafficClasses,
        clock: Clock,
        *,
        arena_socket: str = "",
        record: bool = False,
        record_bytes: int = DEFAULT_RECORD_BYTES,
        verify_arena: float = 0.0,
    ) -> None:
        """`arena_socket` is the path that clients on this host are told; empty when there is none.

        `verify_arena` is the share of look-ups whose readers check again what the daemon checked when it came in.
        """
        self.boot_id = secrets.token_bytes(16)
        self.store = store
        self.observer = Observer(store.disk.path, store.catalog, clock, self._gauges, record_bytes)
        self.accounting = self.observer.accounting
        self.events: Counter[str] = Counter()
        self._classes = classes
        self._clock = clock
        self._started = clock.monotonic()
        self._arena_socket = arena_socket
        self._verify_arena = verify_arena
        self._attachments = Attachments(min(MAX_PAYLOAD_BYTES, store.arena.max_payload_bytes))
        self._lock = threading.Lock()
        self._reads: LeaseTable[ReadLease] = LeaseTable(clock)
        self._writes: LeaseTable[WriteLease] = LeaseTable(clock)
        self._being_written: set[bytes] = set()
        self._passes: dict[bytes, bytes] = {}
        if record:
            try:
                self.observer.record(on=True)
            except OSError as error:
                path = self.observer.recorder.path
                raise StoreUnusable(f"cannot record into {path}: {error.strerror}; or leave out --record") from error

    # ---- calls of readers ----------------------------------------------------------------------------------------

    def attach(self, request: pb.AttachRequest) -> pb.AttachReply:
        number, attachment = self._attachments.add(request)
        self.store.disk.namespace_seen(attachment.namespace, request.namespace_json)
        return pb.AttachReply(
            boot_id=self.boot_id,
            attachment=number,
            max_keys=MAX_KEYS,
            max_payload_bytes=min(MAX_PAYLOAD_BYTES, self.store.arena.max_payload_bytes),
            max_chunk_bytes=MAX_CHUNK_BYTES,
            max_lease_ms=int(MAX_LEASE_SECONDS * 1000),
            traffic_classes=self._classes.names,
            arena_socket=self._arena_socket,
            arena_bytes=self.store.arena.memory.size,
            bulk_port=self.bulk_port,
        )

    def match(self, request: pb.MatchRequest, session: Session | None = None) -> pb.MatchReply:
        attachment = self._attachments.get(request.attachment)
        count = _count_keys(request.keys)
        traffic_class = self._classes.named(request.traffic_class)
        asked = count * attachment.block_tokens
        if not max(asked, request.local_tokens) <= request.input_tokens < 2**40:
            raise InvalidCall(
                f"input_tokens {request.input_tokens} is less than the {asked} tokens of {count} keys, less than "
                f"local_tokens {request.local_tokens}, or absurd"
            )
        if len(request.pass_id) not in (0, 16):
            raise InvalidCall(f"pass_id has {len(request.pass_id)} bytes; it must have 16 or be empty")
        if len(request.tenant) not in (0, TENANT_BYTES):
            raise InvalidCall(f"tenant has {len(request.tenant)} bytes; it must have {TENANT_BYTES} or be empty")
        _check_shard(request.shard, len(attachment.shapes))
        if count * len(attachment.shapes) > MAX_KEYS:
            raise InvalidCall(f"{count} keys of {len(attachment.shapes)} shards are asked; {MAX_KEYS} in all can be")
        identities = [block_ids(request.keys, shard) for shard in range(len(attachment.shapes))]
        row = RowKey(traffic_class.name, attachment.model, request.tenant.hex())
        if request.unreachable_tokens:
            self.observer.unreachable(row, min(request.unreachable_tokens, 2**40))
        found, stored, first_miss, place = self.store.catalog.match(
            identities, attachment.shapes, traffic_class, attachment.checkpoints, pin=True
        )
        matched = len(found[0])
        sizes = [shape.payload_bytes for shape in attachment.shapes]
        prefixes = len(sizes) - attachment.checkpoints
        opened = self.accounting.open(
            request.pass_id,
            row,
            block_tokens=attachment.block_tokens,
            block_bytes=sum(sizes[:prefixes]),
            last_bytes=sum(sizes[prefixes:]),
            input_tokens=request.input_tokens,
            local_tokens=request.local_tokens,
            asked_blocks=count,
            matched_blocks=matched,
            reason=first_miss,
            counted=not request.uncounted,
        )
        if request.pass_id:  # after it was withdrawn: it counts only once, and as what it is now
            self._end_pass(request.pass_id)
        if place is not None:
            self.observer.record_ask(place, opened, row, request, identities, attachment.checkpoints)
        for shard, ids in enumerate(identities):
            del ids[matched:]
            if shard >= prefixes:
                del ids[:-1]
        reply = pb.MatchReply(boot_id=self.boot_id, matched_blocks=matched, first_miss=first_miss, stored_blocks=stored)
        if not matched or matched < request.min_blocks:
            reply.tiers = self._tiers(identities[0])
            self._looked_up(opened, request.keys, identities, found, traffic_class, None)
            self.store.catalog.unpin(found)
            self.observer.settle(opened, reply.tiers, 0, pb.MissReason.BYPASSED)
            return reply
        lease = ReadLease(0.0, opened, identities, found, b"", request.pass_id, session=session)
        lease.began = self._clock.monotonic()
        lease.expires, reply.lease_ms = self._reads.deadline(request.lease_ms)
        with self._lock:
            try:
                reply.lease_id = lease.identity = self._reads.add(lease)
            except CallError:
                self.store.catalog.unpin(found)
                self.observer.settle(opened, b"", 0, pb.MissReason.LOAD_ERROR)
                raise
            if request.pass_id:
                self._passes[request.pass_id] = reply.lease_id
            if session is not None:
                session.reads.add(reply.lease_id)
        if session is not None:
            hold = self._hold(lease, request.shard)
            reply.slots, reply.checksums = _positions(hold.slots, check=self._to_check())
            lease.tiers = reply.tiers = _tiers_of(hold.slots)
            session.later = partial(self._looked_up, opened, request.keys, identities, found, traffic_class, hold)
        else:
            self._looked_up(opened, request.keys, identities, found, traffic_class, None)
            lease.tiers = reply.tiers = self._tiers(identities[0])
        return reply

    def load(self, request: pb.LoadRequest) -> pb.LoadReply:
        """Waits for promotion; only for clients that map the arena."""
        lease, last = self._leased(request.lease_id, request.first, request.count, request.shard)
        hold = self._hold(lease, request.shard)
        wait = min(request.wait_ms, MAX_LOAD_WAIT_MS) / 1000
        ready, reason = self.store.ready(hold, request.first, last - request.first, wait)
        slots, checksums = _positions(ready, check=self._to_check())
        return pb.LoadReply(boot_id=self.boot_id, slots=slots, checksums=checksums, miss=reason)

    def get(self, request: pb.GetRequest) -> Iterator[pb.GetReply]:
        boot_id = self.boot_id
        for block in chain.from_iterable(self.payloads(request, 1)):
            if block.miss:
                yield pb.GetReply(boot_id=boot_id, index=block.number, miss=block.miss)
            for offset in range(0, len(block.data), MAX_CHUNK_BYTES):
                chunk = bytes(block.data[offset : offset + MAX_CHUNK_BYTES])
                ends = offset + len(chunk) == len(block.data)
                total = block.checksum if ends else 0
                yield pb.GetReply(
                    boot_id=boot_id, index=block.number, offset=offset, data=chunk, last=ends, checksum=total
                )
                boot_id = b""

    def payloads(self, request: pb.GetRequest, at_least: int) -> Iterator[list[Payload]]:
        """The blocks that a Get asks for; the last may be a miss. Data are valid until the next are asked for.

        They come in batches of about `at_least` bytes.
        """
        lease, last = self._leased(request.lease_id, request.first, request.count, request.shard)
        number = request.first
        part = slice(request.first, last)
        identities, found = lease.identities[request.shard][part], lease.found[request.shard]
        blocks = max(1, min(at_least // found.shape.payload_bytes, MAX_HEADS))
        try:
            for batch in self.store.read(identities, found.entries(part), blocks):
                yield [Payload(number + i, data, total) for i, (data, total) in enumerate(batch)]
                number += len(batch)
        except BlockUnreadable as error:
            reason = pb.MissReason.CORRUPT if error.corrupt else pb.MissReason.LOAD_ERROR
            yield [Payload(number, memoryview(b""), 0, reason)]

    def release(self, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        if request.not_loaded not in _REASONS:
            raise InvalidCall(f"not_loaded is {request.not_loaded}, which is no MissReason")
        with self._lock:
            lease = self._reads.pop(request.lease_id)
            if lease is not None and lease.session is not None:
                lease.session.reads.discard(request.lease_id)
        if lease is not None:
            if request.not_loaded == pb.MissReason.CORRUPT:
                for identities in lease.identities:
                    self.store.recheck(identities[request.loaded_blocks : request.loaded_blocks + _SUSPECTS])
            self._end_read(lease, request.loaded_blocks, request.not_loaded or pb.MissReason.BYPASSED)
        return pb.ReleaseReply(boot_id=self.boot_id)

    # ---- calls of writers ----------------------------------------------------------------------------------------

    def reserve(self, request: pb.ReserveRequest, session: Session | None = None) -> pb.ReserveReply:
        attachment = self._attachments.get(request.attachment)
        _count_keys(request.keys)
        _check_shard(request.shard, len(attachment.shapes))
        traffic_class = self._classes.named(request.traffic_class)
        identities = block_ids(request.keys, request.shard)
        shape = attachment.shapes[request.shard]
        present = self.store.catalog.holds(identities, shape, traffic_class)
        states = bytearray(map(_PRESENT_OR_GRANTED.__getitem__, present))
        lease = WriteLease(0.0, attachment, request.shard, traffic_class, session=session)
        reply = pb.ReserveReply(boot_id=self.boot_id)
        with self._lock:
            wanted = dict(zip(identities, range(len(identities))))  # noqa: B905
            if True in present or len(wanted) < len(identities) or not self._being_written.isdisjoint(wanted):
                wanted = {}
                for index, identity in enumerate(identities):
                    if present[index]:
                        continue
                    if identity in self._being_written or identity in wanted:
                        states[index] = pb.ReserveState.BUSY
                    else:
                        wanted[identity] = index
            slots = self.store.reserve(list(wanted), shape.payload_bytes)
            self._being_written.update([slot.identity for slot in slots])
            indices = list(wanted.values())
            lease.staged = dict(zip(indices, slots))  # noqa: B905  # what finds no slot is refused
            for index in indices[len(slots) :]:
                states[index] = pb.ReserveState.REFUSED
            self.events["refused_reservations"] += len(indices) - len(slots)
            if slots:
                lease.expires, reply.lease_ms = self._writes.deadline(request.lease_ms)
                try:
                    reply.lease_id = self._writes.add(lease)
                except CallError:
                    self._free(self._take_staged(lease))
                    raise
                if session is not None:
                    session.writes.add(reply.lease_id)
        reply.states = bytes(states)
        self.observer.stored(request.keys)
        if session is not None:
            if len(lease.staged) == len(identities):  # given in order
                reply.slots = pack_positions([slot.offset for slot in slots])
            else:
                positions = [NO_SLOT] * len(identities)
                for index, slot in lease.staged.items():
                    positions[index] = slot.offset
                reply.slots = pack_positions(positions)
        return reply

    def put(self, requests: Iterable[pb.PutRequest]) -> pb.PutReply:
        lease: WriteLease | None = None
        received = 0
        for request in requests:
            if len(request.data) > MAX_CHUNK_BYTES:
                raise InvalidCall(f"chunk has {len(request.data)} bytes; the limit is {MAX_CHUNK_BYTES}")
            with self._lock:
                if lease is None or request.lease_id:
                    lease = self._writes.get(request.lease_id)
                slot = lease.staged.get(request.index)
                # Under the lock: the slot cannot be given to another block while bytes are put into it.
                if slot is not None:
                    put_chunk(slot, self.store.arena.view(slot), request.offset, request.data)
                elif request.index not in lease.settled:
                    raise InvalidCall(f"index {request.index} is not granted under this lease")
            received += len(request.data)
        return pb.PutReply(boot_id=self.boot_id, received_bytes=received)

    def begin_put(self, lease_id: bytes, sizes: Mapping[int, int]) -> tuple[WriteLease, dict[int, Slot]]:
        """Takes reserved slots out of their lease, to be filled with so many bytes each; settled ones are left out.

        Raises `LeaseEnded`, `InvalidCall`.
        """
        with self._lock:
            lease = self._writes.get(lease_id)
            for index, size in sizes.items():
                slot = lease.staged.get(index)
                if slot is None and index not in lease.settled:
                    raise InvalidCall(f"index {index} is not granted under this lease, or is being put already")
                if slot is not None and size != slot.payload_bytes:
                    raise InvalidCall(f"{size} bytes are put; payloads of this lease have {slot.payload_bytes}")
            taken = {index: lease.staged.pop(index) for index in sizes if index in lease.staged}
            for slot in taken.values():
                slot.filled = slot.checksum = 0
            lease.filling.update(taken)
        return lease, taken

    def end_put(self, lease: WriteLease, indices: Iterable[int], *, complete: bool) -> None:
        """Gives slots back to their lease, if that has not ended meanwhile; `complete` with a checksum in each."""
        with self._lock:
            for index in indices:
                slot = lease.filling.pop(index)
                if complete:
                    slot.filled = slot.payload_bytes
                lease.staged[index] = slot
            if lease.ended:
                self._free(self._take_staged(lease))

    def commit(self, request: pb.CommitRequest, session: Session | None = None) -> pb.CommitReply:
        if len(request.checksums) not in (len(request.indices), 0 if session is not None else len(request.indices)):
            raise InvalidCall(f"{len(request.indices)} indices come with {len(request.checksums)} checksums")
        checksums = dict(zip(request.indices, request.checksums or repeat(0)))  # noqa: B905  # repeat has no end
        with self._lock:
            lease = self._writes.get(request.lease_id)
            if lease.staged.keys() == checksums.keys():
                taken, lease.staged = lease.staged, {}
            else:
                taken = {index: lease.staged.pop(index) for index in checksums if index in lease.staged}
        identities = [slot.identity for slot in taken.values()]
        try:
            self._settle(lease, taken, checksums, durable=request.durable)
        finally:
            with self._lock:
                self._being_written.difference_update(identities)
                if not lease.staged and not lease.filling:
                    lease.expires = min(lease.expires, self._clock.monotonic() + _SETTLED_LEASE_SECONDS)
        states = bytes(map(lease.settled.get, request.indices, repeat(_NOT_GRANTED)))
        return pb.CommitReply(boot_id=self.boot_id, states=states)

    def abort(self, request: pb.AbortRequest, session: Session | None = None) -> pb.AbortReply:
        with self._lock:
            lease = self._writes.pop(request.lease_id)
            if lease is not None:
                self._free(self._take_staged(lease))
            if session is not None:
                session.writes.discard(request.lease_id)
                self._free(session.aside.pop(request.lease_id, []))
        return pb.AbortReply(boot_id=self.boot_id)

    # ---- housekeeping and reports --------------------------------------------------------------------------------

    def maintain(self) -> None:
        """Ends the leases whose time is over."""
        with self._lock:
            reads = list(self._reads.pop_expired())
            for identity, read in reads:
                if read.session is not None:
                    read.session.reads.discard(identity)
            for identity, lease in self._writes.pop_expired():
                slots = self._take_staged(lease)
                if lease.session is None:
                    self._free(slots)
                elif identity in lease.session.writes:
                    lease.session.writes.discard(identity)
                    if slots:
                        lease.session.aside[identity] = slots
        for _, read in reads:
            self._end_read(read, 0, pb.MissReason.TIMED_OUT)
        self.observer.maintain()

    def saving(self, session: Session) -> bool:
        """Whether the client holds slots that it is to commit."""
        if not session.writes:
            return False
        with self._lock:
            leases = [self._writes.find(identity) for identity in session.writes]
        return any(lease is not None and lease.staged for lease in leases)

    def end_session(self, session: Session) -> None:
        """The client is gone: what it held is free, what it had not committed never existed."""
        with self._lock:
            reads = [read for identity in session.reads if (read := self._reads.pop(identity))]
            for write in [write for identity in session.writes if (write := self._writes.pop(identity))]:
                self._free(self._take_staged(write))
            for slots in session.aside.values():
                self._free(slots)
            session.reads, session.writes, session.aside = set(), set(), {}
        for read in reads:
            self._end_read(read, 0, pb.MissReason.TIMED_OUT)

    def report(self, request: pb.ReportRequest) -> pb.ReportReply:
        del request
        with self._lock:
            staged = sum(
                slot.payload_bytes
                for lease in self._writes.leases()
                for slot in (*lease.staged.values(), *lease.filling.values())
            )
        reply = pb.ReportReply(
            boot_id=self.boot_id,
            uptime_seconds=self._clock.monotonic() - self._started,
            read_leases=len(self._reads),
            write_leases=len(self._writes),
            staged_bytes=staged,
            attachments=len(self._attachments),
            events=dict(self.store.events + self.events + self.observer.events),
        )
        add_store(reply, self.store, self._classes)
        add_lookups(reply, self.accounting)
        return reply

    def history(self, request: pb.HistoryRequest) -> Iterator[pb.HistoryBucket]:
        return history(self.observer, request)

    def record(self, request: pb.RecordRequest) -> pb.RecordReply:
        return record(self.observer, request, self.boot_id)

    def close(self) -> None:
        """Ends all leases, so that everything is counted, and keeps the counts."""
        with self._lock:
            reads = [lease for identity in list(self._reads.identities()) if (lease := self._reads.pop(identity))]
        for read in reads:
            self._end_read(read, 0, pb.MissReason.TIMED_OUT)
        self.observer.close()

    # ---- inside --------------------------------------------------------------------------------------------------

    def _looked_up(
        self,
        opened: Pass,
        keys: bytes,
        identities: Sequence[Sequence[bytes]],
        found: Sequence[Prefix],
        traffic_class: TrafficClass,
        hold: Hold | None,
    ) -> None:
        """What is left to do for a look-up once it is answered."""
        self.observer.asked(opened, keys, found[0])
        self.store.touch(identities, traffic_class, hold, found)

    def _to_check(self) -> bool:
        return self._verify_arena > 0 and random.random() < self._verify_arena

    def _gauges(self) -> dict[str, int]:
        return {
            "bytes": self.store.disk.bytes_used,
            "budget": self.store.disk.budget,
            "blocks": len(self.store.catalog),
            "arena_used": self.store.arena.bytes_used,
            "arena": self.store.arena.memory.size,
        }

    def _leased(self, lease_id: bytes, first: int, count: int, shard: int) -> tuple[ReadLease, int]:
        """The read lease and the end of the wanted blocks. Raises `LeaseEnded`, `InvalidCall`."""
        with self._lock:
            lease = self._reads.get(lease_id)
        last = first + count
        held = [len(found) for found in lease.found]
        if count == 0 or shard >= len(held) or last > held[shard]:
            raise InvalidCall(
                f"blocks {first} to {last} of shard {shard} are asked; the lease holds, by shard, {held[:8]} blocks"
            )
        return lease, last

    def _hold(self, lease: ReadLease, shard: int) -> Hold:
        """The lease's hold on a shard's blocks in the arena, made when it is first asked for."""
        with self._lock:
            hold = lease.holds.get(shard)
            if hold is None:
                hold = self.store.hold(lease.identities[shard], lease.found[shard].shape.payload_bytes)
                lease.holds[shard] = hold
                if lease.ended:
                    self.store.end(hold)
        return hold

    def _tiers(self, identities: Sequence[bytes]) -> bytes:
        """Where each block lies now (its first shard, for all), one byte each."""
        resident = self.store.arena.resident
        return bytes(_DRAM if resident(identity) else _DISK for identity in identities)

    def _end_pass(self, pass_id: bytes) -> None:
        with self._lock:
            identity = self._passes.pop(pass_id, b"")
            earlier = self._reads.pop(identity)
            if earlier is not None and earlier.session is not None:
                earlier.session.reads.discard(identity)
        if earlier is not None:
            self._end_read(earlier, 0, pb.MissReason.TIMED_OUT)

    def _end_read(self, lease: ReadLease, loaded: int, reason: pb.MissReason.ValueType) -> None:
        with self._lock:
            lease.ended = True
            holds = list(lease.holds.values())
            if self._passes.get(lease.pass_id) == lease.identity:
                del self._passes[lease.pass_id]
        for hold in holds:
            self.store.end(hold)
        self.store.catalog.unpin(lease.found)
        if loaded and lease.pass_.number != UNCOUNTED:
            self.observer.loaded(self._clock.monotonic() - lease.began, lease.pass_id)
        self.observer.settle(lease.pass_, lease.tiers, loaded, reason)

    def _settle(self, lease: WriteLease, taken: dict[int, Slot], checksums: dict[int, int], *, durable: bool) -> None:
        """Checks what came over the wire and stores it, and notes the outcome in `lease.settled`.

        What a client wrote into the arena itself is checked by the flusher, or by whoever reads it first.
        """
        sent = lease.session is None
        good = taken
        if sent:
            good = {index: slot for index, slot in taken.items() if self._arrived(lease, index, slot, checksums)}
        if not good:
            return
        shape = lease.attachment.shapes[lease.shard]
        state = pb.CommitState.STORED
        damaged: set[bytes] = set()
        try:
            damaged = self.store.commit(
                list(good.values()),
                [checksums[index] for index in good],
                shape,
                lease.traffic_class,
                verified=sent,
                durable=durable,
            )
        except WriteRefused:
            state = pb.CommitState.WRITE_REFUSED
        else:
            row = RowKey(lease.traffic_class.name, lease.attachment.model)
            self.accounting.add(row, {"stored_blocks": len(good), "stored_bytes": shape.payload_bytes * len(good)})
        lease.settled.update(dict.fromkeys(good, state))
        if damaged:
            mismatch = pb.CommitState.CHECKSUM_MISMATCH
            lease.settled.update({index: mismatch for index, slot in good.items() if slot.identity in damaged})

    def _arrived(self, lease: WriteLease, index: int, slot: Slot, checksums: dict[int, int]) -> bool:
        """Whether a payload came over the wire whole and undamaged; if not, its slot is freed."""
        if slot.filled < slot.payload_bytes:
            lease.settled[index] = pb.CommitState.INCOMPLETE
        elif (slot.checksum or checksum(self.store.arena.view(slot))) != checksums[index]:
            lease.settled[index] = pb.CommitState.CHECKSUM_MISMATCH
            self.events["checksum_mismatches"] += 1
        else:
            return True
        self.store.arena.abandon(slot)
        return False

    def _take_staged(self, lease: WriteLease) -> list[Slot]:
        """Under the lock: ends the reservation of what is not settled; the slots are the caller's to free."""
        lease.ended = True
        slots = list(lease.staged.values())
        lease.staged.clear()
        self._being_written.difference_update(slot.identity for slot in slots)
        return slots

    def _free(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self.store.arena.abandon(slot)


def _positions(slots: Sequence[Slot | None], *, check: bool) -> tuple[bytes, bytes]:
    """Offsets and checksums of slots, packed; those that are not ready are NO_SLOT.

    A checksum is given where the daemon has not checked the bytes yet, and everywhere with `check`: the reader does, or
    takes it for a miss.
    """
    known = slots if None not in slots else [slot or _NOWHERE for slot in slots]
    if check:
        return b"".join([slot.position for slot in known]), b"".join([slot.to_check for slot in known])  # type: ignore[union-attr]
    return b"".join([slot.position for slot in known]), b"".join([slot.unchecked for slot in known])  # type: ignore[union-attr]


def _tiers_of(slots: Sequence[Slot | None]) -> bytes:
    if None not in slots:
        return bytes([_DRAM]) * len(slots)
    return bytes(_DISK if slot is None else _DRAM for slot in slots)


def _check_shard(shard: int, shards: int) -> None:
    if shard >= shards:
        raise InvalidCall(f"shard {shard} is asked; the namespace has {shards}")


def _count_keys(packed: bytes) -> int:
    count, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise InvalidCall(f"keys field has {len(packed)} bytes, not a multiple of {KEY_BYTES}")
    if count > MAX_KEYS:
        raise InvalidCall(f"{count} keys are asked; the limit is {MAX_KEYS}")
    return count
