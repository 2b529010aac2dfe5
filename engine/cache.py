"""How the engine's KV looks to the cache: the layout of a block, the namespace, and the calls that the engine makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from cachesvc.connector.layout import BlockLayout, KVGroup
from cachesvc.engine.models.config import LlamaConfig
from cachesvc.engine.models.weights import content_digest
from cachesvc.keys import Namespace

Copy = Callable[[int, Sequence[memoryview]], None]
"""Copies consecutive blocks: (index of the first block, one payload per block)."""


class BlockCache(Protocol):
    """The part of `cachesvc.connector.prefix_cache.PrefixCache` that the engine uses; its documentation rules.

    A pass is what `match` returns; the engine reads its `hit_tokens` and hands it back.
    """

    def match(
        self, tokens: Sequence[int], *, traffic_class: str | None = None, salt: bytes = b"", adapter: bytes = b""
    ) -> Any: ...

    def load(self, p: Any, scatter: Copy) -> int: ...

    def extend(self, p: Any, tokens: Sequence[int]) -> None: ...

    def save(self, p: Any, computed_tokens: int, gather: Copy) -> int: ...

    def finish(self, p: Any) -> None: ...


def block_layout(config: LlamaConfig, dtype: torch.dtype) -> BlockLayout:
    """The payload of one block of this model: one group with all layers, K and V apart."""
    group = KVGroup(
        name="full",
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        dtype=str(dtype).removeprefix("torch."),
    )
    return BlockLayout(groups=(group,))


def cache_namespace(path: Path, config: LlamaConfig, dtype: torch.dtype) -> Namespace:
    """What identifies KV that the checkpoint at `path` computes in `dtype`. Reads all weights once, to name them."""
    layout = block_layout(config, dtype)
    return Namespace(
        model=path.name,
        revision=content_digest(path),
        dtype=layout.groups[0].dtype,
        layout=layout.describe(),
    )
