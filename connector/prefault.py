"""Filling a mapping's page tables in the background, so that no copy waits for the kernel to do it page by page."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Final

_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
# Bytes at a time: `mmap.madvise` keeps other threads waiting, here for a fraction of a millisecond.
_STEP: Final = 4 << 20
_PAUSE_S: Final = 0.0005
# How long the daemon may take to make its memory resident, and how often it is looked whether it has.
_PATIENCE_S: Final = 600.0
_POLL_S: Final = 0.1


class Prefault:
    """Works through `mappings` (a map, and whether it is written to) until done, or until `stop`.

    Begins when all memory behind them has been allocated, which is its owner's doing and goes on his account; `memory`
    is a descriptor of it, and is closed.
    """

    def __init__(self, mappings: Sequence[tuple[mmap.mmap, bool]], memory: int = -1) -> None:
        self._mappings = mappings
        self._memory = memory
        self._stopped = threading.Event()

    def start(self) -> None:
        try:
            threading.Thread(target=self._run, name="cachesvc-prefault", daemon=True).start()
        except RuntimeError:  # no thread can be had: copies fill the tables themselves
            os.close(self._memory)

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        try:
            if self._allocated():
                self._fill_tables()
        finally:
            os.close(self._memory)

    def _allocated(self) -> bool:
        size = len(self._mappings[0][0])
        deadline = time.monotonic() + _PATIENCE_S
        while os.fstat(self._memory).st_blocks * 512 < size:
            if self._stopped.wait(_POLL_S) or time.monotonic() > deadline:
                return False
        return True

    def _fill_tables(self) -> None:
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
