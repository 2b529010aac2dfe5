"""Asking a daemon for its report."""

from __future__ import annotations

import grpc

from cachesvc.errors import ConfigError, DaemonUnreachable
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc import cache_pb2_grpc as pb_grpc
from cachesvc.rpc.address import client_address

_TIMEOUT_SECONDS = 5.0


def fetch_report(address: str | None) -> pb.ReportReply:
    """Raises `ConfigError` for a malformed address and `DaemonUnreachable`."""
    try:
        target = str(client_address(address))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            return pb_grpc.CacheStub(channel).Report(pb.ReportRequest(), timeout=_TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            raise DaemonUnreachable(
                f"no answer from a daemon at {target} ({error.code().name}); start one with `cachesvc serve` or give "
                "--address"
            ) from error
