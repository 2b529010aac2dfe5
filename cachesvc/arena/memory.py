"""The arena's memory: one memfd, shared with engines on this host by its descriptor."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import threading
import time
from typing import Final

from cachesvc.errors import ConfigError

log = logging.getLogger("cachesvc.arena")

_MFD_HUGETLB: Final = 4
_HUGE_PAGE: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
# Bytes made resident in one step: short enough that shutdown does not wait for it.
_STEP: Final = 64 << 20


class ArenaMemory:
    """`size` bytes of shared memory. Its size is sealed, so that no client can cut it under another's feet.

    `writable` is the descriptor for clients that may write, `readable` the same memory opened read-only.
    """

    def __init__(self, size: int) -> None:
        """Raises `ConfigError` when the memory cannot be had."""
        self.size = size
        try:
            self.writable, self._map = _allocate(size)
            self.readable = os.open(f"/proc/self/fd/{self.writable}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"no arena of {size} bytes can be had: {error.strerror}; set a smaller arena_bytes"
            ) from error
        self.view = memoryview(self._map)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._prefault, name="prefault", daemon=True)

    def start_prefault(self) -> None:
        """Makes the memory resident in the background, so that no engine waits for the kernel to clear pages."""
        self._thread.start()

    def close(self) -> None:
        """Ends the pre-faulting and closes the descriptors; the memory lives on while clients map it."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        os.close(self.writable)
        os.close(self.readable)

    def _prefault(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        started = time.monotonic()
        told = 0
        for offset in range(0, self.size, _STEP):
            if self._stop.is_set():
                return
            length = min(_STEP, self.size - offset)
            if libc.madvise(ctypes.c_void_p(base + offset), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
                log.info("arena is not pre-faulted: %s", os.strerror(ctypes.get_errno()))
                return
            if (quarter := 4 * (offset + length) // self.size) > told:
                told = quarter
                log.info(
                    "arena: %d %% of %.1f GB pre-faulted, %.1f s",
                    25 * told,
                    self.size / 1e9,
                    time.monotonic() - started,
                )


def _allocate(size: int) -> tuple[int, mmap.mmap]:
    """A sealed memfd and a mapping of it, of the system's reserved huge pages if it has enough. Raises `OSError`."""
    if size % _HUGE_PAGE == 0:
        with contextlib.suppress(OSError):  # there are too few, or none
            made = _allocate_with(size, _MFD_HUGETLB)
            log.info("arena: %.1f GB of huge pages", size / 1e9)
            return made
    descriptor, mapping = _allocate_with(size, 0)
    with contextlib.suppress(OSError, ValueError):
        mapping.madvise(_MADV_HUGEPAGE)  # a wish: systems without transparent huge pages for this refuse it
    return descriptor, mapping


def _allocate_with(size: int, flags: int) -> tuple[int, mmap.mmap]:
    descriptor = os.memfd_create("cachesvc-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return descriptor, mmap.mmap(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
