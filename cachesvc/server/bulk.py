"""The bulk channel (see `cachesvc.rpc.bulk`): payloads straight between the arena's memory and a TCP socket."""

from __future__ import annotations

import socket
import time
from typing import Final

import grpc

from cachesvc.errors import AddressInUse, CallError
from cachesvc.limits import CLIENT_STALL_SECONDS, MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES
from cachesvc.record import checksum
from cachesvc.rpc import bulk
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.frames import Frames
from cachesvc.server.connections import Connections
from cachesvc.server.grpc import CODES
from cachesvc.service import Service

_OK: Final = int(grpc.StatusCode.OK.value[0])

# Bytes per second below which a client is cut off: it holds slots, or pins, as long as it talks.
_SLOWEST: Final = 1 << 20
_STEP: Final = 1 << 20
# A batch of several payloads is not larger: the slots it fills are nobody else's until all of it has come.
_MAX_BATCH_BYTES: Final = 2 * bulk.BATCH_BYTES


class BulkServer:
    """Listens on a port of its own, which `service.bulk_port` tells clients."""

    def __init__(self, service: Service, host: str) -> None:
        """Binds; raises `AddressInUse`."""
        self._service = service
        self._scratch = memoryview(bytearray(_STEP))
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, 0), family=family, backlog=64)
        except OSError as error:
            raise AddressInUse(
                f"cannot listen on {host} for payloads: {error.strerror}; give another --listen"
            ) from error
        service.bulk_port = listener.getsockname()[1]
        self._connections = Connections("bulk", listener, self._serve)

    def start(self) -> None:
        self._connections.start()

    def stop(self) -> None:
        self._connections.stop()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        frames = Frames(connection, MAX_MESSAGE_BYTES, ahead=False)
        begun = False
        while not begun or frames.wait(bulk.SERVER_IDLE_SECONDS):
            method, body = frames.receive(_soon())
            begun = True
            if method == bulk.GET:
                self._get(frames, pb.GetRequest.FromString(body))
            elif method == bulk.PUT:
                self._put(frames, pb.PutRequest.FromString(body).lease_id)
            else:
                raise EOFError(f"unknown method {method}")

    def _get(self, frames: Frames, request: pb.GetRequest) -> None:
        try:
            for batch in self._service.payloads(request, bulk.BATCH_BYTES):
                for start in range(0, len(batch), bulk.MAX_HEADS):
                    part = batch[start : start + bulk.MAX_HEADS]
                    heads = [bulk.Head(block.number, block.miss, len(block.data), block.checksum) for block in part]
                    data = [block.data for block in part]
                    frames.send_with(bulk.BATCH, bulk.pack_heads(heads), data, _soon(_size(heads)))
        except CallError as error:
            frames.send(CODES[type(error)].value[0], str(error).encode(), _soon())

    def _put(self, frames: Frames, lease_id: bytes) -> None:
        """Everything is read to its end, also what is of no use any more, so that the client hears why."""
        received = 0
        refused: CallError | None = None
        while heads := self._heads(frames):
            try:
                self._receive(frames, lease_id, heads)
                received += _size(heads)
            except CallError as error:
                refused = error
                self._discard(frames, _size(heads))
        if refused is None:
            reply = pb.PutReply(boot_id=self._service.boot_id, received_bytes=received)
            frames.send(_OK, reply.SerializeToString(), _soon())
        else:
            frames.send(CODES[type(refused)].value[0], str(refused).encode(), _soon())

    def _heads(self, frames: Frames) -> list[bulk.Head]:
        code, body = frames.receive(_soon())
        try:
            heads = bulk.unpack_heads(body)
        except ValueError as error:
            raise EOFError(str(error)) from error
        largest = max((head.payload_bytes for head in heads), default=0)
        if code != bulk.BATCH or largest > MAX_PAYLOAD_BYTES or _size(heads) > max(largest, _MAX_BATCH_BYTES):
            raise EOFError(f"a batch with code {code} and {len(heads)} payloads of {_size(heads)} bytes")
        return heads

    def _receive(self, frames: Frames, lease_id: bytes, heads: list[bulk.Head]) -> None:
        """Receives payloads into their slots. A `CallError` is raised before any byte of them is read."""
        lease, slots = self._service.begin_put(lease_id, {head.block: head.payload_bytes for head in heads})
        complete = False
        try:
            views = [self._service.store.arena.view(slots[head.block]) for head in heads if head.block in slots]
            if len(views) == len(heads):
                frames.receive_into(views, _soon(_size(heads)), CLIENT_STALL_SECONDS)
            else:
                for head in heads:
                    if head.block in slots:
                        view = self._service.store.arena.view(slots[head.block])
                        frames.receive_into([view], _soon(head.payload_bytes), CLIENT_STALL_SECONDS)
                    else:
                        self._discard(frames, head.payload_bytes)  # it is stored already
            for slot in slots.values():
                slot.checksum = checksum(self._service.store.arena.view(slot))  # while it is still in a cache
            complete = True
        finally:
            self._service.end_put(lease, slots, complete=complete)

    def _discard(self, frames: Frames, size: int) -> None:
        for start in range(0, size, _STEP):
            frames.receive_into([self._scratch[: min(_STEP, size - start)]], _soon())


def _size(heads: list[bulk.Head]) -> int:
    return sum(head.payload_bytes for head in heads)


def _soon(size: int = 0) -> float:
    """When `size` bytes must have moved at the latest."""
    return time.monotonic() + CLIENT_STALL_SECONDS + size / _SLOWEST
