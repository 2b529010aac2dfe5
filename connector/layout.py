"""What the payload of one block holds, byte for byte: one small structure that every adapter shares.

It is part of the namespace, so that two engines with different layouts can never read each other's blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from cachesvc.keys import BLOCK_TOKENS

LAYOUT_VERSION: Final = 1

DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}


@dataclass(frozen=True)
class KVGroup:
    """Layers that share one shape. Payload order within a group: ``[layers, planes, tokens, kv_heads, head_dim]``.

    `planes` is 2 when K and V are stored apart (K first) and 1 for a shared compressed KV such as MLA's.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    planes: int = 2

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r} is not known; use one of {', '.join(DTYPE_BYTES)}")

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.planes * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class BlockLayout:
    """Groups in the order in which they lie in the payload, with no padding between them."""

    groups: tuple[KVGroup, ...]
    block_tokens: int = BLOCK_TOKENS

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block of one shard."""
        return self.block_tokens * sum(group.bytes_per_token for group in self.groups)

    def offset(self, index: int) -> int:
        """Byte at which group `index` starts in the payload."""
        return self.block_tokens * sum(group.bytes_per_token for group in self.groups[:index])

    def describe(self) -> dict[str, Any]:
        """The form that enters the namespace (plain JSON types)."""
        return {
            "version": LAYOUT_VERSION,
            "block_tokens": self.block_tokens,
            "groups": [
                {
                    "name": group.name,
                    "layers": group.layers,
                    "planes": group.planes,
                    "kv_heads": group.kv_heads,
                    "head_dim": group.head_dim,
                    "dtype": group.dtype,
                }
                for group in self.groups
            ],
        }
