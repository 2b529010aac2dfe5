"""What several families are made of: gated MLPs and routed experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cachesvc.engine.models.linear import linear, rowwise
from cachesvc.engine.models.weights import Weights

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GatedMLP:
    """``down(activation(gate(x)) * up(x))``; gate and up are one matrix."""

    gate_up: Tensor
    down: Tensor

    @classmethod
    def take(cls, weights: Weights, prefix: str, hidden: int, inner: int) -> GatedMLP:
        gate = weights.take(f"{prefix}.gate_proj.weight", inner, hidden)
        up = weights.take(f"{prefix}.up_proj.weight", inner, hidden)
        return cls(torch.cat((gate, up)), weights.take(f"{prefix}.down_proj.weight", hidden, inner))

    def __call__(self, x: Tensor, *, activation: Activation = F.silu, invariant: bool = False) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate, up = linear(x, self.gate_up, invariant=invariant).chunk(2, -1)
        return linear(rowwise(activation, gate, invariant=invariant) * up, self.down, invariant=invariant)


def routed(x: Tensor, chosen: Tensor, shares: Tensor, experts: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """The sum over the `chosen` experts [T, k] of each row of x [T, hidden], times its `shares` [T, k].

    A row's parts are added in the order of the experts' numbers, whatever other rows chose.
    """
    out = torch.zeros_like(x)
    for number in sorted(set(chosen.flatten().tolist())):
        rows, place = torch.where(chosen == number)
        out.index_add_(0, rows, experts[number](x[rows]) * shares[rows, place, None].to(x.dtype))
    return out
