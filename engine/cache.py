"""How the engine's KV looks to the cache: the layout of a block, the namespace, and moving blocks in and out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cachesvc.connector.layout import BlockLayout, StorePolicy
from cachesvc.engine.kv import PagePool, PageTable
from cachesvc.engine.models.config import ModelConfig, dtype_name
from cachesvc.engine.models.weights import content_digest
from cachesvc.engine.replay import Replay
from cachesvc.kernels import BlockKernels
from cachesvc.keys import BLOCK_TOKENS, Namespace

WINDOW_GROUP = "window"


def block_layout(config: ModelConfig, dtype: torch.dtype, windows: StorePolicy | None = None) -> BlockLayout:
    """The payload of one block of this model. `windows` says what becomes of its window layers; None: the model's own.

    What only links one step to the next (`ced`'s unpaired tokens) is never stored: no block ends in the middle of it.
    """
    groups = config.kv_groups(dtype)
    if windows is not None:
        groups = tuple(replace(g, policy=windows) if g.name == WINDOW_GROUP else g for g in groups)
    return BlockLayout(groups)


def cache_namespace(
    path: Path, config: ModelConfig, dtype: torch.dtype, *, windows: StorePolicy | None = None, replay: Replay = "exact"
) -> Namespace:
    """What identifies KV that the checkpoint at `path` computes in `dtype`. Reads all weights once, to name them.

    KV behind a bounded replay is an approximation, and is not mixed with exact KV: it has a namespace of its own.
    """
    layout = block_layout(config, dtype, windows)
    described = layout.describe()
    if replay == "bounded" and needs_replay(layout):
        described["replay"] = replay
    return Namespace(
        model=path.name,
        revision=content_digest(path),
        dtype=dtype_name(dtype),
        layout=described,
        # Checkpoints are shards of their own, behind those of the blocks.
        shards=2 if layout.checkpoint_bytes else 1,
    )


def needs_replay(layout: BlockLayout) -> bool:
    """Whether a hit leaves windows out, which must then be computed again."""
    return any(group.name == WINDOW_GROUP and group.policy == "never" for group in layout.groups)


class BlockMover:
    """Moves blocks between payloads and the pages of one request, group by group. Groups that are not stored stay."""

    def __init__(self, layout: BlockLayout, pool: PagePool, kernels: BlockKernels) -> None:
        self._layout = layout
        self._pool = pool
        self._kernels = kernels

    def scatter(self, table: PageTable, first_block: int, payloads: Sequence[memoryview]) -> None:
        """From payloads of consecutive blocks, the first of index `first_block`, into the pages of `table`."""
        for index, parts in self._layout.split(payloads):
            self._kernels.scatter(parts, self._pool.layers(index), self._slots(table, index, first_block, len(parts)))

    def gather(self, table: PageTable, first_block: int, payloads: Sequence[memoryview]) -> None:
        """The reverse."""
        for index, parts in self._layout.split(payloads):
            self._kernels.gather(self._pool.layers(index), self._slots(table, index, first_block, len(parts)), parts)

    def restore(self, table: PageTable, blocks: int, payload: memoryview) -> None:
        """From a checkpoint behind so many blocks: the windows that a token there sees."""
        for layers, slots, part in self._windows(table, blocks, payload):
            self._kernels.scatter([part], layers, slots)

    def gather_checkpoint(self, table: PageTable, blocks: int, payload: memoryview) -> None:
        """The reverse. Before the first token of a sequence there is nothing: those bytes are left as they are."""
        for layers, slots, part in self._windows(table, blocks, payload):
            self._kernels.gather(layers, slots, [part])

    def _windows(
        self, table: PageTable, blocks: int, payload: memoryview
    ) -> Iterator[tuple[list[torch.Tensor], torch.Tensor, memoryview]]:
        """For each group in a checkpoint its layers, slots, and place in the payload."""
        offset, stop = 0, blocks * BLOCK_TOKENS
        for index, group in enumerate(self._layout.groups):
            if group.policy == "checkpoint" and group.window is not None:
                start = max(0, stop - group.window)
                slots = table.records(start, stop, group.tokens_per_record)
                yield self._pool.layers(index), slots, payload[offset : offset + group.bytes_of(stop - start)]
                offset += group.bytes_of(group.window)

    def _slots(self, table: PageTable, index: int, first_block: int, count: int) -> torch.Tensor:
        ratio = self._layout.groups[index].tokens_per_record
        return table.records(first_block * BLOCK_TOKENS, (first_block + count) * BLOCK_TOKENS, ratio)
