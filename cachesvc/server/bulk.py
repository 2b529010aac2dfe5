"""The bulk channel (see `cachesvc.rpc.bulk`): payloads straight between the arena's memory and a TCP socket."""

from __future__ import annotations

import socket
import time
from typing import Final

import grpc

from cachesvc.errors import AddressInUse, CallError
from cachesvc.limits import CLIENT_STALL_SECONDS, MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES
from cachesvc.rpc import bulk
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.frames import Frames
from cachesvc.server.connections import Connections
from cachesvc.server.grpc import CODES
from cachesvc.service import Service

_OK: Final = int(grpc.StatusCode.OK.value[0])

# Bytes that must move within the stall limit.
_STEP: Final = 1 << 20


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
        while frames.wait():
            method, body = frames.receive(_soon())
            if method == bulk.GET:
                self._get(frames, pb.GetRequest.FromString(body))
            elif method == bulk.PUT:
                self._put(frames, pb.PutRequest.FromString(body).lease_id)
            else:
                raise EOFError(f"unknown method {method}")

    def _get(self, frames: Frames, request: pb.GetRequest) -> None:
        blocks = self._service.payloads(request)
        try:
            block = next(blocks, None)
        except CallError as error:
            frames.send(CODES[type(error)].value[0], str(error).encode(), _soon())
            return
        frames.send(_OK, b"", _soon())
        while block is not None:
            head = bulk.Head(block.index, block.miss, len(block.data), block.checksum).packed()
            frames.send_all([head, block.data[:_STEP]], _soon())
            for start in range(_STEP, len(block.data), _STEP):
                frames.send_all([block.data[start : start + _STEP]], _soon())
            block = next(blocks, None)

    def _put(self, frames: Frames, lease_id: bytes) -> None:
        """Everything is read to its end, also what is of no use any more, so that the client hears why."""
        received = 0
        refused: CallError | None = None
        buffer = memoryview(bytearray(bulk.HEAD_BYTES))
        while True:
            frames.receive_into(buffer, _soon())
            head = bulk.unpack_head(buffer)
            if head.block == bulk.END:
                break
            if head.payload_bytes > MAX_PAYLOAD_BYTES:
                raise EOFError(f"a payload of {head.payload_bytes} bytes is announced")
            try:
                self._put_one(frames, lease_id, head)
                received += head.payload_bytes
            except CallError as error:
                refused = error
                self._discard(frames, head.payload_bytes)
        if refused is None:
            reply = pb.PutReply(boot_id=self._service.boot_id, received_bytes=received)
            frames.send(_OK, reply.SerializeToString(), _soon())
        else:
            frames.send(CODES[type(refused)].value[0], str(refused).encode(), _soon())

    def _put_one(self, frames: Frames, lease_id: bytes, head: bulk.Head) -> None:
        """Receives one payload into its slot. A `CallError` is raised before any byte of it is read."""
        begun = self._service.begin_put(lease_id, head.block, head.payload_bytes)
        if begun is None:
            self._discard(frames, head.payload_bytes)
            return
        lease, slot = begun
        complete = False
        try:
            payload = self._service.store.arena.view(slot)
            for start in range(0, len(payload), _STEP):
                frames.receive_into(payload[start : start + _STEP], _soon())
            complete = True
        finally:
            self._service.end_put(lease, head.block, complete=complete)

    def _discard(self, frames: Frames, size: int) -> None:
        for start in range(0, size, _STEP):
            frames.receive_into(self._scratch[: min(_STEP, size - start)], _soon())


def _soon() -> float:
    return time.monotonic() + CLIENT_STALL_SECONDS
