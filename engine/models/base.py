"""What a model is to the engine: a configuration, a dtype, and one forward pass over a flat batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import Tensor

from cachesvc.engine.models.config import ModelConfig

ConfigT = TypeVar("ConfigT", bound=ModelConfig, covariant=True)


@dataclass(frozen=True)
class SequenceSpan:
    """The new tokens of one sequence in a flat batch: rows `start` to `start + length`, at the end of its context."""

    start: int
    length: int
    context: slice | Tensor
    """Slots of all its tokens so far, the new ones included, in order: int64 [context], or a slice if consecutive."""
    seen_from: int = 0
    """First position whose window KV exists. More than 0 when a prefix came out of a cache that keeps no windows."""
    frozen: bool = False
    """The stored KV of the rows came out of a cache and is not written again (replay)."""
    confined: bool = False
    """The rows see nothing before `seen_from`, also in layers that otherwise see all (bounded replay)."""
    full_from: int = 0
    """First position that goes through all layers of a model whose prefill can stop half-way."""

    @property
    def context_length(self) -> int:
        context = self.context
        return context.stop - context.start if isinstance(context, slice) else len(context)

    @property
    def first_position(self) -> int:
        """Position of the first row."""
        return self.context_length - self.length

    def records(self, tokens_per_record: int) -> slice | Tensor:
        """Slots of the complete records in a group in which one stands for several tokens."""
        n, context = tokens_per_record, self.context
        if n == 1:
            return context
        if isinstance(context, slice):
            return slice(context.start // n, context.start // n + self.context_length // n)
        return context[n - 1 :: n] // n


@dataclass(frozen=True)
class FlatBatch:
    """Input of one forward pass over `T` new tokens; all tensors are int64."""

    tokens: Tensor
    """[T] token ids."""
    positions: Tensor
    """[T] position of each in its sequence."""
    slots: Tensor
    """[T] where in the pool the K and V of each are written."""
    spans: Sequence[SequenceSpan]
    logit_rows: Tensor
    """[n] rows of which logits are wanted: the last known token of each sequence that is to be sampled."""
    invariant: bool = False
    """Compute so that no row's result depends on what else is in the batch."""

    @property
    def stop(self) -> int:
        """The end of the longest context: all positions are below it."""
        return max((span.context_length for span in self.spans), default=0)

    @cached_property
    def _fresh(self) -> Tensor | None:
        """int64 [m] rows whose KV is written in stored groups; None: all."""
        if not any(span.frozen for span in self.spans):
            return None
        rows = [torch.arange(span.start, span.start + span.length) for span in self.spans if not span.frozen]
        return torch.cat(rows or [torch.empty(0, dtype=torch.int64)]).to(self.slots.device)

    def write(self, pool: Tensor, *planes: Tensor, stored: bool = True) -> None:
        """Writes K and V (or one shared plane), each [T, kv_heads, head_dim], into one layer of the pool."""
        rows = self._fresh if stored else None
        slots = self.slots if rows is None else self.slots[rows]
        for plane, values in zip(pool, planes, strict=True):
            plane.index_copy_(0, slots, values if rows is None else values[rows])


class Model(ABC, Generic[ConfigT]):
    """Weights and forward pass. Stateless: the KV pool belongs to the caller, so engines can share one model."""

    config: ConfigT
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def forward(self, batch: FlatBatch, kv: Sequence[Tensor]) -> Tensor:
        """Writes the batch's KV into `kv` and returns float32 logits ``[n, vocab_size]`` of `batch.logit_rows`.

        `kv` holds per layer of `config.kv_groups`, group after group,
        ``[planes, num_slots // tokens_per_record, kv_heads, head_dim]`` on the model's device.
        """
