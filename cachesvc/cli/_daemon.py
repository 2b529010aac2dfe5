"""Asking a daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from cachesvc.errors import ConfigError, DaemonUnreachable
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc import cache_pb2_grpc as pb_grpc
from cachesvc.rpc.address import client_address

_TIMEOUT_SECONDS = 5.0


@contextmanager
def connected(address: str | None) -> Iterator[tuple[pb_grpc.CacheStub, str]]:
    """A stub, and the address it goes to. Raises `ConfigError` for a malformed address."""
    try:
        target = str(client_address(address))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        yield pb_grpc.CacheStub(channel), target


def fetch_report(address: str | None) -> pb.ReportReply:
    """Raises `ConfigError` for a malformed address and `DaemonUnreachable`."""
    with connected(address) as (stub, target):
        try:
            return stub.Report(pb.ReportRequest(), timeout=_TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            raise unreachable(target, error) from error


def switch_recording(address: str | None, change: pb.Recording.ValueType) -> pb.RecordReply:
    """Raises `ConfigError` for a malformed address, or when the daemon cannot record, and `DaemonUnreachable`."""
    with connected(address) as (stub, target):
        try:
            return stub.Record(pb.RecordRequest(change=change), timeout=_TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise ConfigError(str(error.details())) from error
            raise unreachable(target, error) from error


def unreachable(target: str, error: grpc.RpcError) -> DaemonUnreachable:
    return DaemonUnreachable(
        f"no answer from a daemon at {target} ({error.code().name}); start one with `cachesvc serve` or give --address"
    )
