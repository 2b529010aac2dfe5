"""Leases: time-limited holds that end by themselves.

===========  ==================================  =====================================================
state        read lease                          write lease
===========  ==================================  =====================================================
taken        Match found blocks                  Reserve granted keys
in use       Get streams them, Load says where   Put or the client itself fills slots; Commit settles them
ended        Release, a repeated pass, or time   Abort, or time: what is not settled never existed
===========  ==================================  =====================================================

A client that maps the arena may still be writing when its lease ends. Its slots are kept aside, given to nobody, until
it says that it has stopped (Abort) or its session closes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from cachesvc.accounting import Pass
from cachesvc.arena.arena import Slot
from cachesvc.attachments import Attachment
from cachesvc.classes import TrafficClass
from cachesvc.clock import Clock
from cachesvc.errors import InvalidCall, LeaseEnded, LimitReached
from cachesvc.index.prefix import Prefix
from cachesvc.limits import DEFAULT_LEASE_SECONDS, MAX_LEASE_SECONDS, MAX_LEASES
from cachesvc.promoter import Hold
from cachesvc.rpc.cache_pb2 import CommitState

LEASE_ID_BYTES: Final = 16

# Lease ids are drawn from the system this many at a time.
_IDS_AT_ONCE: Final = 256


class Session:
    """One connection to the arena's socket. Its closing ends the leases that were taken on it."""

    def __init__(self) -> None:
        self.reads: set[bytes] = set()
        self.writes: set[bytes] = set()
        self.later: Callable[[], None] | None = None
        """What is left to do once the reply is sent: the client does not wait for it."""
        self.aside: dict[bytes, list[Slot]] = {}
        """Slots of ended write leases, by lease, that the client may still be writing to."""


def put_chunk(slot: Slot, payload: memoryview, offset: int, data: bytes) -> None:
    """One chunk of a payload on its way into its slot: they arrive in order; repeating one is harmless.

    Raises `InvalidCall` for a gap or for bytes past the payload.
    """
    end = offset + len(data)
    if offset > slot.filled:
        raise InvalidCall(f"chunk at {offset} leaves a gap: the payload has {slot.filled} bytes so far")
    if end > len(payload):
        raise InvalidCall(f"chunk ends at {end}; payloads of this namespace and shard have {len(payload)} bytes")
    payload[offset:end] = data
    slot.checksum = 0
    slot.filled = max(slot.filled, end)


@dataclass(slots=True, eq=False)
class ReadLease:
    expires: float
    pass_: Pass
    identities: list[list[bytes]]
    """Block ids by shard and block."""
    found: list[Prefix]
    """Where they lay, by shard; their files are kept for this lease."""
    tiers: bytes
    """Where each block lay at the match."""
    pass_id: bytes = b""
    began: float = 0.0
    identity: bytes = b""
    ended: bool = False
    holds: dict[int, Hold] = field(default_factory=dict)
    """Positions in the arena by shard, for clients that map it."""
    session: Session | None = None


@dataclass(slots=True, eq=False)
class WriteLease:
    expires: float
    attachment: Attachment
    shard: int
    traffic_class: TrafficClass
    staged: dict[int, Slot] = field(default_factory=dict)
    """Slots of granted keys that are not settled, by index."""
    filling: dict[int, Slot] = field(default_factory=dict)
    """Those that the bulk channel is just receiving into: nobody commits or frees them meanwhile."""
    ended: bool = False
    settled: dict[int, CommitState.ValueType] = field(default_factory=dict)
    session: Session | None = None


Lease = TypeVar("Lease", ReadLease, WriteLease)


class LeaseTable(Generic[Lease]):
    """Leases by id. Not thread-safe: the service's lock covers it. At `MAX_LEASES` new ones are refused."""

    def __init__(self, clock: Clock, limit: int = MAX_LEASES) -> None:
        self._clock = clock
        self._limit = limit
        self._leases: dict[bytes, Lease] = {}
        self._random = b""

    def __len__(self) -> int:
        return len(self._leases)

    def deadline(self, wanted_ms: int) -> tuple[float, int]:
        """End (monotonic seconds) and life (ms) of a lease for which `wanted_ms` was asked (0: the default)."""
        seconds = min(wanted_ms / 1000 or DEFAULT_LEASE_SECONDS, MAX_LEASE_SECONDS)
        return self._clock.monotonic() + seconds, int(seconds * 1000)

    def add(self, lease: Lease) -> bytes:
        """Raises `LimitReached`."""
        if len(self._leases) >= self._limit:
            raise LimitReached(f"{self._limit} leases are taken; release some or wait for them to end")
        if not self._random:
            self._random = secrets.token_bytes(LEASE_ID_BYTES * _IDS_AT_ONCE)
        identity, self._random = self._random[:LEASE_ID_BYTES], self._random[LEASE_ID_BYTES:]
        self._leases[identity] = lease
        return identity

    def get(self, identity: bytes) -> Lease:
        """Raises `LeaseEnded` for an unknown or ended one."""
        lease = self._leases.get(identity)
        if lease is None or lease.expires <= self._clock.monotonic():
            raise LeaseEnded(f"lease {identity.hex()[:32] or '(empty)'} is unknown or has ended")
        return lease

    def find(self, identity: bytes) -> Lease | None:
        """It, whatever its time, or None."""
        return self._leases.get(identity)

    def identities(self) -> list[bytes]:
        return list(self._leases)

    def leases(self) -> list[Lease]:
        return list(self._leases.values())

    def pop(self, identity: bytes) -> Lease | None:
        return self._leases.pop(identity, None)

    def pop_expired(self) -> Iterator[tuple[bytes, Lease]]:
        now = self._clock.monotonic()
        for identity in [i for i, lease in self._leases.items() if lease.expires <= now]:
            yield identity, self._leases.pop(identity)
