"""Where a daemon listens: ``unix:/absolute/path`` or ``host:port`` (a leaf module).

The daemon and its clients take the default from here, so that they find each other with nothing configured.
"""

from __future__ import annotations

import ipaddress
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

ADDRESS_ENV: Final = "CACHESVC_ADDRESS"
"""Environment variable that a client reads when it was given no address."""

MAX_SOCKET_PATH_BYTES: Final = 107
"""The kernel's limit (``sun_path``), less the final zero byte."""


@dataclass(frozen=True)
class Address:
    """One parsed address: either `path` is set, or `host` and `port` are. `str()` gives the text form back."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Reads ``unix:/path``, ``unix:///path``, ``host:port`` or ``[v6]:port``. Raises `ValueError`, with advice."""
    if text.startswith("unix:"):
        name = text.removeprefix("unix:")
        name = name.removeprefix("//") if name.startswith("///") else name
        if not name.startswith("/") or name.startswith("//"):
            raise ValueError(f"address {text!r} needs an absolute path, such as unix:/run/cachesvc.sock")
        if len(os.fsencode(name)) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"socket path {name!r} is longer than {MAX_SOCKET_PATH_BYTES} bytes; use a shorter one")
        return Address(path=Path(name))
    host, separator, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif _is_ipv6(host):
        raise ValueError(f"address {text!r}: write an IPv6 host in brackets, such as [::1]:7070")
    elif ":" in host or "/" in host:
        raise ValueError(f"address {text!r} is neither unix:/path nor host:port; leave out tcp: or http://")
    if not separator or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"address {text!r} is neither unix:/path nor host:port with a port up to 65535")
    return Address(host=host, port=int(port))


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def default_socket_path() -> Path:
    """The daemon's Unix socket when nothing else is configured: ``cachesvc.sock`` in the user's runtime directory."""
    with warnings.catch_warnings():
        # Where there is no runtime directory (no XDG_RUNTIME_DIR) the fallback is what we want, not worth a warning.
        warnings.simplefilter("ignore")
        return Path(platformdirs.user_runtime_dir("cachesvc", appauthor=False)) / "cachesvc.sock"


def default_address() -> Address:
    """The address of `default_socket_path`."""
    return Address(path=default_socket_path())


def client_address(given: str | None = None) -> Address:
    """Where a client connects: `given`, else ``CACHESVC_ADDRESS``, else the default. Raises `ValueError`."""
    text = given or os.environ.get(ADDRESS_ENV)
    return parse_address(text) if text else default_address()
