"""Turns the chunks of one Get into verified blocks. Nothing that fails a check is ever handed on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import grpc
import xxhash

from cachesvc.connector.buffers import Slots
from cachesvc.connector.client import Replies
from cachesvc.connector.errors import BadAnswer, BadChecksum, BlockMissing, CacheError, NotAttached, from_rpc_error


class BlockReader:
    """Reads blocks `first` to `end` (exclusive) from the stream that `start` begins into `slots`, in order.

    At the first irregularity of any kind it ends with the last good block, and `error` says why; after a complete read
    `error` is None. `idle_s` is the time since anything arrived. `cancel` ends it from any thread.
    """

    def __init__(self, start: Callable[[], Replies], slots: Slots, *, first: int, end: int, boot_id: bytes) -> None:
        self._start = start
        self._slots = slots
        self._first = first
        self._end = end
        self._boot_id = boot_id
        self._arrived = time.monotonic()
        self._replies: Replies | None = None
        self.cancelled = False
        self.error: CacheError | None = None

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._arrived

    def cancel(self) -> None:
        """No batch is handed on after this; one that is being used stays valid."""
        self.cancelled = True
        if self._replies is not None:
            self._replies.cancel()

    def batches(self) -> Iterator[tuple[int, list[memoryview]]]:
        """(index of the first block, read-only payloads), as many as there are slots; valid until the next one."""
        first, batch = self._first, list[memoryview]()
        for payload in self._good_blocks():
            batch.append(payload)
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
            yield payload

    def _blocks(self) -> Iterator[memoryview]:
        index, filled, started = self._first, 0, False
        target = self._slots.view(0)
        self._replies = self._start()
        if self.cancelled:  # meanwhile, when there was nothing yet to cancel
            self._replies.cancel()
        for reply in self._replies:
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
            yield target.toreadonly()
            index, filled = index + 1, 0
            if index == self._end:
                return
            target = self._slots.view((index - self._first) % self._slots.count)
        raise BadAnswer(f"Get: the stream ended before block {index} of {self._end}")
