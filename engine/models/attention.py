"""Attention of a flat batch over paged KV, sequence by sequence: full, windowed, with sinks, over keys of many kinds.

Two forms of the same sum. The fast one is torch's; the batch-invariant one goes through the keys in blocks that lie at
fixed positions, so that a query adds up the same numbers in the same order however its prompt was cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from cachesvc.engine.models.base import FlatBatch, SequenceSpan
from cachesvc.engine.models.linear import rowwise

_BLOCK: Final = 128
_QUERY_TILE: Final = 16


class Keys(NamedTuple):
    """Keys of one kind that a sequence's new tokens may attend to. Key i stands for `step` tokens, the last of them
    at ``ends()[i]``."""

    k: Tensor
    """[n, kv_heads, head_dim]"""
    v: Tensor
    """[n, kv_heads, value_dim]"""
    start: int = 0
    """Position of the first token that key 0 stands for."""
    step: int = 1
    first: int = 0
    """Keys that end before this position are hidden."""
    window: int | None = None
    """Keys that end so many tokens before the query, or more, are hidden."""

    def ends(self) -> Tensor:
        return torch.arange(1, len(self.k) + 1, device=self.k.device) * self.step + (self.start - 1)


class Attention:
    """For one forward pass. Masks are made once and shared by the layers."""

    def __init__(self, batch: FlatBatch) -> None:
        self._batch = batch
        self._masks: dict[tuple[object, ...], Tensor] = {}

    def __call__(
        self,
        q: Tensor,
        pool: Tensor,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
        value_dim: int | None = None,
    ) -> Tensor:
        """q [T, heads, head_dim] over one layer of the pool -> [T, heads * value_dim].

        `scale` defaults to ``head_dim ** -0.5``. `sinks` [heads] are logits of a key with no value. With one plane in
        the pool the values are the first `value_dim` dimensions of the keys.
        """
        out = []
        for index, span in enumerate(self._batch.spans):
            keys = self.paged(pool, span, window=window, value_dim=value_dim)
            rows = q[span.start : span.start + span.length]
            out.append(self.attend(rows, index, [keys], scale=scale, sinks=sinks))
        return torch.cat(out)

    def paged(
        self, pool: Tensor, span: SequenceSpan, *, window: int | None = None, value_dim: int | None = None
    ) -> Keys:
        """The keys in one layer of the pool that any of the span's rows can see."""
        first = span.seen_from if window is not None or span.confined else 0
        low = first if window is None else max(first, span.first_position - window + 1)
        if self._batch.invariant:
            low -= low % _BLOCK
        context = span.context
        if isinstance(context, slice):
            picked = pool[:, context.start + low : context.stop]
        else:
            picked = pool.index_select(1, context[low:])
        k = picked[0]
        return Keys(k, picked[1] if len(pool) == 2 else k[..., :value_dim], start=low, first=first, window=window)

    def attend(
        self,
        q: Tensor,
        index: int,
        keys: Sequence[Keys],
        *,
        scale: float | None = None,
        sinks: Tensor | None = None,
        first_position: int | None = None,
    ) -> Tensor:
        """One softmax over all `keys`, for q [rows, heads, head_dim] of span `index` -> [rows, heads * value_dim].

        The first row lies at `first_position`, by default that of the span.
        """
        first = self._batch.spans[index].first_position if first_position is None else first_position
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if self._batch.invariant:
            return _blockwise(q, first, keys, scale, sinks)
        if q.device.type != "cpu" and sinks is None and _is_causal(first, len(q), keys):
            return attend_fused(q, keys[0].k, keys[0].v, scale)
        mask = self._mask(index, first, q, keys)
        return _dense(q, keys, mask, scale, sinks)

    def _mask(self, index: int, first: int, q: Tensor, keys: Sequence[Keys]) -> Tensor | None:
        """Additive [group * rows, keys]. A single new token sees every key that was picked for it, and needs none."""
        rows = len(q)
        if rows == 1 and all(k.window is None or not len(k.k) or k.start > first - k.window for k in keys):
            return None
        name = (index, first, rows, *((len(k.k), *k[2:]) for k in keys))
        if name not in self._masks:
            positions = torch.arange(first, first + rows, device=q.device)
            visible = torch.cat([_visible(k, k.ends(), positions) for k in keys], dim=1)
            mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, float("-inf"))
            self._masks[name] = mask.repeat(q.shape[1] // keys[0].k.shape[1], 1)
        return self._masks[name]


def _visible(keys: Keys, ends: Tensor, positions: Tensor) -> Tensor:
    """bool [rows, keys]."""
    seen = (ends <= positions[:, None]) & (ends >= keys.first)
    return seen if keys.window is None else seen & (ends > positions[:, None] - keys.window)


def _is_causal(first: int, rows: int, keys: Sequence[Keys]) -> bool:
    """Whether each of several rows sees all keys up to its own, which are one a token and end with the last row."""
    if rows == 1 or len(keys) != 1:
        return False
    one = keys[0]
    return one.window is None and one.step == 1 and one.first <= one.start and one.start + len(one.k) == first + rows


def attend_fused(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """q [rows, heads, head_dim], the last rows of a causal square over k and v [n, kv_heads, ...] -> [rows, heads *
    value_dim], with kernels that need no mask in memory, as devices have them."""
    rows, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    mask: Any = causal_lower_right(len(q), k.shape[2])
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(len(q), -1)


def _dense(q: Tensor, keys: Sequence[Keys], mask: Tensor | None, scale: float, sinks: Tensor | None) -> Tensor:
    """The query heads that share a KV head are laid out as further rows of that head, so K and V are never repeated."""
    k = keys[0].k if len(keys) == 1 else torch.cat([part.k for part in keys])
    v = keys[0].v if len(keys) == 1 else torch.cat([part.v for part in keys])
    length, heads, head_dim = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[2]
    rows = q.view(length, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)
    if sinks is not None:
        k, v = F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1))
        column = sinks.to(q.dtype).view(kv_heads, -1, 1).expand(-1, -1, length).reshape(1, kv_heads, -1, 1)
        known = q.new_zeros((1, 1)) if mask is None else mask
        mask = torch.cat((known.expand(1, kv_heads, column.shape[2], len(k) - 1), column), -1)
    out = F.scaled_dot_product_attention(
        rows, k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=mask, scale=scale
    )
    return out.view(kv_heads, -1, length, value_dim).permute(2, 0, 1, 3).reshape(length, heads * value_dim)


def _blockwise(q: Tensor, first: int, keys: Sequence[Keys], scale: float, sinks: Tensor | None) -> Tensor:
    """A running softmax over blocks of keys, for tiles of queries side by side; every product has one fixed shape.

    A block that a row cannot see leaves that row's sums as they are, to the bit.
    """
    length, heads, head_dim = q.shape
    kv_heads, value_dim = keys[0].k.shape[1], keys[0].v.shape[2]
    tiles, group = -(-length // _QUERY_TILE), heads // kv_heads
    rows = F.pad(q.float() * scale, (0, 0, 0, 0, 0, tiles * _QUERY_TILE - length))
    # [tiles * kv_heads, group * tile, head_dim]
    rows = rows.view(tiles, _QUERY_TILE, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(tiles * kv_heads, group * _QUERY_TILE, head_dim)
    positions = torch.arange(first, first + tiles * _QUERY_TILE, device=q.device)
    top = rows.new_full(rows.shape[:2], float("-inf"))
    total, sums = torch.zeros_like(top), rows.new_zeros((*rows.shape[:2], value_dim))
    if sinks is not None:
        top = sinks.float().view(1, kv_heads, group, 1).expand(tiles, -1, -1, _QUERY_TILE).reshape(top.shape)
        total = torch.ones_like(top)
    for part in keys:
        for block_ends, k, v in _blocks(part, first + length - 1):
            hidden = ~_visible(part, block_ends, positions).view(tiles, 1, 1, _QUERY_TILE, _BLOCK)
            scores = torch.bmm(rows, k.expand(tiles, -1, -1, -1).reshape(-1, head_dim, _BLOCK))
            scores.view(tiles, kv_heads, group, _QUERY_TILE, _BLOCK).masked_fill_(hidden, float("-inf"))
            new_top = torch.maximum(top, scores.amax(-1))
            base = torch.where(new_top.isinf(), 0.0, new_top)
            weights = rowwise(torch.exp, scores - base[..., None], invariant=True)
            keep = rowwise(torch.exp, top - base, invariant=True)
            total = total * keep + weights.sum(-1)
            parts = torch.bmm(weights, v.expand(tiles, -1, -1, -1).reshape(-1, _BLOCK, value_dim))
            sums = sums * keep[..., None] + parts
            top = new_top
    out = (sums / total[..., None]).view(tiles, kv_heads, group, _QUERY_TILE, value_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(tiles * _QUERY_TILE, heads * value_dim)[:length].to(q.dtype)


def _blocks(keys: Keys, last: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(ends [128], k [kv_heads, head_dim, 128], v [kv_heads, 128, value_dim]), float32, padded with zeros.

    Up to the one that holds what the query at position `last` sees. The keys of a sequence always fall into the same
    blocks: a `Keys` starts at a multiple of 128 of them.
    """
    ends = keys.ends()
    for start in range(0, len(keys.k), _BLOCK):
        if keys.start + (start + 1) * keys.step - 1 > last:
            return
        missing = max(0, start + _BLOCK - len(keys.k))
        k = F.pad(keys.k[start : start + _BLOCK].float(), (0, 0, 0, 0, 0, missing)).permute(1, 2, 0)
        v = F.pad(keys.v[start : start + _BLOCK].float(), (0, 0, 0, 0, 0, missing)).transpose(0, 1)
        # What stands behind the last key ends after every query.
        yield F.pad(ends[start : start + _BLOCK], (0, missing), value=torch.iinfo(torch.int64).max), k, v
