"""Storing blocks through the arena: reserving and committing go on in the daemon while payloads are being copied.

All reservations are sent at once, each for a part of the blocks; each part is committed as soon as it is copied. The
answers are read at the end. So only the first reservation and the last commit are waited for: those parts are short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from cachesvc.connector.arena import Arena, Pipeline, slot_positions
from cachesvc.connector.copying import PayloadCopier
from cachesvc.connector.errors import BadAnswer, LeaseLost, NotAttached
from cachesvc.connector.payloads import SLOT_PAGE, Elsewhere, Pieces
from cachesvc.rpc import cache_pb2 as pb

# Blocks of the first and last part, and of those between: many enough that what a part costs itself does not count.
_SHORT: Final = 16
_LONG: Final = 256
# Bytes of a part at most: it is copied in one go, some milliseconds, without a look at the lease.
_PART_BYTES: Final = 64 << 20


class Stored(NamedTuple):
    """What became of each key: its `ReserveState`, and its `CommitState` where it was granted."""

    reserved: bytes
    committed: bytes


def store_in_arena(
    arena: Arena,
    copier: PayloadCopier,
    request: Callable[[Sequence[bytes]], pb.ReserveRequest],
    keys: Sequence[bytes],
    payloads: Sequence[memoryview] | Sequence[Pieces],
    *,
    checksums: bool,
    durable: bool,
    deadline_s: float,
) -> Stored:
    """`request` makes a reservation for some of the keys. Raises `CacheError`; what was not committed never existed."""
    parts = _parts(len(keys), payloads[0].nbytes)
    reserved, committed = bytearray(), bytearray()
    with arena.pipeline(deadline_s) as calls:
        asked = time.monotonic()
        for part in parts:
            calls.send("Reserve", request(keys[part]))
        granted: list[list[int]] = []
        aborts = 0
        for part in parts:
            reply = calls.receive("Reserve")
            count = len(keys[part])
            if reply.boot_id != arena.boot_id:
                raise NotAttached(f"Reserve: boot {reply.boot_id.hex()} answers, attached to {arena.boot_id.hex()}")
            if len(reply.states) != count:
                raise BadAnswer(f"Reserve: {len(reply.states)} states for {count} keys")
            here = [index for index, state in enumerate(reply.states) if state == pb.GRANTED]
            if here and pb.REFUSED in reserved:  # room was found again, but these lie behind a hole in the prefix
                calls.send("Abort", pb.AbortRequest(lease_id=reply.lease_id))
                aborts += 1
                reserved += reply.states.replace(bytes([pb.GRANTED]), bytes([pb.REFUSED]))
                granted.append([])
                continue
            reserved += reply.states
            granted.append(here)
            if here:
                slots = slot_positions(reply.slots, count, "Reserve")
                ends = asked + reply.lease_ms / 1000
                sums = _fill(calls, arena, copier, slots, ends, here, payloads[part], checksums=checksums)
                calls.send(
                    "Commit",
                    pb.CommitRequest(lease_id=reply.lease_id, indices=here, checksums=sums, durable=durable),
                )
        for part, indices in zip(parts, granted, strict=True):
            states = bytearray(len(keys[part]))
            if indices:
                reply = calls.receive("Commit")
                if len(reply.states) != len(indices):
                    raise BadAnswer(f"Commit: {len(reply.states)} states for {len(indices)} blocks")
                for index, state in zip(indices, reply.states, strict=True):
                    states[index] = state
            committed += states
        for _ in range(aborts):
            calls.receive("Abort")
    return Stored(bytes(reserved), bytes(committed))


def _fill(
    calls: Pipeline,
    arena: Arena,
    copier: PayloadCopier,
    slots: Sequence[int],
    ends: float,
    granted: list[int],
    payloads: Sequence[memoryview] | Sequence[Pieces],
    *,
    checksums: bool,
) -> list[int]:
    """Copies payloads into their slots. Raises `LeaseLost` when the lease has ended."""
    if len(granted) < len(payloads):
        slots = [slots[index] for index in granted]
        payloads = _pick(payloads, granted)
    size = payloads.payload_bytes if isinstance(payloads, Elsewhere) else payloads[0].nbytes
    targets = arena.writable(slots, size)
    with calls.session.lock:
        if not calls.session.alive or time.monotonic() >= ends:
            raise LeaseLost("the write lease ended while its slots were being filled")
        return copier.copy(targets, payloads, checksums=checksums, padding=-size % SLOT_PAGE)


def _pick(
    payloads: Sequence[memoryview] | Sequence[Pieces], indices: Sequence[int]
) -> Sequence[memoryview] | Sequence[Pieces]:
    if isinstance(payloads, Elsewhere):
        return payloads.pick(indices)
    return [payloads[index] for index in indices]  # type: ignore[return-value]


def _parts(count: int, size: int) -> list[slice]:
    """A short one, long ones, a short one."""
    most = max(1, _PART_BYTES // size)
    short, long = min(_SHORT, most), min(_LONG, most)
    starts = [0, *range(min(short, count), max(short, count - short), long)]
    if count > 2 * short:
        starts.append(count - short)
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], count], strict=True) if start < end]
