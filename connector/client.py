"""The wire, thinly: one method per call, a deadline on each, errors of `errors`, every reply's boot id compared.

No policy lives here. The channels are made at the first call, never at import or construction, because gRPC does not
survive a fork: only the process that calls owns them. There are two, so that a look-up never queues behind payloads.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import grpc
import xxhash

from cachesvc.connector import forks
from cachesvc.connector.arena import Arena, ArenaUnavailable, Session, slot_positions
from cachesvc.connector.bulk import BulkChannel, BulkReplies
from cachesvc.connector.copying import Copier, PayloadCopier
from cachesvc.connector.errors import BadAnswer, CacheError, NotAttached, Rejected, Unreachable, from_rpc_error
from cachesvc.connector.options import MAX_CHUNK_BYTES, MESSAGE_SLACK_BYTES, CacheOptions
from cachesvc.connector.payloads import Pieces
from cachesvc.connector.storing import Stored, store_in_arena
from cachesvc.keys import KEY_SCHEME_VERSION, pack_keys, self_test_vector
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.address import Address
from cachesvc.rpc.cache_pb2_grpc import CacheStub

BOOT_ID_BYTES: Final = 16
LEASE_BYTES: Final = 16

_CHANNEL_OPTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("grpc.max_receive_message_length", MAX_CHUNK_BYTES + MESSAGE_SLACK_BYTES),
    ("grpc.max_send_message_length", MAX_CHUNK_BYTES + MESSAGE_SLACK_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

logger = logging.getLogger("cachesvc.connector")

_self_test_vector = functools.cache(self_test_vector)


@dataclass(frozen=True)
class Attachment:
    """What the daemon answered to Attach: valid for one boot of it."""

    id: int
    boot_id: bytes
    max_keys: int
    max_payload_bytes: int
    max_chunk_bytes: int
    max_lease_ms: int
    traffic_classes: tuple[str, ...]

    def lease_ms(self, seconds: float) -> int:
        return min(int(seconds * 1000), self.max_lease_ms)


@dataclass(frozen=True)
class Match:
    blocks: int
    lease_id: bytes  # empty when nothing is leased
    ends: float = 0.0  # when the lease may end at the earliest, by `time.monotonic`
    arena: Arena | None = None  # where payloads lie, when they are not to be fetched
    session: Session | None = None  # on which the lease was taken: it is good as long as that lives
    slots: Sequence[int] = ()  # positions in it by block, or NO_SLOT: not there yet
    checksums: Sequence[int] = ()  # of those bytes that the reader must check himself, else 0
    tiers: bytes = b""  # one `pb.Tier` per block
    stored_blocks: int = 0  # all that is stored, with a checkpoint at its end or without


class Replies(Protocol):
    """The stream of a Get."""

    def __iter__(self) -> Iterator[pb.GetReply]: ...
    def cancel(self) -> Any: ...


class Client:
    """Calls of one daemon, from any thread. Each has a deadline of the options, and raises `CacheError`."""

    def __init__(
        self, address: Address, options: CacheOptions, shard: int = 0, copier: PayloadCopier | None = None
    ) -> None:
        self.address = address
        self._options = options
        self._shard = shard
        self._lock = threading.Lock()
        self._channels: list[grpc.Channel] = []
        self._stubs: list[CacheStub] = []
        self._arena: Arena | None = None
        self._bulk: BulkChannel | None = None
        self._copier = copier or Copier(options.copy_threads)
        self._complained = False
        self._closed = False

    def close(self) -> None:
        """Ends all calls that are under way (they raise `Unreachable`) and refuses new ones."""
        with self._lock:
            self._closed = True
            channels, self._channels = self._channels, []
            arena, self._arena = self._arena, None
            bulk, self._bulk = self._bulk, None
        self._copier.close()
        for way in (arena, bulk):
            if way is not None:
                way.close()
        for channel in channels:
            channel.close()

    def attach(self, namespace_json: str, payload_bytes: Sequence[int], checkpoint_shards: int = 0) -> Attachment:
        """Waits for both connections, up to the deadline each. Raises `Rejected` when this client can never be served.

        Idempotent, so it is sent over either: afterwards none of the two is waiting for its time to reconnect.
        """
        request = pb.AttachRequest(
            namespace_json=namespace_json,
            self_test_vector=_self_test_vector(),
            key_scheme=KEY_SCHEME_VERSION,
            payload_bytes=payload_bytes,
            checkpoint_shards=checkpoint_shards,
            client=f"pid {os.getpid()}, Python {sys.version_info.major}.{sys.version_info.minor}",
        )
        try:
            for stub in self._both_stubs():
                reply = self._call("Attach", request, self._options.control_deadline_s, stub=stub, wait_for_ready=True)
        except NotAttached as error:  # for Attach the status means that the key schemes differ
            raise Rejected(str(error)) from error
        attachment = Attachment(
            id=reply.attachment,
            boot_id=reply.boot_id,
            max_keys=reply.max_keys,
            max_payload_bytes=reply.max_payload_bytes,
            max_chunk_bytes=min(reply.max_chunk_bytes, MAX_CHUNK_BYTES),
            max_lease_ms=reply.max_lease_ms,
            traffic_classes=tuple(reply.traffic_classes),
        )
        if len(attachment.boot_id) != BOOT_ID_BYTES or not (
            attachment.max_keys and attachment.max_chunk_bytes and attachment.traffic_classes
        ):
            raise BadAnswer(f"Attach: boot id, limits or traffic classes are missing in {attachment}")
        if max(payload_bytes) > attachment.max_payload_bytes:
            raise Rejected(f"a block has {max(payload_bytes)} bytes, the daemon takes {attachment.max_payload_bytes}")
        self._use_arena(reply.arena_socket, request, reply.boot_id)
        self._use_bulk(reply.bulk_port, reply.boot_id)
        return attachment

    @property
    def arena(self) -> Arena | None:
        """Through which payloads go, if they go through shared memory."""
        return self._arena

    def match(
        self,
        attachment: Attachment,
        keys: Sequence[bytes],
        *,
        traffic_class: str,
        input_tokens: int,
        local_tokens: int,
        min_blocks: int,
        pass_id: bytes,
        unreachable_tokens: int,
        tenant: bytes = b"",
        deadline_s: float,
        counted: bool = True,
    ) -> Match:
        """Waits no longer than `deadline_s`, the rest of what the pass has."""
        request = pb.MatchRequest(
            attachment=attachment.id,
            keys=pack_keys(keys),
            traffic_class=traffic_class,
            input_tokens=input_tokens,
            local_tokens=local_tokens,
            min_blocks=min_blocks,
            lease_ms=attachment.lease_ms(self._options.read_lease_s),
            pass_id=pass_id,
            unreachable_tokens=unreachable_tokens,
            tenant=tenant,
            uncounted=not counted,
            shard=self._shard,
        )
        arena, asked = self._arena, time.monotonic()
        reply = self._call("Match", request, deadline_s, attachment, arena=arena)
        blocks, stored = reply.matched_blocks, max(reply.stored_blocks, reply.matched_blocks)
        if stored > len(keys):
            raise BadAnswer(f"Match: {stored} blocks matched of {len(keys)} asked")
        ends = asked + reply.lease_ms / 1000
        if arena is None or not reply.lease_id:
            return Match(blocks, reply.lease_id, ends, tiers=reply.tiers, stored_blocks=stored)
        slots = slot_positions(reply.slots, blocks, "Match")
        checksums = slot_positions(reply.checksums, blocks, "Match")
        return Match(blocks, reply.lease_id, ends, arena, arena.session, slots, checksums, reply.tiers, stored)

    def load(
        self, match: Match, shard: int, *, first: int, count: int, wait_s: float
    ) -> tuple[Sequence[int], Sequence[int], int]:
        """Positions and checksums (see `Match`) of blocks that are ready by then; why the next one never will be."""
        assert match.arena is not None, "only blocks in the arena can be loaded"
        request = pb.LoadRequest(
            lease_id=match.lease_id, first=first, count=count, shard=shard, wait_ms=int(wait_s * 1000)
        )
        # The daemon answers within `wait_s`; beyond that it gets what any other call has.
        reply = match.arena.call("Load", request, wait_s + self._options.load_stall_s)
        ready = len(reply.slots) // 8
        if ready > count:
            raise BadAnswer(f"Load: {ready} blocks came of {count} asked")
        positions = slot_positions(reply.slots, ready, "Load")
        return positions, slot_positions(reply.checksums, ready, "Load"), reply.miss

    def get(self, lease_id: bytes, shard: int, *, first: int, count: int, deadline_s: float) -> Replies:
        """The raw stream; whoever iterates it maps its errors with `from_rpc_error` and cancels it at the end."""
        request = pb.GetRequest(lease_id=lease_id, first=first, count=count, shard=shard)
        replies: Replies = self._start("Get", request, deadline_s)
        return replies

    @property
    def has_bulk(self) -> bool:
        """Whether payloads that do not go through shared memory go through the bulk channel."""
        return self._bulk is not None

    def bulk_get(self, lease_id: bytes, shard: int, *, first: int, count: int, deadline_s: float) -> BulkReplies:
        """`get` over the bulk channel."""
        request = pb.GetRequest(lease_id=lease_id, first=first, count=count, shard=shard)
        bulk = self._bulk
        if bulk is None:
            raise Unreachable("Get: this client is closed")
        return bulk.get(request, deadline_s)

    def release(
        self, attachment: Attachment, match: Match, loaded_blocks: int, not_loaded: pb.MissReason.ValueType
    ) -> None:
        request = pb.ReleaseRequest(lease_id=match.lease_id, loaded_blocks=loaded_blocks, not_loaded=not_loaded)
        self._call("Release", request, self._options.control_deadline_s, attachment, arena=match.arena)

    def store(
        self,
        attachment: Attachment,
        keys: Sequence[bytes],
        payloads: Sequence[memoryview] | Sequence[Pieces],
        traffic_class: str,
        *,
        shard: int | None = None,
        checksums: bool = True,
    ) -> Stored:
        """Reserves, copies or sends, and commits blocks of one prefix, in order. Payloads are of one size.

        `shard` is this client's own unless it is given. `checksums` False leaves them to the daemon, where the payloads
        go into the arena.
        """
        arena = self._arena
        shard = self._shard if shard is None else shard
        request = partial(self._reserve_request, attachment, traffic_class, shard)
        if arena is None:
            return self._store_by_calls(attachment, request, keys, payloads)
        return store_in_arena(
            arena,
            self._copier,
            request,
            keys,
            payloads,
            checksums=checksums,
            durable=self._options.durable,
            deadline_s=self._options.save_deadline_s,
        )

    def _store_by_calls(
        self,
        attachment: Attachment,
        request: Callable[[Sequence[bytes]], pb.ReserveRequest],
        keys: Sequence[bytes],
        payloads: Sequence[memoryview] | Sequence[Pieces],
    ) -> Stored:
        reply = self._call("Reserve", request(keys), self._options.save_deadline_s, attachment)
        states: bytes = reply.states
        if len(states) != len(keys) or (pb.GRANTED in states and len(reply.lease_id) != LEASE_BYTES):
            raise BadAnswer(f"Reserve: {len(states)} states for {len(keys)} keys, lease {reply.lease_id.hex()!r}")
        granted = [index for index, state in enumerate(states) if state == pb.GRANTED]
        committed = bytearray(len(keys))
        if granted:
            try:
                views = [_in_one_place(payloads[index]) for index in granted]
                sums = self._put(attachment, reply.lease_id, granted, views)
                outcome = self._commit(attachment, reply.lease_id, granted, sums)
            except CacheError:
                self._abort(reply.lease_id)
                raise
            for index, state in zip(granted, outcome, strict=True):
                committed[index] = state
        return Stored(states, bytes(committed))

    def _reserve_request(
        self, attachment: Attachment, traffic_class: str, shard: int, keys: Sequence[bytes]
    ) -> pb.ReserveRequest:
        return pb.ReserveRequest(
            attachment=attachment.id,
            keys=pack_keys(keys),
            shard=shard,
            traffic_class=traffic_class,
            lease_ms=attachment.lease_ms(self._options.write_lease_s),
        )

    def _put(
        self, attachment: Attachment, lease_id: bytes, indices: Sequence[int], payloads: Sequence[memoryview]
    ) -> list[int]:
        """Sends payloads; returns their checksums."""
        bulk, deadline_s = self._bulk, self._options.save_deadline_s
        if bulk is not None:
            reply, sums = bulk.put(lease_id, indices, payloads, deadline_s)
        else:
            sums = [xxhash.xxh3_64_intdigest(payload) for payload in payloads]
            chunks = _chunks(lease_id, indices, payloads, attachment.max_chunk_bytes)
            reply = self._call("Put", chunks, deadline_s, attachment)
        sent = sum(payload.nbytes for payload in payloads)
        if reply.received_bytes != sent:
            raise BadAnswer(f"Put: {reply.received_bytes} bytes received of {sent} sent")
        return sums

    def _commit(
        self, attachment: Attachment, lease_id: bytes, indices: Sequence[int], checksums: Sequence[int]
    ) -> bytes:
        """One pb.CommitState per index."""
        request = pb.CommitRequest(
            lease_id=lease_id, indices=indices, checksums=checksums, durable=self._options.durable
        )
        reply = self._call("Commit", request, self._options.save_deadline_s, attachment)
        if len(reply.states) != len(indices):
            raise BadAnswer(f"Commit: {len(reply.states)} states for {len(indices)} blocks")
        return bytes(reply.states)

    def _abort(self, lease_id: bytes) -> None:
        """A write lease that cannot be aborted ends by itself."""
        try:
            self._call("Abort", pb.AbortRequest(lease_id=lease_id), self._options.control_deadline_s)
        except CacheError:
            logger.debug("a write lease is left to end by itself", exc_info=True)

    def _use_arena(self, path: str, request: pb.AttachRequest, boot_id: bytes) -> None:
        """Maps the daemon's arena if it has one and this process can; says once, plainly, when it cannot."""
        with self._lock:
            known = self._arena
        if known is not None and known.boot_id == boot_id and known.reachable(self._options.control_deadline_s):
            return  # calls may be under way on it
        arena = None
        if path and self._options.shared_memory:
            try:
                arena = Arena(path, request, boot_id, self._options.control_deadline_s)
            except ArenaUnavailable as error:
                if not self._complained:
                    logger.warning(
                        "payloads go over gRPC, for the daemon's shared memory is not available here: %s", error
                    )
                self._complained = True
        with self._lock:
            old, self._arena = self._arena, None if self._closed else arena
        for unused in (old, arena if self._closed else None):
            if unused is not None:
                unused.close()

    def _use_bulk(self, port: int, boot_id: bytes) -> None:
        """Where the daemon was reached over TCP; its connections are made when they are needed."""
        bulk = BulkChannel(self.address.host, port, boot_id) if port and self.address.path is None else None
        with self._lock:
            if bulk is not None and self._bulk is not None and self._bulk.boot_id == boot_id:
                return  # calls may be under way on it
            old, self._bulk = self._bulk, None if self._closed else bulk
        if old is not None:
            old.close()

    def _call(
        self,
        name: str,
        request: Any,
        deadline_s: float,
        attachment: Attachment | None = None,
        *,
        arena: Arena | None = None,
        **how: Any,
    ) -> Any:
        try:
            if arena is not None:
                reply = arena.call(name, request, max(0.001, deadline_s))
            else:
                reply = self._start(name, request, deadline_s, **how)
        except grpc.RpcError as error:
            raise from_rpc_error(error, name) from error
        if attachment is not None and reply is not None and reply.boot_id != attachment.boot_id:
            raise NotAttached(f"{name}: boot {reply.boot_id.hex()} answers, attached to {attachment.boot_id.hex()}")
        return reply

    def _start(
        self, name: str, request: Any, deadline_s: float, *, stub: CacheStub | None = None, wait_for_ready: bool = False
    ) -> Any:
        method = getattr(stub or self._both_stubs()[name in ("Get", "Put")], name)
        try:
            return method(request, timeout=max(0.001, deadline_s), wait_for_ready=wait_for_ready)
        except ValueError as error:  # gRPC's answer on a channel that another thread has just closed
            raise Unreachable(f"{name}: {error}") from error

    def _both_stubs(self) -> list[CacheStub]:
        """For control, for payloads."""
        with self._lock:
            if self._closed:
                raise Unreachable("this client is closed")
            if not self._channels:
                if not forks.prepare():
                    raise Unreachable("this process was forked from one that has used the cache: spawn it instead")
                self._channels = [grpc.insecure_channel(str(self.address), options=_CHANNEL_OPTIONS) for _ in range(2)]
                self._stubs = [CacheStub(channel) for channel in self._channels]
            return self._stubs


def _in_one_place(payload: memoryview | Pieces) -> memoryview:
    return payload.joined() if isinstance(payload, Pieces) else payload


def _chunks(
    lease_id: bytes, indices: Sequence[int], payloads: Sequence[memoryview], chunk_bytes: int
) -> Iterator[pb.PutRequest]:
    for index, payload in zip(indices, payloads, strict=True):
        for offset in range(0, payload.nbytes, chunk_bytes):
            data = bytes(payload[offset : offset + chunk_bytes])
            yield pb.PutRequest(lease_id=lease_id, index=index, offset=offset, data=data)
            lease_id = b""  # the contract wants it in the first message only
