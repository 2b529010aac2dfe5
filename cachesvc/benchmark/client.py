"""Puts and gets as an engine's connector makes them: the same client, the same readers, the same checks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import xxhash

from cachesvc.benchmark.buffers import Blocks
from cachesvc.benchmark.process import BenchError
from cachesvc.cli._daemon import fetch_report
from cachesvc.connector.buffers import Slots
from cachesvc.connector.client import Client, Match
from cachesvc.connector.copying import Copier
from cachesvc.connector.errors import CacheError
from cachesvc.connector.loading import BlockReader, BulkReader, Reader, SlotReader
from cachesvc.connector.options import CacheOptions
from cachesvc.keys import BLOCK_TOKENS, KEY_BYTES, Namespace
from cachesvc.record import PAGE
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.address import parse_address

_CLASS: Final = "agent"
_DEADLINE_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.02
_OPTIONS: Final = CacheOptions(
    save_deadline_s=_DEADLINE_SECONDS, load_deadline_s=_DEADLINE_SECONDS, control_deadline_s=10.0
)
_REMOTE_OPTIONS: Final = CacheOptions(
    save_deadline_s=_DEADLINE_SECONDS,
    load_deadline_s=_DEADLINE_SECONDS,
    control_deadline_s=10.0,
    shared_memory=False,
)


def fresh_keys(count: int) -> list[bytes]:
    """Keys of blocks that nobody has ever stored."""
    return [os.urandom(KEY_BYTES) for _ in range(count)]


class BenchClient:
    """One namespace of its own with payloads of one size. Raises `BenchError` when the daemon does not do its part."""

    def __init__(self, address: str, payload_bytes: int, *, shared_memory: bool = True) -> None:
        self.payload_bytes = payload_bytes
        self._address = address
        self._options = _OPTIONS if shared_memory else _REMOTE_OPTIONS
        self._client = Client(parse_address(address), self._options)
        self._copier = Copier(self._options.copy_threads)
        namespace = Namespace(model="benchmark", revision=os.urandom(8).hex(), dtype="uint8")
        try:
            self._attachment = self._client.attach(namespace.canonical_json(), [payload_bytes])
            if shared_memory and not self._client.arena:
                raise BenchError(f"the daemon at {address} shares no memory with this process")
        except CacheError as error:
            self.close()
            raise BenchError(f"cannot attach to {address}: {error}") from error
        except BenchError:
            self.close()
            raise

    def close(self) -> None:
        self._copier.close()
        self._client.close()

    # ---- reading -------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes]) -> Match:
        """A match of all `keys`."""
        match = self._client.match(
            self._attachment,
            keys,
            traffic_class=_CLASS,
            input_tokens=BLOCK_TOKENS * len(keys),
            local_tokens=0,
            min_blocks=1,
            pass_id=os.urandom(16),
            unreachable_tokens=0,
            deadline_s=_DEADLINE_SECONDS,
        )
        if match.blocks != len(keys):
            raise BenchError(f"{match.blocks} blocks of {len(keys)} are found: the daemon has dropped the rest")
        return match

    def release(self, match: Match) -> None:
        self._client.release(self._attachment, match, match.blocks, pb.MissReason.MISS_REASON_UNSPECIFIED)

    def get(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> None:
        """Match, copy out of shared memory, release."""
        match = self.match(keys)
        reader = SlotReader(
            partial(self._client.load, match, 0),
            match,
            payload_bytes=self.payload_bytes,
            first=0,
            end=len(keys),
            batch_blocks=max(1, self._options.load_batch_bytes // self.payload_bytes),
            deadline_s=_DEADLINE_SECONDS,
        )

        padding = -self.payload_bytes % PAGE  # the targets have pages of their own

        def copy_out(first: int, payloads: Sequence[memoryview]) -> None:
            part = targets[first : first + len(payloads)]
            self._copier.copy(part, payloads, checksums=False, padding=padding)

        self._read(reader, copy_out, len(keys))
        self.release(match)

    def get_remotely(self, keys: Sequence[bytes], slots: Slots) -> Match:
        """Match, receive into `slots`, which has room for all of them. An engine's connector releases in background."""
        match, count = self.match(keys), len(keys)
        reader: Reader
        if self._client.has_bulk:
            begin = partial(
                self._client.bulk_get, match.lease_id, 0, first=0, count=count, deadline_s=_DEADLINE_SECONDS
            )
            reader = BulkReader(begin, slots, first=0, end=count)
        else:
            start = partial(self._client.get, match.lease_id, 0, first=0, count=count, deadline_s=_DEADLINE_SECONDS)
            reader = BlockReader(start, slots, first=0, end=count, boot_id=self._attachment.boot_id)
        self._read(reader, lambda first, payloads: None, count)
        return match

    def _read(self, reader: Reader, use: Callable[[int, Sequence[memoryview]], None], count: int) -> None:
        done = 0
        for first, payloads in reader.batches():
            use(first, payloads)
            if reader.still_good():
                done += len(payloads)
        if reader.error is not None or done != count:
            raise BenchError(f"{done} blocks of {count} could be read: {reader.error}")

    # ---- writing -------------------------------------------------------------------------------------------------

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview], *, checksums: bool = True) -> None:
        """Reserve, copy in or send, commit. Without `checksums` they are left to the daemon's flusher."""
        stored = self._client.store(self._attachment, keys, payloads, _CLASS, checksums=checksums)
        if stored.committed.count(pb.CommitState.STORED) != len(keys):
            raise BenchError(
                f"{stored.committed.count(pb.CommitState.STORED)} blocks of {len(keys)} are stored: the arena is too "
                "small, or its blocks do not get to disk"
            )

    def wait_flushed(self) -> None:
        """Until all that was committed is on disk: nothing of an earlier put is still going on."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while (left := fetch_report(self._address).arena_dirty_bytes) > 0:
            if time.monotonic() > deadline:
                raise BenchError(f"{left} bytes are not on disk after {_DEADLINE_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)

    # ---- before and after ----------------------------------------------------------------------------------------

    def warm(self) -> None:
        """Until the page tables of the arena's mappings are filled, as they are in a client that runs for a while.

        The client does that in the background; touching all pages makes sure of it where the kernel does not help.
        """
        for thread in threading.enumerate():
            if thread.name == "cachesvc-prefault":
                thread.join(_DEADLINE_SECONDS)
        arena = self._client.arena
        assert arena is not None, "there is no arena to be warmed"
        size = fetch_report(self._address).arena_bytes
        for mapping in (arena.readable([0], size), arena.writable([0], size)):
            bytes(mapping[0][::4096])


def check_same(expected: Blocks, found: Sequence[memoryview]) -> None:
    """Raises `BenchError` for bytes that are not those which were put."""
    for index, (one, other) in enumerate(zip(expected.views, found, strict=True)):
        if xxhash.xxh3_64_intdigest(one) != xxhash.xxh3_64_intdigest(other):
            raise BenchError(f"block {index} does not come back as it was put")
