"""What the payload of one block holds, byte for byte: one small structure that every adapter shares.

It is part of the namespace, so that two engines with different layouts can never read each other's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from cachesvc.keys import BLOCK_TOKENS

LAYOUT_VERSION: Final = 1

DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}


StorePolicy = Literal["every_block", "checkpoint", "never"]
"""Whether a group is in the payload of every block, or in none: then a window of it is stored apart at few positions
(`cachesvc.connector.checkpoints`), or never, and the engine computes it again from what is stored."""


@dataclass(frozen=True)
class KVGroup:
    """Layers that share one shape. Payload order within a group: ``[layers, planes, records, kv_heads, head_dim]``.

    `planes` is 2 when K and V are stored apart (K first) and 1 for a shared compressed KV such as MLA's. A record
    stands for `tokens_per_record` consecutive tokens. `window` is how many tokens back a layer sees, its own included;
    None: all. Raises `ValueError` for an unknown dtype or policy, or records that do not divide a block.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    planes: int = 2
    tokens_per_record: int = 1
    window: int | None = None
    policy: StorePolicy = "every_block"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r} is not known; use one of {', '.join(DTYPE_BYTES)}")
        if self.policy not in ("every_block", "checkpoint", "never"):
            raise ValueError(f"store policy {self.policy!r} is not known; use every_block, checkpoint or never")
        if self.policy != "every_block" and self.window is None:
            raise ValueError(f"group {self.name!r} has no window: all of it must be stored")
        if self.tokens_per_record < 1 or BLOCK_TOKENS % self.tokens_per_record:
            raise ValueError(f"tokens_per_record is {self.tokens_per_record}; it must divide {BLOCK_TOKENS}")

    @property
    def record_bytes(self) -> int:
        """Bytes of one record: of all layers and planes."""
        return self.layers * self.planes * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def bytes_of(self, tokens: int) -> int:
        """Bytes of `tokens` tokens, a multiple of `tokens_per_record`."""
        return tokens // self.tokens_per_record * self.record_bytes

    def describe(self) -> dict[str, Any]:
        """Plain JSON types. What is as in most models is left out, so that their namespaces stay what they were."""
        known: dict[str, Any] = {
            "name": self.name,
            "layers": self.layers,
            "planes": self.planes,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
        }
        if self.tokens_per_record != 1:
            known["tokens_per_record"] = self.tokens_per_record
        if self.window is not None:
            known |= {"window": self.window, "policy": self.policy}
        return known


@dataclass(frozen=True)
class BlockLayout:
    """Groups in the order in which they lie in the payload, with no padding between them.

    Those that are never stored take no bytes. They are listed all the same: what an engine computes again, and from
    what, is part of what makes its KV interchangeable.
    """

    groups: tuple[KVGroup, ...]
    block_tokens: int = BLOCK_TOKENS

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block of one shard."""
        return self.offset(len(self.groups))

    def size(self, index: int) -> int:
        """Bytes of group `index` in the payload."""
        group = self.groups[index]
        return group.bytes_of(self.block_tokens) if group.policy == "every_block" else 0

    def offset(self, index: int) -> int:
        """Byte at which group `index` starts in the payload."""
        return sum(self.size(i) for i in range(index))

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint of one shard: the windows of the groups that are stored there. 0: there are none."""
        return sum(group.bytes_of(group.window or 0) for group in self.groups if group.policy == "checkpoint")

    def split(self, payloads: Sequence[memoryview]) -> list[tuple[int, list[memoryview]]]:
        """For each stored group its index and its part of every payload."""
        parts = []
        for index in range(len(self.groups)):
            start, size = self.offset(index), self.size(index)
            if size:
                parts.append((index, [payload[start : start + size] for payload in payloads]))
        return parts

    def describe(self) -> dict[str, Any]:
        """The form that enters the namespace (plain JSON types)."""
        return {
            "version": LAYOUT_VERSION,
            "block_tokens": self.block_tokens,
            "groups": [group.describe() for group in self.groups],
        }
