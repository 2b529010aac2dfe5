"""Every error the daemon and the CLI raise on purpose.

::

    CacheError                      one line that says what was wrong, with the value, and what to do
    ├── ConfigError                 exit 2   a setting is wrong
    ├── StoreLocked                 exit 3   another daemon has the store open
    ├── AddressInUse                exit 4   the socket or port is taken
    ├── StoreUnusable               exit 5   the store's directory cannot be used
    ├── DaemonUnreachable           exit 6   the CLI got no answer
    ├── TraceError                  exit 7   a trace cannot be read, or not in the way asked for
    ├── StoreDamaged                exit 8   `fsck` found damage and left it
    ├── CallError                   what a client did wrong, or may not have now (mapped to gRPC status codes)
    │   ├── InvalidCall             malformed or over a limit
    │   ├── StaleAttachment         of another boot
    │   ├── KeySchemeMismatch       both ends name blocks differently
    │   ├── LeaseEnded              unknown or over
    │   └── LimitReached            the daemon has no room for it now
    ├── WriteRefused                no room, or the disk failed: the write is dropped, the caller goes on
    └── BlockUnreadable             a block is damaged or gone: a miss
"""

from __future__ import annotations

from typing import ClassVar


class CacheError(Exception):
    exit_code: ClassVar[int] = 1


class ConfigError(CacheError):
    exit_code = 2


class StoreLocked(CacheError):
    exit_code = 3


class AddressInUse(CacheError):
    exit_code = 4


class StoreUnusable(CacheError):
    exit_code = 5


class DaemonUnreachable(CacheError):
    exit_code = 6


class TraceError(CacheError):
    exit_code = 7


class StoreDamaged(CacheError):
    exit_code = 8


class CallError(CacheError):
    pass


class InvalidCall(CallError):
    pass


class StaleAttachment(CallError):
    pass


class KeySchemeMismatch(CallError):
    pass


class LeaseEnded(CallError):
    pass


class LimitReached(CallError):
    pass


class WriteRefused(CacheError):
    pass


class BlockUnreadable(CacheError):
    """`corrupt` tells damage (the record must never be served again) from a failing read (the device may recover)."""

    def __init__(self, message: str, *, corrupt: bool) -> None:
        super().__init__(message)
        self.corrupt = corrupt
