"""What was acknowledged, and therefore what must be there after a crash. Times are the daemon's, moved by the harness.

A block must be there, byte for byte, until its TTL has passed since its last use that must be known, if

* it was acknowledged as durable, or
* it was acknowledged in any way and the daemon was then stopped cleanly, or
* it was seen after a restart: then it came from a file.

Uses count once the daemon was stopped cleanly: a crash may forget those of the last seconds. Every other block may be
there or not. None may ever have other bytes than those that its key stands for.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import Final

from cachesvc.keys import Namespace, chain_keys

BLOCK_TOKENS: Final = 128
BLOCKS: Final = 16
"""Of each prompt."""
TTLS: Final = {"agent": 3_000.0, "chat": 7_000.0}
PAYLOADS: Final = {"small": 2_500, "large": 30_000}
MARGIN_SECONDS: Final = 60.0
"""The harness does not know to the second when the daemon noted a use."""

_NEVER: Final = -1e18


@dataclass(frozen=True)
class Prompt:
    number: int

    @property
    def size(self) -> str:
        return "large" if self.number % 4 == 0 else "small"

    @property
    def payload_bytes(self) -> int:
        return PAYLOADS[self.size]

    @property
    def traffic_class(self) -> str:
        return "chat" if self.number % 3 == 0 else "agent"

    @property
    def tokens(self) -> list[int]:
        """One more than the blocks hold: the last token of a prompt is always computed."""
        return [self.number, *range(BLOCK_TOKENS * BLOCKS)]

    @property
    def keys(self) -> list[bytes]:
        return _keys(self.number, self.size)


@functools.lru_cache(maxsize=8_192)
def _keys(number: int, size: str) -> list[bytes]:
    return chain_keys(namespace_of(size), [number, *range(BLOCK_TOKENS * BLOCKS - 1)])


def namespace_of(size: str) -> Namespace:
    return Namespace("faults", size, "uint8", layout={"payload_bytes": PAYLOADS[size]})


def content(key: bytes, size: int) -> bytes:
    """The only right payload of a block."""
    return random.Random(key).randbytes(size)


@dataclass
class _Block:
    stored: float = _NEVER
    """When it was written, if it must be there."""
    used: float = _NEVER
    """Its last use that a crash does not forget."""
    seen: float = _NEVER
    """Its last use."""
    offered: float = _NEVER
    """When it was given to the daemon, for the first time since an answer said when it was written."""
    acknowledged: bool = False


@dataclass
class Model:
    """`strict`: the store is large enough that nothing is evicted. Otherwise presence is never demanded."""

    strict: bool
    prompts: dict[int, list[_Block]] = field(default_factory=dict)

    def offered(self, number: int, first: int, count: int, now: float) -> None:
        for block in self._blocks(number)[first : first + count]:
            if block.offered == _NEVER:
                block.offered = now

    def stored(self, number: int, blocks: list[int], now: float, *, durable: bool) -> None:
        """The daemon said of these blocks that they are stored."""
        for index in blocks:
            block = self._blocks(number)[index]
            block.acknowledged, block.offered, block.seen = True, now, now
            if durable:
                block.stored = block.used = now

    def stopped(self) -> None:
        """The daemon ended cleanly: it has brought everything to disk."""
        for blocks in self.prompts.values():
            for block in blocks:
                if block.acknowledged:
                    block.stored = max(block.stored, block.offered)
                    block.used = max(block.used, block.seen)

    def index_deleted(self) -> None:
        """The use times that only the index knew are gone; those in the files are those of the writing."""
        for blocks in self.prompts.values():
            for block in blocks:
                block.used = block.stored

    def required(self, number: int, now: float) -> int:
        """How many blocks of a prompt, from the first on, must be there."""
        if not self.strict:
            return 0
        ttl = TTLS[Prompt(number).traffic_class] - MARGIN_SECONDS
        count = 0
        for block in self._blocks(number):
            if max(block.stored, block.used) + ttl <= now:
                break
            count += 1
        return count

    def found(self, number: int, count: int, now: float) -> None:
        """So many blocks of a prompt were read after a restart; those behind are unknown."""
        for index, block in enumerate(self._blocks(number)):
            if index < count:
                block.stored = max(block.stored, block.offered)
                block.used = max(block.used, block.offered)
                block.seen, block.acknowledged = now, True
            else:
                self._blocks(number)[index] = _Block(offered=block.offered)

    def _blocks(self, number: int) -> list[_Block]:
        return self.prompts.setdefault(number, [_Block() for _ in range(BLOCKS)])
