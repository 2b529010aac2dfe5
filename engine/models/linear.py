"""Row-wise arithmetic in two forms: fast, or batch-invariant.

Batch-invariant means that what a row gets depends on nothing but the row: not on how many others are computed beside it
and not on where it lies. Libraries choose another order of summation for another number of rows, and treat the ragged
end of a vector loop differently; so here every product has one fixed shape and every loop a whole number of vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ROWS: Final = 128
_TILE_ROWS: Final = 32
_VECTOR: Final = 64
"""Elements: a multiple of every vector loop's step."""
_SERIAL: Final = 32_768
"""Elements up to which torch does not split an elementwise operation between threads."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, invariant: bool = False) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus bias [out] -> [rows, out] (not always contiguous).

    Decoding has one row, the rest of a prompt after a cache hit has tens. Torch's CPU backend multiplies one row on a
    single core and few rows at half of the memory bandwidth; the forms below gave 1.4 to 2.8 times as much on two.
    """
    if invariant:
        return _tiled(x, weight, bias)
    rows, width = x.shape
    if x.device.type != "cpu" or rows > _FEW_ROWS or not rows:
        return F.linear(x, weight, bias)
    parts = torch.get_num_threads()
    if rows == 1 and len(weight) % parts == 0:
        # One batch entry per core; all of them share the one row.
        pieces = weight.view(parts, -1, width)
        out = torch.bmm(pieces, x.t().expand(parts, width, 1)).view(1, -1)
    else:
        out = (weight @ x.t()).t()
    return out if bias is None else out + bias


def rowwise(function: Callable[[Tensor], Tensor], x: Tensor, *, invariant: bool = False) -> Tensor:
    """`function`, elementwise, of x [rows, width]."""
    if not invariant or x.device.type != "cpu":
        return function(x)
    width = x.shape[-1]
    if width % _VECTOR:
        x = F.pad(x, (0, -width % _VECTOR))
    flat = x.contiguous().view(-1)
    out = torch.cat([function(piece) for piece in torch.split(flat, _SERIAL)])
    return out.view(x.shape)[..., :width]


def _tiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = len(x)
    x = F.pad(x, (0, 0, 0, -rows % _TILE_ROWS)).contiguous()
    tiles = [F.linear(tile, weight) for tile in torch.split(x, _TILE_ROWS)]
    out = torch.cat(tiles)[:rows] if tiles else x.new_empty((0, len(weight)))
    return out if bias is None else out + bias


def per_head(x: Tensor, weight: Tensor, *, invariant: bool = False) -> Tensor:
    """x [rows, heads, in] times weight [heads, out, in], head by head -> [rows, heads, out]."""
    if not invariant:
        return torch.einsum("thi,hoi->tho", x, weight)
    return torch.stack([_tiled(x[:, head], weight[head], None) for head in range(len(weight))], dim=1)
