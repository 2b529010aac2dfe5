"""How the engine's KV looks to the cache: the layout of a block and the namespace."""

from __future__ import annotations

from pathlib import Path

import torch

from cachesvc.connector.layout import BlockLayout, KVGroup
from cachesvc.engine.models.config import LlamaConfig
from cachesvc.engine.models.weights import content_digest
from cachesvc.keys import Namespace


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
