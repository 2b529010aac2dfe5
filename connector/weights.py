"""A digest of weight files, so that two models, or two versions of one, never share KV."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import re
import time
from pathlib import Path
from typing import Final

import xxhash

logger = logging.getLogger("cachesvc.connector")

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""Endings of files that hold weights."""

_SMALL: Final = (".json", ".model")
"""And of those beside them that say what the weights mean."""

_CONTENT_NAME: Final = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
"""In a hub's cache the files of a snapshot are links to files that are named by their content's hash."""

_PIECE: Final = 64 << 20


def digest_files(path: Path) -> str:
    """Digest (hex) over the names and contents of weight files: of a directory's, or of one file.

    Takes the time of reading them once, from the page cache as a rule. Raises `OSError`, and `ValueError` when there
    are no weights.
    """
    started, read = time.monotonic(), 0
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    total = hashlib.sha256()
    weights = 0
    for file in files:
        if not file.is_file() or file.suffix not in WEIGHTS + _SMALL:
            continue
        weights += file.suffix in WEIGHTS
        target = file.resolve().name
        if file.is_symlink() and _CONTENT_NAME.fullmatch(target):
            content = target
        else:
            content = _digest_of(file)
            read += file.stat().st_size
        total.update(f"{file.name}\0{content}\0".encode())
    if not weights:
        raise ValueError(f"{path} holds no weight files ({', '.join(WEIGHTS)})")
    if read:
        logger.info("digest of %.1f GB of weights took %.1f s", read / 1e9, time.monotonic() - started)
    return total.hexdigest()


def nobody_elses() -> str:
    """A revision that no other engine has, and that this one never has again: for weights that cannot be told apart."""
    return "private-" + os.urandom(16).hex()


def _digest_of(file: Path) -> str:
    """Not against forgers: whoever can change the weights needs no collision."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as opened:
        if not file.stat().st_size:
            return digest.hexdigest()
        with mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
            for start in range(0, len(view), _PIECE):
                with view[start : start + _PIECE] as piece:
                    digest.update(piece)
    return digest.hexdigest()
