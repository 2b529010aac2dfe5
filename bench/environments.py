"""Gives each rival a virtual environment and the system libraries it needs, all below one cache directory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_INSTALL_SECONDS = 1800.0


class InstallError(Exception):
    """One line that says why a rival cannot be installed."""


@dataclass(frozen=True)
class Requirements:
    """`pip` is installed step by step, each a list of requirements; `debian` packages are unpacked, not installed."""

    pip: Sequence[Sequence[str]] = ()
    debian: Sequence[str] = ()


@dataclass(frozen=True)
class Environment:
    """Where a rival's programs, libraries and Python are."""

    python: str
    path: Sequence[Path] = ()
    libraries: Sequence[Path] = ()


OWN = Environment(sys.executable)
"""Where this benchmark itself runs."""


def provide(name: str, requirements: Requirements, cache: Path) -> Environment:
    """Makes what is missing; a second call finds it there. Raises `InstallError`."""
    home = cache / name
    stamp = home / "installed"
    wanted = repr(requirements)
    root = home / "debian"
    python = home / "venv" / "bin" / "python" if requirements.pip else Path(sys.executable)
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        if requirements.pip:
            _run([sys.executable, "-m", "venv", str(home / "venv")], home)
        for step in requirements.pip:
            _run([str(python), "-m", "pip", "install", "-q", "--no-compile", *step], home)
        if requirements.debian:
            _unpack(requirements.debian, root)
        stamp.write_text(wanted)
    libraries = sorted({file.parent for file in root.rglob("*.so*")})
    return Environment(str(python), [root / "usr" / "bin"] if requirements.debian else [], libraries)


def _unpack(packages: Sequence[str], root: Path) -> None:
    """Without installing them, so that nothing outside of `root` changes and nothing is started."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise InstallError(f"{', '.join(packages)} come from Debian, and {tool} is not here")
    root.mkdir(parents=True)
    try:
        _run(["apt-get", "download", *packages], root)
    except InstallError:  # perhaps its lists are missing or old
        _run(["apt-get", "update"], root)
        _run(["apt-get", "download", *packages], root)
    for file in root.glob("*.deb"):
        _run(["dpkg-deb", "-x", str(file), str(root)], root)


def _run(command: Sequence[str], directory: Path) -> None:
    try:
        result = subprocess.run(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_INSTALL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{' '.join(command[:4])}: {error}") from error
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines() or ["it said nothing"]
        raise InstallError(f"{' '.join(command[:4])} … fails: {lines[-1][-300:]}")
