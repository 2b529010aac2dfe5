"""Turns the bytes of one Get, or slots of the arena, into verified blocks. Nothing that fails a check is handed on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import grpc
import xxhash

from cachesvc.connector.arena import NO_SLOT
from cachesvc.connector.buffers import Slots
from cachesvc.connector.bulk import BulkReplies
from cachesvc.connector.client import Match, Replies
from cachesvc.connector.errors import (
    BadAnswer,
    BadChecksum,
    BlockMissing,
    CacheError,
    LeaseLost,
    NotAttached,
    TimedOut,
    from_rpc_error,
)
from cachesvc.rpc import cache_pb2 as pb


class Reader(Protocol):
    """Brings blocks in order. At the first irregularity it ends, and `error` says why; None after a complete read."""

    error: CacheError | None

    @property
    def idle_s(self) -> float: ...
    def cancel(self) -> None: ...
    def batches(self) -> Iterator[tuple[int, Sequence[memoryview]]]: ...

    def still_good(self) -> bool:
        """Whether the last batch was good all the time while it was used."""
        ...


class Stream(Protocol):
    def cancel(self) -> Any: ...


class StreamReader:
    """Reads blocks `first` to `end` (exclusive) from a stream into `slots`, in order.

    At the first irregularity of any kind it ends with the last good block, and `error` says why; after a complete read
    `error` is None. `idle_s` is the time since anything arrived. `cancel` ends it from any thread. What the stream is
    made of is the subclass's: `_blocks` yields verified payloads.
    """

    def __init__(self, slots: Slots, *, first: int, end: int) -> None:
        self._slots = slots
        self._first = first
        self._end = end
        self._arrived = time.monotonic()
        self._stream: Stream | None = None
        self.cancelled = False
        self.error: CacheError | None = None

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._arrived

    def cancel(self) -> None:
        """No batch is handed on after this; one that is being used stays valid."""
        self.cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    def still_good(self) -> bool:
        return True  # the bytes are our own

    def batches(self) -> Iterator[tuple[int, list[memoryview]]]:
        """(index of the first block, read-only payloads), as many as there are slots; valid until the next one."""
        first, batch = self._first, list[memoryview]()
        for payload in self._good_blocks():
            batch.append(payload.toreadonly())
            if self.cancelled:
                return
            if len(batch) == self._slots.count:
                yield first, batch
                first, batch = first + len(batch), []
        if batch and not self.cancelled:
            yield first, batch

    def _good_blocks(self) -> Iterator[memoryview]:
        blocks = self._blocks()
        while True:
            try:
                payload = next(blocks)
            except StopIteration:
                return
            except CacheError as error:
                self.error = error
                return
            except grpc.RpcError as error:
                self.error = from_rpc_error(error, "Get")
                return
            except RuntimeError as error:  # the system has no thread for the stream
                self.error = CacheError(f"Get: {error}")
                return
            yield payload

    def _blocks(self) -> Iterator[memoryview]:
        raise NotImplementedError

    def _began(self, stream: Stream) -> None:
        self._stream = stream
        if self.cancelled:  # meanwhile, when there was nothing yet to cancel
            stream.cancel()

    def _target(self, index: int) -> memoryview:
        return self._slots.view((index - self._first) % self._slots.count)


class BulkReader(StreamReader):
    """From the bulk channel, by which `start` begins a Get."""

    def __init__(self, start: Callable[[], BulkReplies], slots: Slots, *, first: int, end: int) -> None:
        super().__init__(slots, first=first, end=end)
        self._start = start

    def _blocks(self) -> Iterator[memoryview]:
        replies = self._start()
        try:
            self._began(replies)
            index = self._first
            while index < self._end:
                room = self._slots.count - (index - self._first) % self._slots.count
                blocks = replies.receive(self._target, first=index, room=room, end=self._end)
                self._arrived = time.monotonic()
                yield from blocks
                index += len(blocks)
        finally:
            replies.close()


class BlockReader(StreamReader):
    """From the gRPC stream that `start` begins."""

    def __init__(self, start: Callable[[], Replies], slots: Slots, *, first: int, end: int, boot_id: bytes) -> None:
        super().__init__(slots, first=first, end=end)
        self._start = start
        self._boot_id = boot_id

    def _blocks(self) -> Iterator[memoryview]:
        index, filled, started = self._first, 0, False
        target = self._target(index)
        replies = self._start()
        self._began(replies)
        for reply in replies:
            self._arrived = time.monotonic()
            if not started and reply.boot_id != self._boot_id:
                raise NotAttached("Get: the daemon was restarted")
            started = True
            if reply.index != index or reply.offset != filled:
                raise BadAnswer(f"Get: block {reply.index}+{reply.offset} came instead of {index}+{filled}")
            if reply.miss:
                raise BlockMissing(f"Get: block {index} is gone", reply.miss)
            end = filled + len(reply.data)
            if end > target.nbytes or (reply.last and end != target.nbytes) or not (reply.data or reply.last):
                raise BadAnswer(f"Get: block {index} has {end} bytes so far, last={reply.last}, of {target.nbytes}")
            target[filled:end] = reply.data
            filled = end
            if not reply.last:
                continue
            if xxhash.xxh3_64_intdigest(target) != reply.checksum:
                raise BadChecksum(f"Get: block {index} fails its checksum")
            yield target
            index, filled = index + 1, 0
            if index == self._end:
                return
            target = self._target(index)
        raise BadAnswer(f"Get: the stream ended before block {index} of {self._end}")


_WAIT_S: Final = 0.25
"""Longest wait of one Load call, so that a cancelled load ends soon."""


class SlotReader:
    """Reads blocks `first` to `end` (exclusive) straight from the daemon's arena, as they become ready there.

    The bytes are the daemon's: they are good only as long as the lease lives, so the clock is looked at once more after
    each batch was used. `load` asks the daemon for blocks that are still on their way.
    """

    def __init__(
        self,
        load: Callable[..., tuple[Sequence[int], Sequence[int], int]],
        match: Match,
        *,
        payload_bytes: int,
        first: int,
        end: int,
        batch_blocks: int,
        deadline_s: float,
        copy_first: bool = False,
    ) -> None:
        """`copy_first` hands on the first block as a copy, which stays what it was found to be."""
        self._load = load
        self._match = match
        self._copy_first = copy_first
        self._payload_bytes = payload_bytes
        self._first = first
        self._end = end
        self._batch_blocks = batch_blocks
        self._arrived = time.monotonic()
        self._deadline = self._arrived + deadline_s
        self.cancelled = False
        self.error: CacheError | None = None

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._arrived

    def cancel(self) -> None:
        self.cancelled = True

    def still_good(self) -> bool:
        session = self._match.session
        if time.monotonic() < self._match.ends and session is not None and session.alive:
            return True
        self.error = LeaseLost("the lease ended while its blocks were being read")
        return False

    def batches(self) -> Iterator[tuple[int, Sequence[memoryview]]]:
        """(index of the first block, read-only payloads) of blocks that are ready, at most `batch_blocks` at once."""
        index = self._first
        try:
            while index < self._end and not self.cancelled and self.still_good():
                payloads = self._next(index)
                if payloads and index == self._first and self._copy_first:
                    payloads = [memoryview(bytes(payloads[0]))]
                    if not self.still_good():
                        return
                if payloads:
                    self._arrived = time.monotonic()
                    yield index, payloads
                    index += len(payloads)
        except CacheError as error:
            self.error = error

    def _next(self, index: int) -> Sequence[memoryview]:
        """Ready payloads from `index` on, perhaps none after some waiting."""
        count = min(self._batch_blocks, self._end - index)
        slots = self._match.slots[index : index + count]
        checksums = self._match.checksums[index : index + count]
        ready = slots.index(NO_SLOT) if NO_SLOT in slots else count
        if not ready:
            if time.monotonic() >= self._deadline:
                raise TimedOut(f"Load: block {index} did not come in time")
            wait_s = max(0.0, min(_WAIT_S, self._deadline - time.monotonic()))
            slots, checksums, miss = self._load(first=index, count=count, wait_s=wait_s)
            ready = slots.index(NO_SLOT) if NO_SLOT in slots else len(slots)
            if not ready and miss:
                raise BlockMissing(f"Load: block {index} cannot be served", pb.MissReason.ValueType(miss))
        assert self._match.arena is not None, "there is nothing to read slots from"
        payloads = self._match.arena.readable(slots[:ready], self._payload_bytes)
        if any(checksums[:ready]):  # the daemon has not checked them all itself
            for number, (payload, checksum) in enumerate(zip(payloads, checksums, strict=False), index):
                if checksum and xxhash.xxh3_64_intdigest(payload) != checksum:
                    raise BadChecksum(f"Load: block {number} fails its checksum")
        return payloads
