"""One pass: an engine asking for one prompt (match, load, compute, save), and what is known about it."""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachesvc.connector.client import Attachment, Match
from cachesvc.connector.loading import Reader
from cachesvc.connector.memory import PromptMemory, Seed
from cachesvc.connector.options import HASH_SLICE_TOKENS
from cachesvc.keys import PrefixHasher, Tokens, tenant_id, token_bytes

logger = logging.getLogger("cachesvc.connector")

_WORTH_REMEMBERING = 512
"""Bytes of tokens at once: a prompt, or a decoded block, but not every single decoded token."""


@dataclass(frozen=True)
class Lease:
    """A read lease on the blocks of a match."""

    match: Match
    attachment: Attachment


@dataclass(frozen=True)
class Answer:
    """What a look-up has found. `hit_blocks` may be less than the lease covers, and is 0 without a lease."""

    hit_blocks: int = 0
    lease: Lease | None = None
    reason: str = "miss"  # or: hit, timed out, unreachable, failed, abandoned (finished before it was answered)
    stored_blocks: int = 0  # what the daemon has, whether it may be used or not


class Pass:
    """What an engine holds from `begin` to `finish`. The public fields change only inside the engine's own calls.

    `pending`: no answer yet. `hit_tokens`: length of the stored prefix, counted from the first token, a multiple of the
    block; always less than the prompt, so that one token is left to compute. `reason`: how the look-up ended.
    `loaded_tokens`: length of the prefix that `load` has made usable, 0 before. `stored_blocks`: how many blocks of the
    prompt the daemon has; with checkpoints it may be more than the hit. `tiers`: where each block of the hit lay, one
    `pb.Tier` per block.
    """

    def __init__(
        self,
        tokens: Tokens,
        hasher: PrefixHasher | None = None,
        *,
        traffic_class: str = "",
        local_tokens: int = 0,
        wait_s: float = 0.0,
        seed: Seed = (b"", b""),
        memory: PromptMemory | None = None,
    ) -> None:
        """Without a `hasher` it has no keys and can neither hit nor save. `memory` may know the prompt's beginning."""
        self.id = os.urandom(16)
        self.prompt_tokens = len(tokens)
        self.traffic_class = traffic_class
        self.local_tokens = local_tokens
        self.tenant = tenant_id(seed[0])
        self.pending = True
        self.hit_tokens = 0
        self.loaded_tokens = 0
        self.reason = ""
        self.stored_blocks = 0
        self.tiers = b""
        self.deadline = time.monotonic() + wait_s

        self.counted = True  # in the daemon's accounts

        # Below: for the connector alone. `lock` guards what the engine's and the connector's threads share.
        self.lock = threading.Lock()
        self.answered = threading.Event()
        self.answer: Answer | None = None
        self.lease: Lease | None = None
        self.given_up = False  # an answer that comes now is too late
        self.asked_again = False
        self.finished = False
        self.trimmed = False  # the engine wants less than was found
        self.reader: Reader | None = None  # of the load under way, to be cancelled
        self.next_save = 0  # blocks below it are loaded, stored or queued
        self.kept_back: Callable[[bool], None] | None = None  # a checkpoint, stored (True) at the end or dropped
        self.save_goal = 0
        self.save_stopped_by = ""
        self._hasher = hasher
        self._seed = seed
        self._memory = memory
        self._remembered = b""
        self._hashing = threading.Lock()
        self._hashed = bytearray()  # all tokens whose keys are made, as `token_bytes`
        self._unhashed: list[Tokens] = [_own(tokens)] if hasher else []

    @property
    def keys(self) -> list[bytes]:
        """Keys of the blocks hashed so far."""
        return self._hasher.keys if self._hasher else []

    def add(self, tokens: Tokens) -> None:
        """Appends tokens; they are hashed when somebody needs their keys."""
        if self._hasher:
            self._unhashed.append(_own(tokens))

    def hash(self, *, wait: bool) -> bool:
        """Makes the keys of all tokens. False after bad ones and, if not to `wait`, while another thread is at it."""
        if not self._hashing.acquire(blocking=wait):
            return False
        try:
            while self._hasher and self._unhashed:
                self._hash_more(self._hasher, self._unhashed.pop(0))
        except ValueError as error:  # the engine's mistake; what comes after has no true key
            self._hasher = None
            logger.error("this prompt is not cached: %s", error)
        finally:
            self._hashing.release()
        return self._hasher is not None

    def _hash_more(self, hasher: PrefixHasher, tokens: Tokens) -> None:
        starts = range(0, len(tokens), HASH_SLICE_TOKENS)
        data = b"".join(token_bytes(tokens[start : start + HASH_SLICE_TOKENS]) for start in starts)
        known = self._memory.recall(self._seed, data) if self._memory and not self._hashed else None
        if known is not None:
            self._hasher = hasher = known
        self._hashed += data
        for start in range(4 * hasher.num_tokens, len(self._hashed), 4 * HASH_SLICE_TOKENS):
            hasher.extend_bytes(bytes(self._hashed[start : start + 4 * HASH_SLICE_TOKENS]))
        if self._memory and hasher.keys and len(data) >= _WORTH_REMEMBERING:
            whole = bytes(self._hashed)
            self._remembered = self._memory.remember(self._seed, whole, hasher, instead_of=self._remembered)

    def put_answer(self, answer: Answer) -> bool:
        """For the look-up. False when nobody wants the answer any more: its lease is then the caller's to release."""
        with self.lock:
            if self.given_up:
                return False
            self.answer = answer
            self.lease = answer.lease
        self.answered.set()
        return True

    def ask_again(self, wait_s: float) -> None:
        """Forgets an answer; its lease ends when the next one is taken."""
        with self.lock:
            self.answer = self.lease = None
            self.pending = self.asked_again = True
            self.deadline = time.monotonic() + wait_s
        self.answered.clear()

    def take_answer(self) -> Answer | None:
        """For the engine's calls. None: still pending. At the deadline the pass is given up."""
        with self.lock:
            if self.answer is None and time.monotonic() >= self.deadline:
                self.given_up = True
                self.answer = Answer(reason="timed out")
            return self.answer

    def take_lease(self) -> Lease | None:
        """The lease, to whoever comes first."""
        with self.lock:
            lease, self.lease = self.lease, None
            return lease


class KeyedPass(Pass):
    """A pass whose keys come from another process, which has the tokens: the two sides of one engine name blocks once.

    With `pass_id` it carries that side's id: the daemon accounts for both as one pass, and ends the other's lease when
    this one takes its own. So only one worker may carry it; the passes of the others are not accounted.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        prompt_tokens: int,
        *,
        pass_id: bytes | None,
        tenant: bytes,
        traffic_class: str,
        local_tokens: int,
    ) -> None:
        super().__init__(range(prompt_tokens), traffic_class=traffic_class, local_tokens=local_tokens)
        self.tenant = tenant
        self.id = pass_id or self.id
        self.counted = pass_id is not None
        self._keys = list(keys)

    @property
    def keys(self) -> list[bytes]:
        return self._keys

    def add(self, tokens: Tokens) -> None:
        raise TypeError("this pass takes keys, not tokens")

    def hash(self, *, wait: bool) -> bool:
        return True


def _own(tokens: Tokens) -> Tokens:
    """A copy: engines append to their own lists, and a view ends with its owner."""
    if isinstance(tokens, memoryview):
        return memoryview(tokens.tobytes()).cast(tokens.format)  # type: ignore[call-overload, no-any-return]
    return tokens[:] if isinstance(tokens, list | tuple | array | range) else list(tokens)
