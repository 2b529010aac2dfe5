"""A daemon in memory, on a real gRPC server, that tests can make fail, lie, hang, restart and go away."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import xxhash

from cachesvc.connector.options import CacheOptions
from cachesvc.connector.prefix_cache import Pass, PrefixCache
from cachesvc.keys import BLOCK_TOKENS, Namespace, self_test_vector, unpack_keys
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc import cache_pb2_grpc as rpc

NAMESPACE = Namespace("tiny", "1", "float32")
PAYLOAD_BYTES = 10_000  # deliberately no multiple of a page
QUICK = CacheOptions(
    match_budget_s=5.0,  # tests of the budget set their own
    match_deadline_s=5.0,
    breaker_first_s=0.02,
    breaker_max_s=0.1,
    probe_max_s=0.1,
    control_deadline_s=1.0,
    close_deadline_s=2.0,
)


def payload_of(tokens: list[int], block: int, size: int = PAYLOAD_BYTES) -> bytes:
    """What an engine computes for a block: it depends on the whole prefix, as KV does."""
    seed = xxhash.xxh3_64_intdigest(repr(tokens[: (block + 1) * BLOCK_TOKENS]).encode())
    return xxhash.xxh3_128_digest(seed.to_bytes(8, "little")) * (size // 16) + bytes(size % 16)


class Engine:
    """Pages of one prompt, with the two callbacks."""

    def __init__(self, tokens: Iterable[int], size: int = PAYLOAD_BYTES) -> None:
        self.tokens = list(tokens)
        self.size = size
        self.loaded: dict[int, bytes] = {}
        self.gathered: list[int] = []
        self.scatter_calls = 0

    def scatter(self, first: int, payloads: Any) -> None:
        self.scatter_calls += 1
        for block, payload in enumerate(payloads, first):
            assert payload.readonly and payload.nbytes == self.size
            assert block not in self.loaded and block == (max(self.loaded, default=block - 1) + 1)
            self.loaded[block] = bytes(payload)

    def gather(self, first: int, buffers: Any) -> None:
        for block, buffer in enumerate(buffers, first):
            self.gathered.append(block)
            buffer[:] = payload_of(self.tokens, block, self.size)

    def check(self) -> None:
        """Every loaded block is exactly what was computed for this prompt."""
        for block, payload in self.loaded.items():
            assert payload == payload_of(self.tokens, block, self.size)


def run(cache: PrefixCache, tokens: Iterable[int], *, flush: bool = True) -> tuple[Pass, Engine]:
    """One whole pass over a prompt, as an engine makes it."""
    engine = Engine(tokens, cache.payload_bytes)
    p = cache.match(engine.tokens)
    cache.load(p, engine.scatter)
    engine.check()
    cache.save(p, len(engine.tokens), engine.gather)
    cache.finish(p)
    if flush:
        assert cache.flush(20)
    return p, engine


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits for what another thread does; the bound is generous, since it only decides when to give up."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


class FakeDaemon(rpc.CacheServicer):
    """Keeps what it is given. `before[call]` runs first and may abort or hang; `get_stream` may rewrite a Get."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fake.sock"
        self.address = f"unix:{self.path}"
        self.blocks: dict[bytes, bytes] = {}
        self.lock = threading.RLock()
        self.chunk = 4096
        self.payload_bytes = 0
        self.max_payload_bytes = 64 << 20
        self.traffic_classes = ["agent", "chat"]
        self.before: dict[str, Callable[[Any, grpc.ServicerContext], None]] = {}
        self.get_stream: Callable[[list[pb.GetReply]], Iterable[pb.GetReply]] = lambda replies: replies
        self.requests: dict[str, list[Any]] = {}
        self.reserve_states: Callable[[bytes], int | None] = lambda key: None
        self.commit_states: Callable[[bytes], int | None] = lambda key: None
        self.matched: Callable[[int], int] = lambda blocks: blocks
        self.key_scheme = 1
        self._resume = threading.Event()
        self._server: grpc.Server | None = None
        self.start()

    # Life

    def start(self) -> None:
        self.boot_id = os.urandom(16)
        self.read_leases: dict[bytes, list[bytes]] = {}
        self.write_leases: dict[bytes, tuple[list[bytes], dict[int, bytearray]]] = {}
        self.attachment = int.from_bytes(os.urandom(4), "little")
        self._resume.clear()
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        rpc.add_CacheServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        self._resume.set()
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None
        self.path.unlink(missing_ok=True)

    def restart(self) -> None:
        self.stop()
        self.start()

    def hang(self, *_: Any) -> None:
        """To be put into `before`: no answer before `resume`."""
        self._resume.wait(60)

    def resume(self) -> None:
        self.before.clear()
        self._resume.set()

    def fail(self, code: grpc.StatusCode) -> Callable[[Any, grpc.ServicerContext], None]:
        return lambda _, context: context.abort(code, "as the test wants it")

    def count(self, call: str) -> int:
        with self.lock:
            return len(self.requests.get(call, []))

    @property
    def released(self) -> list[tuple[int, int]]:
        """(loaded blocks, reason) of each Release."""
        with self.lock:
            return [(r.loaded_blocks, r.not_loaded) for r in self.requests.get("Release", [])]

    def _enter(self, call: str, request: Any, context: grpc.ServicerContext) -> None:
        assert context.time_remaining() is not None and context.time_remaining() < 1e6, f"{call} has no deadline"
        with self.lock:
            self.requests.setdefault(call, []).append(request)
        if call in self.before:
            self.before[call](request, context)
        attachment = getattr(request, "attachment", self.attachment)
        if attachment != self.attachment:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another boot")

    # Calls

    def Attach(self, request: Any, context: Any) -> pb.AttachReply:
        self._enter("Attach", request, context)
        if request.key_scheme != self.key_scheme or request.self_test_vector != self_test_vector():
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "key schemes differ")
        self.payload_bytes = request.payload_bytes[0]
        return pb.AttachReply(
            boot_id=self.boot_id,
            attachment=self.attachment,
            max_keys=16384,
            max_payload_bytes=self.max_payload_bytes,
            max_chunk_bytes=self.chunk,
            max_lease_ms=600_000,
            traffic_classes=self.traffic_classes,
        )

    def Match(self, request: Any, context: Any) -> pb.MatchReply:
        self._enter("Match", request, context)
        with self.lock:
            keys = unpack_keys(request.keys)
            blocks = next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))
            lease = b""
            if blocks >= max(1, request.min_blocks):
                lease = os.urandom(16)
                self.read_leases[lease] = keys[:blocks]
        return pb.MatchReply(
            boot_id=self.boot_id,
            matched_blocks=self.matched(blocks),
            lease_id=lease,
            lease_ms=request.lease_ms,
            tiers=bytes([pb.TIER_DISK]) * blocks,
            first_miss=pb.NEVER_SEEN,
        )

    def Get(self, request: Any, context: Any) -> Iterator[pb.GetReply]:
        self._enter("Get", request, context)
        with self.lock:
            keys = self.read_leases.get(request.lease_id)
        if keys is None:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such lease")
        replies = []
        for index in range(request.first, request.first + request.count):
            payload = self.blocks[keys[index]]
            for offset in range(0, len(payload), self.chunk):
                end = min(offset + self.chunk, len(payload))
                reply = pb.GetReply(index=index, offset=offset, data=payload[offset:end])
                if end == len(payload):
                    reply.last = True
                    reply.checksum = xxhash.xxh3_64_intdigest(payload)
                replies.append(reply)
        replies[0].boot_id = self.boot_id
        yield from self.get_stream(replies)

    def Release(self, request: Any, context: Any) -> pb.ReleaseReply:
        self._enter("Release", request, context)
        with self.lock:
            self.read_leases.pop(request.lease_id, None)
        return pb.ReleaseReply(boot_id=self.boot_id)

    def Reserve(self, request: Any, context: Any) -> pb.ReserveReply:
        self._enter("Reserve", request, context)
        with self.lock:
            keys = unpack_keys(request.keys)
            writing = {key for owned, _ in self.write_leases.values() for key in owned}
            states = bytearray()
            for key in keys:
                forced = self.reserve_states(key)
                natural = pb.PRESENT if key in self.blocks else pb.BUSY if key in writing else pb.GRANTED
                states.append(natural if forced is None else forced)
            lease = b""
            if pb.GRANTED in states:
                lease = os.urandom(16)
                granted = {i: bytearray(self.payload_bytes) for i, s in enumerate(states) if s == pb.GRANTED}
                self.write_leases[lease] = (keys, granted)
        return pb.ReserveReply(boot_id=self.boot_id, states=bytes(states), lease_id=lease, lease_ms=request.lease_ms)

    def Put(self, request_iterator: Any, context: Any) -> pb.PutReply:
        lease, received = b"", 0
        for number, request in enumerate(request_iterator):
            if number == 0:
                self._enter("Put", request, context)
            lease = request.lease_id or lease
            assert len(request.data) <= self.chunk
            with self.lock:
                if lease not in self.write_leases:
                    context.abort(grpc.StatusCode.NOT_FOUND, "no such lease")
                buffer = self.write_leases[lease][1][request.index]
                buffer[request.offset : request.offset + len(request.data)] = request.data
            received += len(request.data)
        return pb.PutReply(boot_id=self.boot_id, received_bytes=received)

    def Commit(self, request: Any, context: Any) -> pb.CommitReply:
        self._enter("Commit", request, context)
        with self.lock:
            if request.lease_id not in self.write_leases:
                context.abort(grpc.StatusCode.NOT_FOUND, "no such lease")
            keys, buffers = self.write_leases.pop(request.lease_id)
            states = bytearray()
            for index, checksum in zip(request.indices, request.checksums, strict=True):
                forced = self.commit_states(keys[index])
                if forced is not None:
                    states.append(forced)
                elif xxhash.xxh3_64_intdigest(buffers[index]) != checksum:
                    states.append(pb.CHECKSUM_MISMATCH)
                else:
                    self.blocks[keys[index]] = bytes(buffers[index])
                    states.append(pb.STORED)
        return pb.CommitReply(boot_id=self.boot_id, states=bytes(states))

    def Abort(self, request: Any, context: Any) -> pb.AbortReply:
        self._enter("Abort", request, context)
        with self.lock:
            self.write_leases.pop(request.lease_id, None)
        return pb.AbortReply(boot_id=self.boot_id)
