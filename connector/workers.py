"""A few background threads with a bounded queue; submitting never waits."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("cachesvc.connector")


class Workers:
    """Up to `threads` daemon threads, started as work comes, and at most `limit` jobs waiting for one.

    Not `concurrent.futures`: its threads hold up the interpreter's exit, and its queue has no bound.
    """

    def __init__(self, name: str, *, threads: int, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._wanted = threads
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._closed = False

    def submit(self, job: Callable[[], None]) -> bool:
        """False when the queue is full or closed: the job is not run."""
        with self._changed:
            if self._closed or len(self._jobs) >= self._limit:
                return False
            self._jobs.append(job)
            if self._running + len(self._jobs) > len(self._threads) < self._wanted:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no thread for us: the others do it, if there are any
                    if not self._threads:
                        self._jobs.pop()
                        return False
                else:
                    self._threads.append(thread)
            self._changed.notify()
        return True

    def wait_idle(self, timeout_s: float) -> bool:
        """True once no job waits or runs, False when that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._running, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Runs what was submitted, takes no more, and waits up to `timeout_s` for the threads to end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._running += 1
            try:
                job()
            except Exception:  # a fault in one job must not end the thread that serves the others
                logger.exception("a background job of the cache connector failed")
            with self._changed:
                self._running -= 1
                self._changed.notify_all()
