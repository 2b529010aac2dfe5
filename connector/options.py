"""Every limit of the connector, in one place: the default, the unit, and what happens at the limit."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20

MAX_CHUNK_BYTES: Final = 2 * MIB
"""The contract's largest chunk. A daemon that announces larger ones is sent chunks of this size."""

MESSAGE_SLACK_BYTES: Final = 64 * KIB
"""What a message may hold beside its chunk. A larger reply is refused by gRPC and ends the call."""

HASH_SLICE_TOKENS: Final = 8192
"""Tokens hashed at a stretch (about 2 ms), so that a long prompt does not keep the interpreter from the engine."""


@dataclass(frozen=True)
class CacheOptions:
    """Options of a `PrefixCache`. Times in seconds, sizes in bytes. Raises `ValueError` for one that makes no sense.

    Waiting:
        match_budget_s: how long `match` waits. At the limit the pass stays pending and the engine goes on.
        match_deadline_s: how long an answer may take from `begin` on. Then the pass is settled as no hit, timed out.
        load_deadline_s: how long `load` waits for the daemon. At the limit it ends with the blocks that came so far.
        load_stall_s: a load that hits its deadline is held against the daemon only if nothing came for this long.
        save_deadline_s: for each call of a background save. At the limit its blocks are dropped.
        control_deadline_s: for Attach, Release and Abort, all made in the background.
        close_deadline_s: how long `close` waits for queued saves, and again for its threads.

    Sizes:
        save_queue_bytes: memory for blocks gathered and not yet stored. When it is full, `save` queues no more and
            counts what was left out; 0 turns saving off.
        save_batch_bytes: payload bytes under one write lease, at least one block.
        load_batch_bytes: payload bytes handed to one call of `scatter`, at least one block. Each load that runs uses
            one buffer of this size.
        load_buffers_kept: such buffers kept for the next load; more at a time are made and thrown away.
        lookup_threads, max_lookups: threads that ask for matches, and how many may wait for one. Past it: no hit.
        known_keys: keys remembered as stored, so that they are not gathered again; the least recent are forgotten.
        known_prompts, known_prompt_bytes: prompts whose hash chain is kept for the turn that extends them, and the
            bytes of their tokens (4 each); the least recently used are forgotten.
        failed_keys, failed_hit_s: blocks whose load failed, and how long no match reaches over them.

    Behaviour:
        min_hit_blocks: fewer matched blocks than this are not worth a load: no hit.
        read_lease_s, write_lease_s: asked of the daemon, cut to its limit. An engine that loads later gets a miss.
        shared_memory: map the arena of a daemon on this host, so that payloads pass no socket.
        copy_threads: that copy payloads into the arena side by side, the saving thread included.
        checkpoint_interval_tokens: distance of checkpoints of windows within a prompt, where windows are stored.
        durable: a save counts as stored only when it is on disk and synced.
        saves_refused_pause_s: how long nothing is gathered after the daemon had no room.

    Circuit breaker (see `breaker`):
        breaker_failures: failures in a row, or one timeout of a match or load, after which the daemon is left alone.
        breaker_first_s, breaker_max_s: how long, at first and at most; doubled each time it opens again soon.
        probe_max_s: longest pause between two tries to reach a daemon that does not answer.
        refused_retry_s: pause after a daemon has refused this client for good.
    """

    match_budget_s: float = 0.020
    match_deadline_s: float = 1.0
    load_deadline_s: float = 5.0
    load_stall_s: float = 1.0
    save_deadline_s: float = 10.0
    control_deadline_s: float = 2.0
    close_deadline_s: float = 5.0

    save_queue_bytes: int = 512 * MIB
    save_batch_bytes: int = 32 * MIB
    load_batch_bytes: int = 32 * MIB
    load_buffers_kept: int = 2
    lookup_threads: int = 4
    max_lookups: int = 256
    known_keys: int = 65_536
    known_prompts: int = 64
    known_prompt_bytes: int = 32 * MIB
    failed_keys: int = 4096
    failed_hit_s: float = 60.0

    min_hit_blocks: int = 1
    read_lease_s: float = 60.0
    write_lease_s: float = 60.0
    checkpoint_interval_tokens: int = 4096
    durable: bool = False
    saves_refused_pause_s: float = 1.0
    shared_memory: bool = True
    copy_threads: int = 2

    breaker_failures: int = 3
    breaker_first_s: float = 0.25
    breaker_max_s: float = 30.0
    probe_max_s: float = 2.0
    refused_retry_s: float = 60.0

    def __post_init__(self) -> None:
        may_be_zero = {
            "save_queue_bytes",
            "match_budget_s",
            "load_buffers_kept",
            "durable",
            "shared_memory",
            "saves_refused_pause_s",
        }
        for option in fields(self):
            value = getattr(self, option.name)
            zero = option.name in may_be_zero
            if value < 0 or (value == 0 and not zero):
                raise ValueError(f"{option.name} is {value}; it must be {'0 or more' if zero else 'positive'}")
