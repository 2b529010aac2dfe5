"""What the adapter knows of one request."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from cachesvc.connector.passes import Pass
from cachesvc.keys import PrefixHasher


class Phase(Enum):
    """Of a request that DeepInfer has not computed yet, in this order; it may go from each to `READY`."""

    LOOKING = auto()  # unschedulable, the daemon is asked
    WANTS_ROOM = auto()  # unschedulable, a hit waits for blocks
    LOADING = auto()  # unschedulable, a thread fills its blocks
    READY = auto()  # DeepInfer's to schedule
    RUNNING = auto()  # its prompt is computed


@dataclass(eq=False)
class Ledger:
    """One pass of a request, as the saving thread has it. A preempted request gets another."""

    p: Pass
    hasher: PrefixHasher | None = None
    """Of a pass that takes keys."""
    unsaved: dict[int, int] = field(default_factory=dict)
    """Pinned blocks by index, not yet taken by the save queue."""


@dataclass(eq=False)
class Tracked:
    """`seq` is DeepInfer's. Fields belong to the engine's thread unless they say otherwise."""

    seq: Any
    store: bool
    ledger: Ledger | None = None
    traffic_class: str | None = None
    salt: bytes = b""
    phase: Phase = Phase.READY
    waits_for_engine: bool = False
    """Unschedulable for a reason of DeepInfer's own: its images are not there yet."""
    holds_blocks: bool = False
    """We have allocated them, and the scheduler does not know of it until it schedules the request."""
    computed_once: bool = False
    """Part of its prompt has been computed."""
    given_tokens: int = 0
    """Tokens that the pass has."""
    seen_blocks: int = 0
    """Below: loaded, or handed over to be saved."""

    # Of the loading thread, until `loaded`.
    loaded: threading.Event = field(default_factory=threading.Event)
    loaded_tokens: int = 0
    cancelled: bool = False

    @property
    def p(self) -> Pass:
        assert self.ledger is not None, "a request without a pass"
        return self.ledger.p

    @property
    def length(self) -> int:
        return int(self.seq.get_len())


def has_ended(seq: Any) -> bool:
    """Whatever the reason: DeepInfer computes no more of it."""
    return str(seq.status.name).startswith("FINISHED")
