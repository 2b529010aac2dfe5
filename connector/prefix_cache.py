"""`PrefixCache`: the prefix cache of an engine, kept by a daemon. `NullPrefixCache`: the same with the cache off."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cachesvc.connector.base import BasePrefixCache, Gather, Scatter
from cachesvc.connector.buffers import LoadBuffers
from cachesvc.connector.client import Attachment, Client, Match
from cachesvc.connector.errors import BadChecksum, BlockMissing, CacheError, LeaseLost, NotAttached, TimedOut
from cachesvc.connector.link import Link
from cachesvc.connector.loading import BlockReader, BulkReader, Reader, SlotReader, Stream
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
    A process forked from this one has no cache in this object; let it make its own.
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
        staging: Staging | None = None,
    ) -> None:
        """`staging`: of a device, by way of which blocks are saved; by default they are gathered into host memory."""
        if payload_bytes <= 0 or not 0 <= shard < namespace.shards:
            raise ValueError(f"payload_bytes {payload_bytes} or shard {shard} of {namespace.shards} makes no sense")
        if 0 < options.save_queue_bytes < payload_bytes:
            raise ValueError(f"save_queue_bytes {options.save_queue_bytes} holds no block of {payload_bytes} bytes")
        self.namespace = namespace
        self.payload_bytes = payload_bytes
        self.options = options
        self.match_budget_s = options.match_budget_s
        self._traffic_class = traffic_class
        self._pid = os.getpid()
        self._closed = False
        self._counters = Counters()
        self._known = KnownKeys(options.known_keys)
        self._prompts = PromptMemory(options.known_prompts, options.known_prompt_bytes)
        self._failed = FailedKeys(options.failed_keys, options.failed_hit_s, time.monotonic)
        self._buffers = LoadBuffers(payload_bytes, options.load_batch_bytes, options.load_buffers_kept)
        self._lock = threading.Lock()
        self._unreachable_tokens = 0  # of prompts for which no daemon could be asked, until one can be told
        self._unknown_classes: set[str] = set()
        self._lookups = Workers("cachesvc-lookup", threads=options.lookup_threads, limit=options.max_lookups)
        staging = staging or HostStaging(options.copy_threads)
        self._client = Client(client_address(address), options, shard, staging)
        self._link = Link(
            self._client,
            namespace.canonical_json(),
            [payload_bytes] * namespace.shards,
            options,
            self._counters,
            on_boot=self._forget,
        )
        self._saver = Saver(
            self._client,
            self._link,
            self._known,
            self._failed,
            self._counters,
            options,
            payload_bytes,
            on_stored=self._note_stored,
            staging=staging,
        )

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

    def load(self, p: Pass, scatter: Scatter) -> int:
        lease = None if p.pending or not p.hit_tokens or not self._usable else p.take_lease()
        if lease is None:
            return 0
        block_tokens = self.namespace.block_tokens
        first, end = p.local_tokens // block_tokens, p.hit_tokens // block_tokens
        loading = _Loading(p, lease, first, end)
        try:
            if lease.match.arena is not None:
                self._load_from_arena(loading, scatter)
            if lease.match.arena is None or loading.arena_is_full:
                self._load_by_get(loading, scatter)
        finally:
            self._end_load(loading)
        p.loaded_tokens = loading.loaded * block_tokens if loading.loaded > first else 0
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
        return not self._usable or self._saver.flush(timeout_s)

    def ready(self, timeout_s: float) -> bool:
        return self._usable and self._link.check(timeout_s)

    def close(self) -> None:
        if not self._usable:
            return
        self._closed = True
        bound = self.options.close_deadline_s
        deadline = time.monotonic() + bound
        self._saver.close(bound)
        self._lookups.close(max(0.0, deadline - time.monotonic()))
        self._link.close(bound)
        self._saver.close(bound)  # whatever still waited for the daemon has been cut off now
        self._lookups.close(bound)

    @property
    def stats(self) -> CacheStats:
        values: dict[str, Any] = self._counters.snapshot() if self._pid == os.getpid() else {}
        state, openings = self._link.breaker_state
        return CacheStats(
            **values,
            queued_bytes=self._saver.queued_bytes if self._usable else 0,
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
        self._known.add(keys[: match.blocks])
        self._known.discard(keys[match.blocks :])
        if not match.lease_id:
            return Answer(stored_blocks=match.blocks)
        lease = Lease(match, attachment)
        hit_blocks = self._failed.good_prefix(keys[: match.blocks])
        if hit_blocks < self.options.min_hit_blocks or hit_blocks <= p.local_tokens // self.namespace.block_tokens:
            self._release(lease, 0, pb.BYPASSED if hit_blocks == match.blocks else pb.LOAD_ERROR)
            return Answer(stored_blocks=match.blocks)
        return Answer(hit_blocks, lease, "hit", match.blocks)

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
        if not self._usable:
            return
        hit = answer.hit_blocks > 0
        self._counters.add(
            hits=hit,
            hit_tokens=p.hit_tokens,
            misses=not hit,
            timeouts=answer.reason == "timed out",
            unreachable=answer.reason == "unreachable",
        )

    def _load_from_arena(self, loading: _Loading, scatter: Scatter) -> None:
        batch_blocks = max(1, self.options.load_batch_bytes // self.payload_bytes)
        load = partial(self._client.load, loading.lease.match)
        loading.run(
            SlotReader(
                load,
                loading.lease.match,
                payload_bytes=self.payload_bytes,
                first=loading.loaded,
                end=loading.end,
                batch_blocks=batch_blocks,
                deadline_s=self.options.load_deadline_s,
                # Such a block goes over tokens that the engine holds itself: they must not be lost if the load fails.
                copy_first=loading.p.local_tokens % self.namespace.block_tokens > 0,
            ),
            scatter,
        )

    def _load_by_get(self, loading: _Loading, scatter: Scatter) -> None:
        try:
            slots = self._buffers.take()
        except OSError as error:
            loading.error = CacheError(f"no memory for loading: {error}")
            logger.error("%s", loading.error)
            return
        first, end = loading.loaded, loading.end
        begin = partial(self._begin_get, loading)
        reader: Reader
        if self._client.has_bulk:
            reader = BulkReader(partial(begin, self._client.bulk_get), slots, first=first, end=end)
        else:
            boot_id = loading.lease.attachment.boot_id
            reader = BlockReader(partial(begin, self._client.get), slots, first=first, end=end, boot_id=boot_id)
        try:
            loading.run(reader, scatter)
        finally:
            self._buffers.give(slots)

    def _begin_get(self, loading: _Loading, get: Callable[..., Stream]) -> Any:
        attachment, lease, first = self._link.current(), loading.lease, loading.loaded
        if attachment is None or attachment.boot_id != lease.attachment.boot_id:
            raise NotAttached("Get: the lease is of a daemon that is gone")
        remaining = loading.started + self.options.load_deadline_s - time.monotonic()
        if remaining <= 0:
            raise TimedOut("Get: the load has taken too long before it")
        return get(lease.match.lease_id, first=first, count=loading.end - first, deadline_s=remaining)

    def _end_load(self, loading: _Loading) -> None:
        """Accounts for a load, says what it tells about the daemon and the blocks, and gives the lease back."""
        p, lease, loaded, end, error = loading.p, loading.lease, loading.loaded, loading.end, loading.error
        blocks = loaded - loading.first
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
            self._release(lease, loaded, pb.LOAD_ERROR if lease.match.blocks > end else pb.MISS_REASON_UNSPECIFIED)
            return
        if error is None or p.finished:  # the engine's own doing
            self._release(lease, loaded, pb.BYPASSED)
            return
        self._release(lease, loaded, error.miss)  # first: afterwards there may be no cache for a while
        if isinstance(error, TimedOut) and blocks > 0 and loading.idle_s < self.options.load_stall_s:
            return  # slow but steady
        self._link.failure(lease.attachment, error, engine_waited=True)
        if not isinstance(error, NotAttached | LeaseLost):
            self._failed.add(p.keys[loaded])
            self._known.discard(p.keys[loaded:end])

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
        """The traffic class of a pass, if the daemon has it, else the engine's own, else the daemon's first."""
        known = attachment.traffic_classes
        wanted = (p.traffic_class, self._traffic_class)
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


class _Loading:
    """One load under way: what came so far, from whichever reader."""

    def __init__(self, p: Pass, lease: Lease, first: int, end: int) -> None:
        self.p = p
        self.lease = lease
        self.first = self.loaded = first
        self.end = end
        self.started = time.monotonic()
        self.error: CacheError | None = None
        self.idle_s = 0.0

    @property
    def arena_is_full(self) -> bool:
        """The daemon has no room to bring the next block into its arena; it can still be fetched."""
        return isinstance(self.error, BlockMissing) and self.error.miss == pb.LOAD_ERROR and not self.p.finished

    def run(self, reader: Reader, scatter: Scatter) -> None:
        """Hands what `reader` brings to the engine. What `scatter` raises goes to the caller."""
        with self.p.lock:
            self.p.reader = reader
            if self.p.finished:
                reader.cancel()
        try:
            for index, payloads in reader.batches():
                scatter(index, payloads)
                if not reader.still_good():
                    break
                self.loaded = index + len(payloads)
        finally:
            reader.cancel()
            self.p.reader = None
            self.error, self.idle_s = reader.error, reader.idle_s


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
    ) -> Pass:
        return Pass(tokens)

    def poll(self, p: Pass) -> bool:
        p.pending = False
        return True

    def wait(self, p: Pass, timeout_s: float) -> bool:
        return self.poll(p)

    def load(self, p: Pass, scatter: Scatter) -> int:
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
