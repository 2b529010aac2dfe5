"""`PrefixCache`: the prefix cache of an engine, kept by a daemon. `NullPrefixCache`: the same with the cache off."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from cachesvc.connector.base import BasePrefixCache, Gather, GatherCheckpoint, RestoreCheckpoint, Scatter
from cachesvc.connector.checkpoints import Checkpoints
from cachesvc.connector.client import Attachment, Client, Match
from cachesvc.connector.errors import BadChecksum, CacheError, LeaseLost, NotAttached, TimedOut
from cachesvc.connector.link import Link
from cachesvc.connector.loader import Loader, Loading
from cachesvc.connector.memory import FailedKeys, KnownKeys, PromptMemory
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.passes import Answer, Lease, Pass
from cachesvc.connector.staging import HostStaging, Saver, Staging
from cachesvc.connector.stats import CacheStats, Counters
from cachesvc.connector.workers import Workers
from cachesvc.keys import Namespace, PrefixHasher, Tokens
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.address import client_address

__all__ = ["BasePrefixCache", "CacheOptions", "CacheStats", "NullPrefixCache", "Pass", "PrefixCache"]

logger = logging.getLogger("cachesvc.connector")

MAX_COMPLAINTS = 32
"""Unknown traffic classes that are logged, once each: they may come from requests, so there could be any number."""


class PrefixCache(BasePrefixCache):
    """Asks the daemon at `address` (default: ``CACHESVC_ADDRESS``, else the user's own daemon).

    The constructor neither waits nor needs a daemon: until one answers, and whenever it does not, there are no hits.
    A process forked from one that has used a cache has none, here or in an object of its own: spawn it instead.
    Raises `ValueError` for a malformed address or sizes that make no sense.
    """

    def __init__(
        self,
        namespace: Namespace,
        payload_bytes: int,
        *,
        address: str | None = None,
        traffic_class: str = "agent",
        options: CacheOptions = CacheOptions(),  # noqa: B008  # frozen
        shard: int = 0,
        checkpoint_bytes: int = 0,
        staging: Staging | None = None,
    ) -> None:
        """With `checkpoint_bytes` a hit ends at a checkpoint, which `load` gives to `restore`; of the namespace's
        shards the second half are then those of checkpoints.

        `staging`: of a device, by way of which blocks are saved; by default they, and checkpoints in any case, are
        gathered into host memory.
        """
        shards = namespace.shards // 2 if checkpoint_bytes else namespace.shards
        if payload_bytes <= 0 or checkpoint_bytes < 0 or not 0 <= shard < shards:
            raise ValueError(
                f"payload_bytes {payload_bytes}, checkpoint_bytes {checkpoint_bytes} or shard {shard} of {shards} "
                "makes no sense"
            )
        largest = max(payload_bytes, checkpoint_bytes)
        if 0 < options.save_queue_bytes < largest:
            raise ValueError(f"save_queue_bytes {options.save_queue_bytes} holds no block of {largest} bytes")
        self.namespace = namespace
        self.payload_bytes = payload_bytes
        self.checkpoint_bytes = checkpoint_bytes
        self.options = options
        self.match_budget_s = options.match_budget_s
        self._traffic_class = traffic_class
        self._pid = os.getpid()
        self._closed = False
        self._counters = Counters()
        self._known = KnownKeys(options.known_keys)
        self._prompts = PromptMemory(options.known_prompts, options.known_prompt_bytes)
        self._failed = FailedKeys(options.failed_keys, options.failed_hit_s, time.monotonic)
        self._lock = threading.Lock()
        self._unreachable_tokens = 0  # of prompts for which no daemon could be asked, until one can be told
        self._unknown_classes: set[str] = set()
        self._lookups = Workers("cachesvc-lookup", threads=options.lookup_threads, limit=options.max_lookups)
        staging = staging or HostStaging(options.copy_threads)
        self._client = Client(client_address(address), options, shard, staging)
        self._link = Link(
            self._client,
            namespace.canonical_json(),
            [payload_bytes] * shards + [checkpoint_bytes] * (namespace.shards - shards),
            options,
            self._counters,
            on_boot=self._forget,
            checkpoint_shards=namespace.shards - shards,
        )
        ways = self._client, self._link
        self._loader = Loader(*ways, options, shard, payload_bytes)
        self._saver = Saver(
            *ways,
            self._known,
            self._failed,
            self._counters,
            options,
            shard,
            payload_bytes,
            on_stored=self._note_stored,
            staging=staging,
        )
        self._checkpoints = Checkpoints(*ways, options, self._counters, shards + shard, checkpoint_bytes)

    # The engine's side

    def begin(
        self,
        tokens: Tokens,
        *,
        traffic_class: str | None = None,
        salt: bytes = b"",
        adapter: bytes = b"",
        extra: Mapping[int, bytes] | None = None,
        local_tokens: int = 0,
        counted: bool = True,
    ) -> Pass:
        if not self._usable:
            p = Pass(tokens)
            p.put_answer(Answer(reason="unreachable"))
            return p
        p = Pass(
            tokens,
            PrefixHasher(self.namespace, salt=salt, adapter=adapter, extra=extra),
            traffic_class=traffic_class or self._traffic_class,
            local_tokens=local_tokens,
            wait_s=self.options.match_deadline_s,
            seed=(salt, adapter),
            memory=None if extra else self._prompts,
        )
        p.counted = counted
        self._counters.add(lookups=1, input_tokens=len(tokens))
        if self._link.current() is None or not self._lookups.submit(partial(self._look_up, p)):
            p.put_answer(self._not_asked(p))
        return p

    def poll(self, p: Pass) -> bool:
        if p.pending:
            answer = p.take_answer() if self._pid == os.getpid() else Answer(reason="unreachable")
            if answer is None:
                return False
            self._deliver(p, answer)
        return True

    def wait(self, p: Pass, timeout_s: float) -> bool:
        if p.pending:
            p.answered.wait(max(0.0, min(timeout_s, p.deadline - time.monotonic())))
        return self.poll(p)

    def load(self, p: Pass, scatter: Scatter, restore: RestoreCheckpoint | None = None) -> int:
        lease = None if p.pending or not p.hit_tokens or not self._usable else p.take_lease()
        if lease is None:
            return 0
        block_tokens = self.namespace.block_tokens
        first, end = p.local_tokens // block_tokens, p.hit_tokens // block_tokens
        loading = Loading(p, lease, first, end)
        restored = not self.checkpoint_bytes
        try:
            # Such a block goes over tokens that the engine holds itself: they must not be lost if the load fails.
            self._loader.bring(loading, scatter, copy_first=p.local_tokens % block_tokens > 0)
            if restore is not None and loading.loaded == end and not restored:
                restored = self._checkpoints.load(loading, restore)
        finally:
            self._end_load(loading, usable=loading.loaded if restored else first)
        p.loaded_tokens = loading.loaded * block_tokens if restored and loading.loaded > first else 0
        return p.loaded_tokens

    def extend(self, p: Pass, tokens: Tokens) -> None:
        p.add(tokens)

    def save(self, p: Pass, computed_tokens: int, gather: Gather) -> int:
        if not self._usable or p.finished or not self.options.save_queue_bytes or not p.hash(wait=False):
            return 0
        goal = min(computed_tokens // self.namespace.block_tokens, len(p.keys))
        p.save_goal = max(p.save_goal, goal)
        p.next_save = max(p.next_save, p.loaded_tokens // self.namespace.block_tokens)
        attachment = self._link.current()
        p.save_stopped_by = "" if attachment else "no daemon"
        queued = 0
        while p.next_save < goal and attachment is not None:
            first = p.next_save
            end = next((i for i in range(first, goal) if p.keys[i] in self._known), goal)
            if first == end:  # it is stored already
                p.next_save += 1
                continue
            taken = self._saver.take(
                p.keys[first:end],
                partial(gather, first),
                traffic_class=self._class_of(p, attachment),
                max_keys=attachment.max_keys,
            )
            p.next_save += taken
            queued += taken
            if taken < end - first:
                p.save_stopped_by = "full"
                break
        return queued

    def save_checkpoints(self, p: Pass, start: int, end: int, gather: GatherCheckpoint) -> int:
        attachment = self._link.current() if self._usable and not p.finished else None
        if attachment is None or not self.options.save_queue_bytes or not p.hash(wait=False):
            return 0
        return self._checkpoints.save(p, start, end, gather, self.namespace.block_tokens, self._class_of(p, attachment))

    def finish(self, p: Pass) -> None:
        if self._pid != os.getpid():
            return
        with p.lock:
            if p.finished:
                return
            p.finished = p.given_up = True
            reader = p.reader
        if reader is not None:
            reader.cancel()
        if p.kept_back is not None:
            p.kept_back(self._usable)
            p.kept_back = None
        if not self._usable:
            return
        lease = p.take_lease()
        if lease is not None:
            self._release(lease, 0, pb.TIMED_OUT if p.pending else pb.BYPASSED)
        if p.pending:
            self._deliver(p, Answer(reason="abandoned"))
        left_out = p.save_goal - p.next_save
        if left_out > 0:
            self._counters.add(**{"unsaved_blocks" if p.save_stopped_by == "no daemon" else "dropped_blocks": left_out})

    def flush(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        savers = (self._saver, self._checkpoints.saver) if self._usable else ()
        return all(saver.flush(max(0.0, deadline - time.monotonic())) for saver in savers)

    def ready(self, timeout_s: float) -> bool:
        return self._usable and self._link.check(timeout_s)

    def close(self) -> None:
        if not self._usable:
            return
        self._closed = True
        bound = self.options.close_deadline_s
        deadline = time.monotonic() + bound
        workers = (self._saver, self._checkpoints.saver, self._lookups)
        for worker in workers:
            worker.close(max(0.0, deadline - time.monotonic()))
        self._link.close(bound)
        for worker in workers:
            worker.close(bound)  # whatever still waited for the daemon has been cut off now

    @property
    def stats(self) -> CacheStats:
        values: dict[str, Any] = self._counters.snapshot() if self._pid == os.getpid() else {}
        state, openings = self._link.breaker_state
        return CacheStats(
            **values,
            queued_bytes=self._saver.queued_bytes + self._checkpoints.saver.queued_bytes if self._usable else 0,
            attached=self._usable and self._link.current() is not None,
            breaker=state,
            breaker_openings=openings,
        )

    # The connector's own threads

    @property
    def _usable(self) -> bool:
        """Not in a forked child: it has none of the threads, and locks perhaps held by one of them."""
        return not self._closed and self._pid == os.getpid()

    def _look_up(self, p: Pass) -> None:
        answer = Answer(reason="failed")
        try:
            answer = self._ask(p)
        finally:
            if not p.put_answer(answer) and answer.lease is not None:
                self._counters.add(late_answers=1)
                self._release(answer.lease, 0, pb.TIMED_OUT)

    def _ask(self, p: Pass) -> Answer:
        if not p.hash(wait=True):
            return Answer(reason="failed")
        missed = self._take_unreachable_tokens()
        try:
            return self._link.use(
                partial(self._match, p, missed), renew_s=p.deadline - time.monotonic(), engine_waited=True
            )
        except CacheError:
            self._add_unreachable_tokens(missed)
            return self._not_asked(p)

    def _match(self, p: Pass, unreachable_tokens: int, attachment: Attachment) -> Answer:
        block_tokens = self.namespace.block_tokens
        keys = p.keys[: min((p.prompt_tokens - 1) // block_tokens, attachment.max_keys)]
        remaining = p.deadline - time.monotonic()
        if remaining <= 0:
            raise CacheError("the pass has waited too long to be asked for")
        match = self._client.match(
            attachment,
            keys,
            traffic_class=self._class_of(p, attachment),
            input_tokens=p.prompt_tokens,
            local_tokens=p.local_tokens,
            min_blocks=max(self.options.min_hit_blocks, p.local_tokens // block_tokens + 1),
            pass_id=p.id,
            unreachable_tokens=unreachable_tokens,
            tenant=p.tenant,
            counted=p.counted,
            deadline_s=remaining,
        )
        return self._found(p, attachment, keys, match)

    def _found(self, p: Pass, attachment: Attachment, keys: list[bytes], match: Match) -> Answer:
        self._known.add(keys[: match.stored_blocks])
        self._known.discard(keys[match.stored_blocks :])
        if not match.lease_id:
            return Answer(stored_blocks=match.stored_blocks)
        lease = Lease(match, attachment)
        hit_blocks = self._failed.good_prefix(keys[: match.blocks])
        if self.checkpoint_bytes and not (hit_blocks == match.blocks and self._checkpoints.good(keys[hit_blocks - 1])):
            hit_blocks = 0  # without what lies at its end a shorter prefix is of no use
        if hit_blocks < self.options.min_hit_blocks or hit_blocks <= p.local_tokens // self.namespace.block_tokens:
            self._release(lease, 0, pb.BYPASSED if hit_blocks == match.blocks else pb.LOAD_ERROR)
            return Answer(stored_blocks=match.stored_blocks)
        return Answer(hit_blocks, lease, "hit", match.stored_blocks)

    def _not_asked(self, p: Pass) -> Answer:
        if p.counted:
            self._add_unreachable_tokens(p.prompt_tokens)
        return Answer(reason="timed out" if time.monotonic() >= p.deadline else "unreachable")

    def _deliver(self, p: Pass, answer: Answer) -> None:
        """Shows the answer to the engine, and counts it."""
        p.pending = False
        p.reason = answer.reason
        p.stored_blocks = answer.stored_blocks
        p.hit_tokens = answer.hit_blocks * self.namespace.block_tokens
        if answer.lease is not None:
            p.tiers = answer.lease.match.tiers[: answer.hit_blocks]
        if not self._usable or p.asked_again:
            return
        hit = answer.hit_blocks > 0
        self._counters.add(
            hits=hit,
            hit_tokens=p.hit_tokens,
            misses=not hit,
            timeouts=answer.reason == "timed out",
            unreachable=answer.reason == "unreachable",
        )

    def _end_load(self, loading: Loading, *, usable: int) -> None:
        """Accounts for a load, says what it tells about the daemon and the blocks, and gives the lease back.

        Blocks below `usable` can be used; fewer than were loaded where the checkpoint at the end is missing.
        """
        p, lease, end, error = loading.p, loading.lease, loading.end, loading.error
        loaded, blocks = usable, usable - loading.first
        self._counters.add(
            loads=1,
            loaded_blocks=blocks,
            loaded_tokens=blocks * self.namespace.block_tokens,
            loaded_bytes=blocks * self.payload_bytes,
            failed_loads=loaded < end,
            corrupt_blocks=isinstance(error, BadChecksum),
            load_seconds=time.monotonic() - loading.started,
        )
        if loaded == end:
            self._link.success()
            rest = pb.BYPASSED if p.trimmed else pb.LOAD_ERROR
            self._release(lease, loaded, rest if lease.match.blocks > end else pb.MISS_REASON_UNSPECIFIED)
            return
        if error is None or p.finished:  # the engine's own doing
            self._release(lease, loaded, pb.BYPASSED)
            return
        self._release(lease, loaded, error.miss)  # first: afterwards there may be no cache for a while
        if isinstance(error, TimedOut) and blocks > 0 and loading.idle_s < self.options.load_stall_s:
            return  # slow but steady
        self._link.failure(lease.attachment, error, engine_waited=True)
        if not isinstance(error, NotAttached | LeaseLost) and loading.loaded < end:
            self._failed.add(p.keys[loading.loaded])
            self._known.discard(p.keys[loading.loaded : end])

    def _release(self, lease: Lease, loaded_blocks: int, not_loaded: pb.MissReason.ValueType) -> None:
        """In the background. A lease that cannot be released ends by itself."""
        attachment = self._link.current()
        if attachment is not None and attachment.boot_id == lease.attachment.boot_id:
            self._lookups.submit(partial(self._send_release, lease, loaded_blocks, not_loaded))

    def _send_release(self, lease: Lease, loaded_blocks: int, not_loaded: pb.MissReason.ValueType) -> None:
        try:
            self._client.release(lease.attachment, lease.match, loaded_blocks, not_loaded)
        except CacheError as error:
            self._link.failure(lease.attachment, error, engine_waited=False)

    def _class_of(self, p: Pass, attachment: Attachment) -> str:
        return self._class_named(p.traffic_class, attachment)

    def _class_named(self, asked: str | None, attachment: Attachment) -> str:
        """The traffic class that was asked for, if the daemon has it, else the engine's own, else the daemon's
        first."""
        known = attachment.traffic_classes
        wanted = (asked or self._traffic_class, self._traffic_class)
        used = next((name for name in wanted if name in known), known[0])
        for name in wanted:
            if name not in known and name not in self._unknown_classes and len(self._unknown_classes) < MAX_COMPLAINTS:
                self._unknown_classes.add(name)
                text = "the daemon knows no traffic class %r, only %s; %r is used instead"
                logger.warning(text, name, ", ".join(known), used)
        return used

    def _take_unreachable_tokens(self) -> int:
        with self._lock:
            tokens, self._unreachable_tokens = self._unreachable_tokens, 0
            return tokens

    def _add_unreachable_tokens(self, tokens: int) -> None:
        with self._lock:
            self._unreachable_tokens += tokens

    def _note_stored(self, keys: Sequence[bytes]) -> None:
        """For a subclass that passes it on."""

    def _forget(self) -> None:
        """Another boot of the daemon: what was known of the last one need not hold."""
        self._known.clear()
        self._failed.clear()
        self._checkpoints.forget()


class NullPrefixCache(BasePrefixCache):
    """The cache is off: hits nothing, saves nothing, needs nothing."""

    def begin(
        self,
        tokens: Tokens,
        *,
        traffic_class: str | None = None,
        salt: bytes = b"",
        adapter: bytes = b"",
        extra: Mapping[int, bytes] | None = None,
        local_tokens: int = 0,
        counted: bool = True,
    ) -> Pass:
        return Pass(tokens)

    def poll(self, p: Pass) -> bool:
        p.pending = False
        return True

    def wait(self, p: Pass, timeout_s: float) -> bool:
        return self.poll(p)

    def load(self, p: Pass, scatter: Scatter, restore: RestoreCheckpoint | None = None) -> int:
        return 0

    def extend(self, p: Pass, tokens: Tokens) -> None:
        pass

    def save(self, p: Pass, computed_tokens: int, gather: Gather) -> int:
        return 0

    def finish(self, p: Pass) -> None:
        p.finished = True

    def flush(self, timeout_s: float) -> bool:
        return True

    def ready(self, timeout_s: float) -> bool:
        return False

    def close(self) -> None:
        pass

    @property
    def stats(self) -> CacheStats:
        return CacheStats()
