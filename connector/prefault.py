"""Filling a mapping's page tables in the background, so that no copy waits for the kernel to do it page by page."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Sequence
from typing import Final

_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
# Bytes at a time: `mmap.madvise` keeps other threads waiting, here for a fraction of a millisecond.
_STEP: Final = 4 << 20
_PAUSE_S: Final = 0.0005


class Prefault:
    """Works through `mappings` (a map, and whether it is written to) until done, or until `stop`."""

    def __init__(self, mappings: Sequence[tuple[mmap.mmap, bool]]) -> None:
        self._mappings = mappings
        self._stopped = threading.Event()

    def start(self) -> None:
        with contextlib.suppress(RuntimeError):  # no thread can be had: copies fill the tables themselves
            threading.Thread(target=self._run, name="cachesvc-prefault", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        for memory, written in self._mappings:
            advice = _MADV_POPULATE_WRITE if written else _MADV_POPULATE_READ
            for start in range(0, len(memory), _STEP):
                if self._stopped.is_set():
                    return
                try:
                    memory.madvise(advice, start, min(_STEP, len(memory) - start))
                except (OSError, ValueError):  # an old kernel, no memory, or closed
                    return
                time.sleep(_PAUSE_S)
