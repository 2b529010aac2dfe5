"""gRPC in a process that forks. By itself gRPC waits before each fork until none of its threads is at work, with
Python's lock held (grpc/grpc#41759): a fork of the engine, whatever it is for, may hang.

So that is switched off, unless the engine has set it. The price: a process forked from one that has used the cache
cannot speak gRPC, and has no cache. One that was spawned has.
"""

from __future__ import annotations

import os

_used = False
_inherited = False


def prepare() -> bool:
    """To be called before a channel is made; False when this process must not make one."""
    global _used
    if not _inherited:
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")  # read when the first channel of all is made
        _used = True
    return not _inherited


def _in_child() -> None:
    global _inherited
    _inherited = _used and os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() not in ("1", "true", "yes")


os.register_at_fork(after_in_child=_in_child)
