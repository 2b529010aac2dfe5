"""The service over gRPC, with the standard health service and reflection."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cachesvc.errors import (
    AddressInUse,
    CallError,
    ConfigError,
    InvalidCall,
    KeySchemeMismatch,
    LeaseEnded,
    LimitReached,
    StaleAttachment,
)
from cachesvc.limits import MAX_DEADLINE_SECONDS, MAX_MESSAGE_BYTES, MAX_QUEUED_CALLS
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc import cache_pb2_grpc as pb_grpc
from cachesvc.service import Service

log = logging.getLogger("cachesvc.server")

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Cache"].full_name

CODES: dict[type[CallError], grpc.StatusCode] = {
    InvalidCall: grpc.StatusCode.INVALID_ARGUMENT,
    StaleAttachment: grpc.StatusCode.FAILED_PRECONDITION,
    KeySchemeMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    LeaseEnded: grpc.StatusCode.NOT_FOUND,
    LimitReached: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class CacheServicer(pb_grpc.CacheServicer):
    """Turns errors into status codes and refuses calls without a deadline."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachReply:
        return _call(self._service.attach, request, context)

    def Match(self, request: pb.MatchRequest, context: grpc.ServicerContext) -> pb.MatchReply:
        return _call(self._service.match, request, context)

    def Load(self, request: pb.LoadRequest, context: grpc.ServicerContext) -> pb.LoadReply:
        _abort(context, grpc.StatusCode.UNIMPLEMENTED, "Load is for clients of the arena's socket; use Get")

    def Get(self, request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[pb.GetReply]:
        yield from _stream(self._service.get, request, context)

    def Reserve(self, request: pb.ReserveRequest, context: grpc.ServicerContext) -> pb.ReserveReply:
        return _call(self._service.reserve, request, context)

    def Put(self, request_iterator: Iterator[pb.PutRequest], context: grpc.ServicerContext) -> pb.PutReply:
        return _call(self._service.put, request_iterator, context)

    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.CommitReply:
        return _call(self._service.commit, request, context)

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortReply:
        return _call(self._service.abort, request, context)

    def Release(self, request: pb.ReleaseRequest, context: grpc.ServicerContext) -> pb.ReleaseReply:
        return _call(self._service.release, request, context)

    def Report(self, request: pb.ReportRequest, context: grpc.ServicerContext) -> pb.ReportReply:
        return _call(self._service.report, request, context)

    def History(self, request: pb.HistoryRequest, context: grpc.ServicerContext) -> Iterator[pb.HistoryBucket]:
        yield from _stream(self._service.history, request, context)

    def Record(self, request: pb.RecordRequest, context: grpc.ServicerContext) -> pb.RecordReply:
        return _call(self._service.record, request, context)


def _call(method: Callable[[Request], Reply], request: Request, context: grpc.ServicerContext) -> Reply:
    # gRPC reports "no deadline" as None or, in some versions, as a time of many years.
    remaining = context.time_remaining()
    if remaining is None or remaining > MAX_DEADLINE_SECONDS:
        text = f"the call has no deadline, or one over {MAX_DEADLINE_SECONDS:.0f} s; every call needs one"
        _abort(context, grpc.StatusCode.INVALID_ARGUMENT, text)
    try:
        return method(request)
    except CallError as error:
        _abort(context, CODES[type(error)], str(error))
    except grpc.RpcError:
        raise  # the client broke off its own stream
    except Exception as error:
        if not context.is_active():
            raise
        log.exception("fault in a call")
        _abort(context, grpc.StatusCode.INTERNAL, f"fault of the daemon: {type(error).__name__}; see its log")


def _stream(
    method: Callable[[Request], Iterator[Reply]], request: Request, context: grpc.ServicerContext
) -> Iterator[Reply]:
    # A generator runs while the stream is read, so its errors are met there too.
    replies = _call(method, request, context)
    while (reply := _call(lambda replies: next(replies, None), replies, context)) is not None:
        yield reply


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, message: str) -> NoReturn:
    context.abort(code, message)
    raise AssertionError("abort always raises")


class GrpcServer:
    """Listens on a Unix socket and, unless `listen` is empty, on a loopback port."""

    def __init__(self, service: Service, *, socket: Path, listen: str, workers: int) -> None:
        """Binds both; raises `AddressInUse` or `ConfigError`. Serves from `start` on."""
        self.socket = socket.absolute()
        self.port = 0
        self._lock_file = _claim_socket(self.socket)
        self._server = grpc.server(
            ThreadPoolExecutor(workers, thread_name_prefix="call"),
            maximum_concurrent_rpcs=workers + MAX_QUEUED_CALLS,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),  # otherwise a second daemon would share the port in silence
            ],
        )
        pb_grpc.add_CacheServicer_to_server(CacheServicer(service), self._server)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        previous = os.umask(0o177)
        try:
            address = f"unix:{self.socket}"
            self._server.add_insecure_port(address)
            if listen:
                address = listen
                self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            self._server.stop(None)
            raise AddressInUse(f"cannot listen on {address}: is it in use? give another --listen or ''") from error
        finally:
            os.umask(previous)

    def start(self) -> None:
        self._server.start()
        for name in ("", SERVICE_NAME):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    def stop(self, grace: float) -> None:
        """Refuses new calls, gives running ones `grace` seconds, and removes the socket."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace).wait(grace + 1)
        self.socket.unlink(missing_ok=True)
        os.close(self._lock_file)


def _claim_socket(path: Path) -> int:
    """Takes the lock beside the socket, so that a stale socket is told from one in use. Raises `AddressInUse`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"socket {path}: {error.strerror}; give another --socket") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError as error:
        os.close(descriptor)
        raise AddressInUse(f"socket {path} is in use by another daemon; stop it or give another --socket") from error
    return descriptor
