"""The tie to one daemon: attached or not, and the one background thread that keeps it so.

Only that thread connects. Everybody else asks `current`, which never waits: an attachment, or None and so a miss. A
daemon that appears, returns or was restarted is therefore picked up by itself, at no cost to an engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from cachesvc.connector.breaker import Breaker
from cachesvc.connector.client import Attachment, Client
from cachesvc.connector.errors import CacheError, NotAttached, Rejected, TimedOut, Unreachable
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.stats import Counters

logger = logging.getLogger("cachesvc.connector")

R = TypeVar("R")


class Link:
    """Attaches `client` to a namespace and keeps it attached; `on_boot` is called before another boot is used."""

    def __init__(
        self,
        client: Client,
        namespace_json: str,
        payload_bytes: Sequence[int],
        options: CacheOptions,
        counters: Counters,
        on_boot: Callable[[], None],
        checkpoint_shards: int = 0,
    ) -> None:
        self._client = client
        self._namespace_json = namespace_json
        self._sizes = payload_bytes, checkpoint_shards
        self._options = options
        self._counters = counters
        self._on_boot = on_boot
        self._changed = threading.Condition()
        self._breaker = Breaker(options, time.monotonic)
        self._attachment: Attachment | None = None
        self._boot_id = b""  # of the last attachment
        self._attached = 0  # how often an Attach has succeeded
        self._recheck = False
        self._closed = False
        self._complaints: set[str] = set()
        self._thread = threading.Thread(target=self._keep, name="cachesvc-link", daemon=True)
        self._thread.start()

    @property
    def breaker_state(self) -> tuple[str, int]:
        """The breaker's state and how often it has opened."""
        return self._breaker.state.value, self._breaker.openings

    def current(self) -> Attachment | None:
        """The attachment to use now, or None: then there is no cache for the moment. Never waits for the network."""
        return self._attachment if self._breaker.closed else None

    def use(self, call: Callable[[Attachment], R], *, renew_s: float, engine_waited: bool) -> R:
        """For background threads: what `call` returns. Raises `CacheError`.

        If the daemon turns out to have been restarted, waits up to `renew_s` for another attachment and calls once
        more. What happens is told to the breaker.
        """
        attachment = self.current()
        if attachment is None:
            raise CacheError("there is no cache for the moment")
        try:
            try:
                result = call(attachment)
            except NotAttached:
                attachment = self._renew(attachment, renew_s)
                result = call(attachment)
        except CacheError as error:
            self.failure(attachment, error, engine_waited=engine_waited)
            raise
        self.success()
        return result

    def check(self, timeout_s: float) -> bool:
        """Asks the daemon now; True as soon as it has answered, False when it has not within `timeout_s`."""
        with self._changed:
            before = self._attached
            self._recheck = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._closed or (self._attached > before and self.current() is not None), timeout_s
            )
            return self._attached > before and self.current() is not None

    def success(self) -> None:
        """A call for an engine succeeded."""
        with self._changed:
            self._breaker.success()

    def failure(self, attachment: Attachment, error: CacheError, *, engine_waited: bool) -> None:
        """A call failed. One that an engine waited for in vain opens the breaker alone; some errors blame nobody."""
        with self._changed:
            if attachment.boot_id != self._boot_id:
                return  # it says nothing about the daemon that runs now
            if isinstance(error, NotAttached):
                self._drop(attachment)
            if error.blame:
                self._breaker.failure(
                    timed_out=engine_waited and isinstance(error, TimedOut), lost=isinstance(error, Unreachable)
                )
            lost = error.blame and not self._breaker.closed
            self._changed.notify_all()
        if lost:
            self._complain("lost", f"the cache daemon fails ({error}); going on without it")
        elif isinstance(error, Rejected):
            self._complain("rejected", f"the cache daemon refuses a call: {error}")

    def close(self, timeout_s: float) -> None:
        """Closes the client too. Whoever waits gets None; the thread is given `timeout_s` to end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._client.close()
        self._thread.join(timeout_s)

    def _keep(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._recheck and (pause := self._breaker.probe_in()) != 0:
                    self._changed.wait(pause)
                if self._closed:
                    return
                self._recheck = False
                self._breaker.probe_started()
            self._attach()

    def _attach(self) -> None:
        try:
            attachment = self._client.attach(self._namespace_json, *self._sizes)
        except Exception as fault:  # noqa: BLE001  a daemon's nonsense must not end the only thread that connects
            error = fault if isinstance(fault, CacheError) else CacheError(f"Attach: {fault!r}")
            refused = isinstance(error, Rejected)
            with self._changed:
                self._breaker.probe_failed(self._options.refused_retry_s if refused else None)
            if refused:
                self._complain("refused", f"the cache daemon refuses this client, so there is no cache: {error}")
            else:
                self._complain("absent", f"no answer from a cache daemon at {self._client.address}; trying on: {error}")
            return
        with self._changed:
            if self._boot_id not in (b"", attachment.boot_id):
                self._counters.add(boot_changes=1)
                self._on_boot()
            self._boot_id = attachment.boot_id
            self._attachment = attachment
            self._attached += 1
            self._breaker.probe_succeeded()
            news = self._complaints or self._attached == 1
            self._complaints.clear()
            self._changed.notify_all()
        if news:
            logger.info("attached to the cache daemon at %s", self._client.address)

    def _renew(self, stale: Attachment, timeout_s: float) -> Attachment:
        """The attachment after `stale`. Raises `CacheError` when none comes in time."""
        with self._changed:
            self._drop(stale)
            self._changed.wait_for(lambda: self._closed or self.current() is not None, timeout_s)
            attachment = self.current()
        if attachment is None:
            raise CacheError("the daemon was restarted and does not answer yet")
        return attachment

    def _drop(self, stale: Attachment) -> None:
        """Has another one made at once. The lock is held."""
        if self._attachment == stale:
            self._attachment = None
            self._breaker.suspend()
            self._changed.notify_all()

    def _complain(self, kind: str, text: str) -> None:
        """Each kind once until the daemon has answered again, so that a dead one does not fill the log."""
        with self._changed:
            silent = self._closed or kind in self._complaints
            self._complaints.add(kind)
        if not silent:
            logger.warning("%s", text)
