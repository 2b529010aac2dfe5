"""The prefix cache of an engine whose scheduler and workers are different processes.

The scheduler has the tokens: it begins a pass, and learns what is stored. A worker has the pages: it is told the keys
and the id of that pass, and loads and saves under them, on a lease of its own. Tokens are hashed once, and the daemon
accounts for the two as one pass; a lease that was handed over instead could end while the other process still reads,
for it ends with the connection on which it was taken.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from cachesvc.connector.passes import KeyedPass, Pass
from cachesvc.connector.payloads import Pieces
from cachesvc.connector.prefix_cache import PrefixCache
from cachesvc.rpc import cache_pb2 as pb


class SplitPrefixCache(PrefixCache):
    """Either side of it. Everything of `BasePrefixCache` holds."""

    _stored: deque[bytes] | None = None

    @property
    def attached(self) -> bool:
        """Whether there is a daemon to use now."""
        return self._usable and self._link.current() is not None

    # The side that has the tokens

    def keep(self, p: Pass) -> None:
        """Before a hit is taken that may have waited long: asks again if half of its lease is over.

        The pass is then pending as after `begin`, and counts once.
        """
        lease = p.lease if self._usable and not p.pending else None
        if lease is None or lease.match.ends - time.monotonic() > self.options.read_lease_s / 2:
            return
        p.ask_again(self.options.match_deadline_s)
        if self._link.current() is None or not self._lookups.submit(partial(self._look_up, p)):
            p.put_answer(self._not_asked(p))

    def decline(self, p: Pass) -> None:
        """The hit is not wanted: gives up its lease. The pass goes on, its blocks can be saved."""
        lease = p.take_lease() if self._usable else None
        if lease is not None:
            self._release(lease, 0, pb.BYPASSED)

    def distrust(self, key: bytes) -> None:
        """The other side could not load this block: no match reaches over it for `failed_hit_s`."""
        self._failed.add(key)

    # The side that has the pages

    def begin_keys(
        self,
        keys: Sequence[bytes],
        prompt_tokens: int,
        *,
        pass_id: bytes | None,
        tenant: bytes = b"",
        traffic_class: str | None = None,
        local_tokens: int = 0,
    ) -> KeyedPass:
        """A pass with the keys of one that the other side has begun, and on one worker, no more, with its id.

        It is settled, without a hit, and can be saved. To load, `look_up` first.
        """
        p = KeyedPass(
            keys,
            prompt_tokens,
            pass_id=pass_id,
            tenant=tenant,
            traffic_class=traffic_class or self._traffic_class,
            local_tokens=local_tokens,
        )
        p.pending = False
        return p

    def look_up(self, p: KeyedPass) -> None:
        """Begins the look-up of such a pass, once; `wait` and `load` follow as after `begin`."""
        p.deadline = time.monotonic() + self.options.match_deadline_s
        p.pending = True
        self._counters.add(lookups=1, input_tokens=p.prompt_tokens)
        if not self._usable or self._link.current() is None or not self._lookups.submit(partial(self._look_up, p)):
            p.put_answer(self._not_asked(p))

    def extend_keys(self, p: KeyedPass, keys: Sequence[bytes]) -> None:
        """`extend` for such a pass."""
        p.keys.extend(keys)

    def store_now(
        self, keys: Sequence[bytes], payloads: Sequence[Pieces], traffic_class: str | None = None
    ) -> list[bool]:
        """Stores blocks at once, on the calling thread, for an engine that has a thread for it: one per key, whether
        it is stored (or being stored by somebody else). What is known to be stored is not copied.

        At most `save_deadline_s` a batch. The memory must stay as it is until this returns.
        """
        attachment = self._link.current() if self._usable and self.options.save_queue_bytes else None
        if attachment is None:
            self._counters.add(unsaved_blocks=len(keys))
            return [False] * len(keys)
        if any(payload.nbytes != self.payload_bytes for payload in payloads):
            raise ValueError(f"payloads are to have {self.payload_bytes} bytes")
        new = [index for index, key in enumerate(keys) if key not in self._known]
        there = self._saver.store_now(
            [keys[index] for index in new],
            [payloads[index] for index in new],
            traffic_class=self._class_named(traffic_class, attachment),
            max_keys=attachment.max_keys,
        )
        missing = {keys[index] for index in new} - there
        return [key not in missing for key in keys]

    def learn(self, keys: Sequence[bytes], stored_blocks: int) -> None:
        """What the other side has been told: the first `stored_blocks` of a prompt's blocks are stored, no others."""
        self._known.add(keys[:stored_blocks])
        self._known.discard(keys[stored_blocks:])

    def take_stored(self) -> list[bytes]:
        """Keys that were stored since the last call, by anybody. Noted from the first call on, `known_keys` at most."""
        if self._stored is None:
            self._stored = deque(maxlen=self.options.known_keys)
        return [self._stored.popleft() for _ in range(len(self._stored))]

    def _note_stored(self, keys: Sequence[bytes]) -> None:
        if self._stored is not None:
            self._stored.extend(keys)
