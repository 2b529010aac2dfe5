"""What can go wrong between a client and its daemon. None of it reaches an engine: `PrefixCache` turns it into a miss.

::

    CacheError
    ├── Unreachable      no connection, the daemon starts or stops, or it failed inside
    │   └── TimedOut     no answer within the deadline of the call
    ├── Busy             a limit of the daemon is reached
    ├── BadAnswer        the reply contradicts the contract
    │   └── BadChecksum  a payload is not the one that was stored
    ├── Rejected         the daemon refuses what this client asks, and will again
    ├── NotAttached      the daemon was restarted: attach again
    ├── LeaseLost        the lease has ended
    └── BlockMissing     the daemon can no longer serve one block
"""

from __future__ import annotations

from typing import ClassVar

import grpc

from cachesvc.rpc import cache_pb2 as pb


class CacheError(Exception):
    """`miss` says how the tokens concerned are accounted, `blame` whether the circuit breaker counts it."""

    miss: pb.MissReason.ValueType = pb.LOAD_ERROR
    blame: ClassVar[bool] = False


class Unreachable(CacheError):
    blame = True


class TimedOut(Unreachable):
    miss = pb.TIMED_OUT


class Busy(CacheError):
    blame = True


class BadAnswer(CacheError):
    blame = True


class BadChecksum(BadAnswer):
    miss = pb.CORRUPT


class Rejected(CacheError):
    pass


class NotAttached(CacheError):
    pass


class LeaseLost(CacheError):
    miss = pb.TIMED_OUT


class BlockMissing(CacheError):
    """The daemon named its own reason for the miss."""

    def __init__(self, message: str, miss: pb.MissReason.ValueType) -> None:
        super().__init__(message)
        self.miss = miss


_BY_CODE: dict[grpc.StatusCode, type[CacheError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOut,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Busy,
    grpc.StatusCode.INVALID_ARGUMENT: Rejected,
    grpc.StatusCode.PERMISSION_DENIED: Rejected,
    grpc.StatusCode.UNAUTHENTICATED: Rejected,
    grpc.StatusCode.UNIMPLEMENTED: Rejected,
    grpc.StatusCode.FAILED_PRECONDITION: NotAttached,
    grpc.StatusCode.NOT_FOUND: LeaseLost,
}


_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def from_status(number: int, call: str, text: str) -> CacheError:
    """The error of this tree that a status on the daemon's local socket stands for."""
    code = _BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)
    return _BY_CODE.get(code, Unreachable)(f"{call}: {code.name}: {text}")


def from_rpc_error(error: grpc.RpcError, call: str) -> CacheError:
    """The error of this tree that a failed gRPC call stands for."""
    code = error.code()
    return _BY_CODE.get(code, Unreachable)(f"{call}: {code.name}: {error.details()}")
