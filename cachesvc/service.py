"""What each call means. Speaks the messages of `cachesvc.rpc` and knows no transport: gRPC is a shell around it.

Every method may raise `CallError`; anything else is a fault of the daemon.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from cachesvc import __version__
from cachesvc.accounting import Accounting, Row
from cachesvc.classes import TrafficClasses
from cachesvc.clock import Clock
from cachesvc.errors import BlockUnreadable, InvalidCall, KeySchemeMismatch, StaleAttachment, WriteRefused
from cachesvc.index.table import block_id
from cachesvc.keys import (
    KEY_SCHEME_VERSION,
    canonical_json,
    namespace_digest,
    self_test_vector,
    unpack_keys,
)
from cachesvc.leases import Attachment, LeaseTable, ReadLease, Staging, WriteLease
from cachesvc.limits import (
    MAX_ATTACHMENTS,
    MAX_CHUNK_BYTES,
    MAX_CLIENT_NAME_BYTES,
    MAX_KEYS,
    MAX_LEASE_SECONDS,
    MAX_NAMESPACE_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_SHARDS,
)
from cachesvc.record import checksum
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.store import NewBlock, Store, Wanted

# A lease whose keys are all settled is kept this long (seconds) so that a repeated Commit is answered alike.
_SETTLED_LEASE_SECONDS = 5.0


class Service:
    def __init__(self, store: Store, classes: TrafficClasses, clock: Clock, *, staging_bytes: int) -> None:
        self.boot_id = secrets.token_bytes(16)
        self.accounting = Accounting()
        self.store = store
        self._classes = classes
        self._clock = clock
        self._started = clock.monotonic()
        self._self_test = self_test_vector()
        self._staging_budget = staging_bytes
        self._staged = 0
        self._lock = threading.Lock()
        self._attachments: OrderedDict[int, Attachment] = OrderedDict()
        self._reads: LeaseTable[ReadLease] = LeaseTable(clock)
        self._writes: LeaseTable[WriteLease] = LeaseTable(clock)
        self._being_written: set[tuple[bytes, int]] = set()
        self._passes: dict[bytes, bytes] = {}
        self.events: Counter[str] = Counter()

    # ---- calls ---------------------------------------------------------------------------------------------------

    def attach(self, request: pb.AttachRequest) -> pb.AttachReply:
        if request.key_scheme != KEY_SCHEME_VERSION or request.self_test_vector != self._self_test:
            raise KeySchemeMismatch(
                f"client names blocks by scheme {request.key_scheme} (self-test {request.self_test_vector.hex()}), "
                f"this daemon by {KEY_SCHEME_VERSION} ({self._self_test.hex()}); run the same release on both ends"
            )
        attachment = _parse_namespace(request)
        with self._lock:
            for other in self._attachments.values():
                if other.digest == attachment.digest and other.payload_bytes != attachment.payload_bytes:
                    raise InvalidCall(
                        f"payload sizes {list(attachment.payload_bytes)} differ from {list(other.payload_bytes)}, with "
                        "which another client attached the same namespace; put the layout into the namespace"
                    )
            identity = next((i for i, a in self._attachments.items() if a == attachment), 0)
            identity = identity or secrets.randbits(63) | 1
            self._attachments[identity] = attachment
            self._attachments.move_to_end(identity)
            if len(self._attachments) > MAX_ATTACHMENTS:
                self._attachments.popitem(last=False)
        self.store.namespace_seen(attachment.digest, request.namespace_json)
        return pb.AttachReply(
            boot_id=self.boot_id,
            attachment=identity,
            max_keys=MAX_KEYS,
            max_payload_bytes=MAX_PAYLOAD_BYTES,
            max_chunk_bytes=MAX_CHUNK_BYTES,
            max_lease_ms=int(MAX_LEASE_SECONDS * 1000),
            traffic_classes=self._classes.names,
        )

    def match(self, request: pb.MatchRequest) -> pb.MatchReply:
        attachment = self._attachment(request.attachment)
        keys = _keys(request.keys)
        traffic_class = self._classes.named(request.traffic_class)
        asked = len(keys) * attachment.block_tokens
        if not max(asked, request.local_tokens) <= request.input_tokens < 2**40:
            raise InvalidCall(
                f"input_tokens {request.input_tokens} is less than the {asked} tokens of {len(keys)} keys, less than "
                f"local_tokens {request.local_tokens}, or absurd"
            )
        if len(request.pass_id) not in (0, 16):
            raise InvalidCall(f"pass_id has {len(request.pass_id)} bytes; it must have 16 or be empty")
        if request.pass_id:
            self._end_pass(request.pass_id)
        rows, first_miss = self.store.catalog.match(attachment.digest, keys, attachment.payload_bytes, traffic_class)
        if request.unreachable_tokens:
            self.accounting.unreachable(traffic_class.name, attachment.model, min(request.unreachable_tokens, 2**40))
        opened = self.accounting.open(
            request.pass_id,
            traffic_class.name,
            attachment.model,
            block_tokens=attachment.block_tokens,
            input_tokens=request.input_tokens,
            local_tokens=request.local_tokens,
            asked_blocks=len(keys),
            matched_blocks=len(rows),
            reason=first_miss,
        )
        tiers = [pb.Tier.TIER_DISK] * len(rows)
        reply = pb.MatchReply(boot_id=self.boot_id, matched_blocks=len(rows), tiers=bytes(tiers), first_miss=first_miss)
        if not rows or len(rows) < request.min_blocks:
            self.accounting.settle(opened, tiers, 0, pb.MissReason.BYPASSED)
            return reply
        lease = ReadLease(0.0, opened, keys[: len(rows)], rows)
        lease.expires, reply.lease_ms = self._reads.deadline(request.lease_ms)
        with self._lock:
            try:
                reply.lease_id = self._reads.add(lease)
            except Exception:
                self.accounting.settle(opened, tiers, 0, pb.MissReason.LOAD_ERROR)
                raise
            self.store.pin(entry for row in rows for entry in row)
            if request.pass_id:
                self._passes[request.pass_id] = reply.lease_id
                lease.pass_id = request.pass_id
        return reply

    def get(self, request: pb.GetRequest) -> Iterator[pb.GetReply]:
        with self._lock:
            lease = self._reads.get(request.lease_id)
        last = request.first + request.count
        if request.count == 0 or last > len(lease.rows) or request.shard >= len(lease.rows[0]):
            raise InvalidCall(
                f"blocks {request.first} to {last} of shard {request.shard} are asked; the lease holds "
                f"{len(lease.rows)} blocks of {len(lease.rows[0])} shards"
            )
        wanted = [
            Wanted(lease.keys[i], request.shard, lease.rows[i][request.shard]) for i in range(request.first, last)
        ]
        boot_id = self.boot_id
        index = request.first
        try:
            for index, payload in enumerate(self.store.read(wanted), request.first):
                for offset in range(0, len(payload), MAX_CHUNK_BYTES):
                    chunk = bytes(payload[offset : offset + MAX_CHUNK_BYTES])
                    ends = offset + len(chunk) == len(payload)
                    yield pb.GetReply(
                        boot_id=boot_id,
                        index=index,
                        offset=offset,
                        data=chunk,
                        last=ends,
                        checksum=lease.rows[index][request.shard].checksum if ends else 0,
                    )
                    boot_id = b""
                self.accounting.add(lease.pass_.row, loaded_bytes=len(payload))
                index += 1
        except BlockUnreadable as error:
            reason = pb.MissReason.CORRUPT if error.corrupt else pb.MissReason.LOAD_ERROR
            yield pb.GetReply(boot_id=boot_id, index=index, miss=reason)

    def reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:
        attachment = self._attachment(request.attachment)
        keys = _keys(request.keys)
        if request.shard >= len(attachment.payload_bytes):
            raise InvalidCall(f"shard {request.shard} is asked; the namespace has {len(attachment.payload_bytes)}")
        traffic_class = self._classes.named(request.traffic_class)
        size = attachment.payload_bytes[request.shard]
        accepts = self.store.accepts_writes()
        present = [self.store.catalog.holds(block_id(key, request.shard), traffic_class) for key in keys]
        states = bytearray()
        lease = WriteLease(0.0, attachment, request.shard, size, traffic_class, keys, {})
        with self._lock:
            for index, key in enumerate(keys):
                if present[index]:
                    states.append(pb.ReserveState.PRESENT)
                elif (key, request.shard) in self._being_written:
                    states.append(pb.ReserveState.BUSY)
                elif not accepts or self._staged + size > self._staging_budget:
                    states.append(pb.ReserveState.REFUSED)
                    self.events["refused_reservations"] += 1
                else:
                    states.append(pb.ReserveState.GRANTED)
                    self._being_written.add((key, request.shard))
                    self._staged += size
                    lease.staged[index] = Staging(bytearray(size))
            reply = pb.ReserveReply(boot_id=self.boot_id, states=bytes(states))
            if lease.staged:
                lease.expires, reply.lease_ms = self._writes.deadline(request.lease_ms)
                try:
                    reply.lease_id = self._writes.add(lease)
                except Exception:
                    self._drop_staged(lease)
                    raise
        return reply

    def put(self, requests: Iterable[pb.PutRequest]) -> pb.PutReply:
        lease: WriteLease | None = None
        received = 0
        for request in requests:
            if lease is None or request.lease_id:
                with self._lock:
                    lease = self._writes.get(request.lease_id)
            if len(request.data) > MAX_CHUNK_BYTES:
                raise InvalidCall(f"chunk has {len(request.data)} bytes; the limit is {MAX_CHUNK_BYTES}")
            with self._lock:
                staging = lease.staged.get(request.index)
                if staging is not None:
                    staging.put(request.offset, request.data)
                elif request.index not in lease.settled:
                    raise InvalidCall(f"index {request.index} is not granted under this lease")
            received += len(request.data)
        return pb.PutReply(boot_id=self.boot_id, received_bytes=received)

    def commit(self, request: pb.CommitRequest) -> pb.CommitReply:
        if len(request.indices) != len(request.checksums):
            raise InvalidCall(f"{len(request.indices)} indices come with {len(request.checksums)} checksums")
        with self._lock:
            lease = self._writes.get(request.lease_id)
            taken: dict[int, Staging] = {}
            for index in request.indices:
                if index in lease.staged:
                    taken[index] = lease.staged.pop(index)
        try:
            self._settle(lease, taken, dict(zip(request.indices, request.checksums, strict=True)), request)
        finally:
            with self._lock:
                for index in taken:
                    self._unstage(lease, index)
                if not lease.staged:
                    lease.expires = min(lease.expires, self._clock.monotonic() + _SETTLED_LEASE_SECONDS)
        states = bytes(lease.settled.get(i, pb.CommitState.NOT_GRANTED) for i in request.indices)
        return pb.CommitReply(boot_id=self.boot_id, states=states)

    def abort(self, request: pb.AbortRequest) -> pb.AbortReply:
        with self._lock:
            lease = self._writes.pop(request.lease_id)
            if lease is not None:
                self._drop_staged(lease)
        return pb.AbortReply(boot_id=self.boot_id)

    def release(self, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        with self._lock:
            lease = self._reads.pop(request.lease_id)
        if lease is not None:
            self._end_read(lease, request.loaded_blocks, request.not_loaded or pb.MissReason.BYPASSED)
        return pb.ReleaseReply(boot_id=self.boot_id)

    def report(self, request: pb.ReportRequest) -> pb.ReportReply:
        del request
        census = self.store.catalog.census()
        with self._lock:
            reply = pb.ReportReply(
                boot_id=self.boot_id,
                version=__version__,
                uptime_seconds=self._clock.monotonic() - self._started,
                store_bytes=self.store.bytes_used,
                store_budget_bytes=self.store.budget,
                segments=self.store.segments,
                blocks=len(self.store.catalog),
                read_leases=len(self._reads),
                write_leases=len(self._writes),
                staged_bytes=self._staged,
                attachments=len(self._attachments),
                events=dict(self.store.events + self.events),
                health=self.store.health,
                store_path=str(self.store.path),
            )
        for name, model, row in self.accounting.rows():
            reply.lookups.append(_lookup_row(name, model, row))
        for traffic_class in self._classes:
            count, size = census.get(traffic_class.name, (0, 0))
            reply.classes.add(
                traffic_class=traffic_class.name, ttl_seconds=int(traffic_class.ttl), blocks=count, payload_bytes=size
            )
        return reply

    def maintain(self) -> None:
        """Ends the leases whose time is over."""
        with self._lock:
            reads = list(self._reads.pop_expired())
            for lease in self._writes.pop_expired():
                self._drop_staged(lease)
        for read in reads:
            self._end_read(read, 0, pb.MissReason.TIMED_OUT)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _attachment(self, identity: int) -> Attachment:
        with self._lock:
            attachment = self._attachments.get(identity)
            if attachment is None:
                raise StaleAttachment(f"attachment {identity} is not of this boot of the daemon; attach again")
            self._attachments.move_to_end(identity)
            return attachment

    def _end_pass(self, pass_id: bytes) -> None:
        with self._lock:
            earlier = self._reads.pop(self._passes.pop(pass_id, b""))
        if earlier is not None:
            self._end_read(earlier, 0, pb.MissReason.TIMED_OUT)

    def _end_read(self, lease: ReadLease, loaded: int, reason: pb.MissReason.ValueType) -> None:
        self.store.unpin(entry for row in lease.rows for entry in row)
        with self._lock:
            self._passes.pop(lease.pass_id, None)
        self.accounting.settle(lease.pass_, [pb.Tier.TIER_DISK] * len(lease.rows), loaded, reason)

    def _settle(
        self,
        lease: WriteLease,
        taken: dict[int, Staging],
        checksums: dict[int, int],
        request: pb.CommitRequest,
    ) -> None:
        """Checks and stores what was staged, and notes the outcome in `lease.settled`."""
        good: list[tuple[int, NewBlock]] = []
        for index, staging in taken.items():
            if staging.filled < len(staging.payload):
                lease.settled[index] = pb.CommitState.INCOMPLETE
            elif checksum(staging.payload) != checksums[index]:
                lease.settled[index] = pb.CommitState.CHECKSUM_MISMATCH
                self.events["checksum_mismatches"] += 1
            else:
                good.append((index, NewBlock(lease.keys[index], lease.shard, staging.payload, checksums[index])))
        if not good:
            return
        size = lease.payload_bytes
        state = pb.CommitState.STORED
        try:
            self.store.append(
                lease.attachment.digest,
                size,
                lease.traffic_class,
                [block for _, block in good],
                durable=request.durable,
            )
        except WriteRefused:
            state = pb.CommitState.WRITE_REFUSED
        else:
            row = self.accounting.row(lease.traffic_class.name, lease.attachment.model)
            self.accounting.add(row, stored_blocks=len(good), stored_bytes=size * len(good))
        for index, _ in good:
            lease.settled[index] = state

    def _drop_staged(self, lease: WriteLease) -> None:
        for index in list(lease.staged):
            del lease.staged[index]
            self._unstage(lease, index)

    def _unstage(self, lease: WriteLease, index: int) -> None:
        self._being_written.discard((lease.keys[index], lease.shard))
        self._staged -= lease.payload_bytes


def _parse_namespace(request: pb.AttachRequest) -> Attachment:
    text = request.namespace_json
    if len(text) > MAX_NAMESPACE_BYTES or len(request.client.encode()) > MAX_CLIENT_NAME_BYTES:
        raise InvalidCall(
            f"namespace has {len(text)} characters (limit {MAX_NAMESPACE_BYTES}) or the client's name is over "
            f"{MAX_CLIENT_NAME_BYTES} bytes"
        )
    try:
        fields = json.loads(text)
        canonical = canonical_json(fields)
        model, block_tokens, shards = str(fields["model"]), int(fields["block_tokens"]), int(fields["shards"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidCall(f"namespace_json is not the JSON of a namespace: {error!r}") from error
    if canonical != text or not 0 < shards <= MAX_SHARDS or not 0 < block_tokens <= 1 << 20:
        raise InvalidCall(
            f"namespace_json must be canonical (sorted keys, no spaces), with 1 to {MAX_SHARDS} shards (has {shards}) "
            f"and positive block_tokens (has {block_tokens})"
        )
    sizes = tuple(request.payload_bytes)
    if len(sizes) != shards or not all(0 < size <= MAX_PAYLOAD_BYTES for size in sizes):
        raise InvalidCall(
            f"payload_bytes is {list(sizes[:8])}; it must name a size from 1 to {MAX_PAYLOAD_BYTES} for each of "
            f"{shards} shards"
        )
    return Attachment(namespace_digest(text).hex(), model, block_tokens, sizes)


def _keys(packed: bytes) -> list[bytes]:
    try:
        keys = unpack_keys(packed)
    except ValueError as error:
        raise InvalidCall(str(error)) from error
    if len(keys) > MAX_KEYS:
        raise InvalidCall(f"{len(keys)} keys are asked; the limit is {MAX_KEYS}")
    return keys


def _lookup_row(traffic_class: str, model: str, row: Row) -> pb.LookupRow:
    return pb.LookupRow(
        traffic_class=traffic_class,
        model=model,
        passes=row.passes,
        input_tokens=row.input,
        local_tokens=row.local,
        pending_tokens=row.pending,
        hit_tokens=dict(+row.hits),
        miss_tokens=dict(+row.misses),
        loaded_bytes=row.loaded_bytes,
        stored_blocks=row.stored_blocks,
        stored_bytes=row.stored_bytes,
    )
