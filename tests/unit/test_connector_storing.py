"""A save over the arena, against a daemon that says what it is told to say."""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cachesvc.connector import storing
from cachesvc.connector.arena import NO_SLOT, Arena
from cachesvc.connector.copying import Copier
from cachesvc.connector.payloads import Payloads, Region
from cachesvc.keys import KEY_BYTES
from cachesvc.rpc import cache_pb2 as pb

SIZE = 4096
KEYS = [bytes([number]) * KEY_BYTES for number in range(6)]


class ScriptedArena:
    """One block a part. `script` holds the state that each reservation is answered with."""

    boot_id = b"b" * 16

    def __init__(self, script: Sequence[int]) -> None:
        self.memory = mmap.mmap(-1, SIZE * len(script))
        self.sent: list[tuple[str, bytes]] = []
        self._script = script
        self._replies: list[tuple[str, Any]] = []
        self.session = SimpleNamespace(lock=threading.Lock(), alive=True)

    @contextmanager
    def pipeline(self, deadline_s: float) -> Iterator[ScriptedArena]:
        yield self
        assert self._replies == [], "an answer is left in the connection"

    def send(self, name: str, request: Any) -> None:
        number = sum(sent == "Reserve" for sent, _ in self.sent)
        reply: Any = pb.AbortReply(boot_id=self.boot_id)
        if name == "Reserve":
            state = self._script[number]
            slot = number * SIZE if state == pb.GRANTED else NO_SLOT
            reply = pb.ReserveReply(
                boot_id=self.boot_id,
                states=bytes([state]),
                lease_id=bytes([number]) * 16,
                lease_ms=60_000,
                slots=struct.pack("<Q", slot),
            )
        elif name == "Commit":
            reply = pb.CommitReply(boot_id=self.boot_id, states=bytes([pb.STORED]) * len(request.indices))
        self.sent.append((name, b"" if name == "Reserve" else request.lease_id[:1]))
        self._replies.append((name, reply))

    def receive(self, name: str) -> Any:
        called, reply = self._replies.pop(0)
        assert called == name, f"the answer to {called} was taken for one to {name}"
        return reply

    def writable(self, offsets: Sequence[int], size: int) -> Payloads:
        return Payloads(Region(memoryview(self.memory)), offsets, size)


def store(script: Sequence[int]) -> tuple[storing.Stored, ScriptedArena]:
    arena = ScriptedArena(script)
    payloads = [memoryview(bytearray(bytes([number + 1]) * SIZE)) for number in range(len(script))]
    stored = storing.store_in_arena(
        cast(Arena, arena),
        Copier(1),
        lambda keys: pb.ReserveRequest(keys=b"".join(keys)),
        KEYS[: len(script)],
        payloads,
        checksums=True,
        durable=False,
        deadline_s=5.0,
    )
    return stored, arena


@pytest.fixture(autouse=True)
def one_block_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "_PART_BYTES", SIZE)


def test_what_is_granted_is_copied_and_committed() -> None:
    stored, arena = store([pb.GRANTED, pb.PRESENT, pb.BUSY, pb.GRANTED])
    assert stored.reserved == bytes([pb.GRANTED, pb.PRESENT, pb.BUSY, pb.GRANTED])
    assert stored.committed == bytes([pb.STORED, 0, 0, pb.STORED])
    assert [bytes(arena.memory[i * SIZE : i * SIZE + 1]) for i in range(4)] == [b"\1", b"\0", b"\0", b"\4"]


def test_nothing_is_stored_behind_a_hole() -> None:
    stored, arena = store([pb.GRANTED, pb.REFUSED, pb.GRANTED, pb.PRESENT, pb.GRANTED])
    assert stored.reserved == bytes([pb.GRANTED, pb.REFUSED, pb.REFUSED, pb.PRESENT, pb.REFUSED])
    assert stored.committed == bytes([pb.STORED, 0, 0, 0, 0])
    assert arena.sent[5:] == [("Commit", b"\0"), ("Abort", b"\2"), ("Abort", b"\4")]
