"""A network of one's own, with nothing in it but loopback: for servers that can't be told to listen there only."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1


def confine_to_loopback() -> None:
    """Moves this process, and those it starts from now on, into a new network. Before any thread is started.

    Raises `RuntimeError` where this is not allowed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNET):
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):  # what needs no privilege, on most systems
            why = os.strerror(ctypes.get_errno())
            raise RuntimeError(f"it listens on all interfaces, and cannot be kept from it: {why}")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
