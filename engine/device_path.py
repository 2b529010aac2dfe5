"""The cache's way into and out of KV on a device: loads that are computed behind layer by layer, saves by its memory.

A step may be computed behind a load of which it is not known yet whether it is good. If it turns out that less was
loaded, the step is void for that request: before any token is shown or any block saved it goes on from what there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, overload

import torch

from cachesvc.connector.base import BasePrefixCache
from cachesvc.connector.device import DeviceLoad, DeviceLoads, DevicePayloads, DeviceStaging, Event, Transfers
from cachesvc.connector.layout import BlockLayout
from cachesvc.connector.passes import Pass
from cachesvc.engine.kv import PagePool, PageTable
from cachesvc.engine.request import Request
from cachesvc.keys import BLOCK_TOKENS

_CLOSE_S: Final = 5.0
"""How long closing waits for loads under way."""


class DevicePath:
    """Of one engine, whose thread calls it."""

    def __init__(self, staging: DeviceStaging, pool: PagePool, layout: BlockLayout) -> None:
        """Raises `ValueError` for a model whose blocks hold more than layers of one kind that see everything."""
        groups = layout.groups
        if len(groups) != 1 or groups[0].window is not None or groups[0].tokens_per_record != 1:
            raise ValueError(
                f"KV groups {', '.join(group.name for group in groups)}: only models whose layers all see everything "
                "are loaded and saved on a device; leave out `staging`"
            )
        self._pool = pool
        self._transfers = staging.transfers(pool.as_paged())
        self._loads = DeviceLoads(self._transfers)
        self._pages_free: Event | None = None

    def begin_step(self) -> None:
        """Who has lost pages so far uses them no more once the device has come here."""
        self._pages_free = self._transfers.device.current().record()

    def start(self, cache: BasePrefixCache, p: Pass, table: PageTable) -> DeviceLoad:
        """Begins to load the hit of `p` into the pages of `table`."""
        assert self._pages_free is not None, "a load outside of a step"
        return self._loads.start(
            cache, p, partial(_tables, table), hit_blocks=p.hit_tokens // BLOCK_TOKENS, after=self._pages_free
        )

    def layers(self, requests: Sequence[Request]) -> Sequence[torch.Tensor]:
        """The pool, for a step of these requests: the device waits for each layer's loads before it is used."""
        loads = [request.load for request in requests if request.load is not None]
        return _LoadingLayers(self._pool.kv, loads, self._transfers) if loads else self._pool.kv

    def result(self, load: DeviceLoad) -> int:
        """Tokens of the prefix that are there and good. Waits for the load to end."""
        return load.result(self._transfers.device.current())

    def drop(self, request: Request) -> None:
        """Before a request loses its pages while they are being loaded. Its lease is used up: it computes all."""
        if request.load is not None:
            request.load.abandon(self._transfers.device.current())
            request.load, request.asking = None, False

    def stage(self, table: PageTable, first_block: int, payloads: DevicePayloads) -> None:
        """Copies blocks into buffers of the save queue, on the device."""
        payloads.filled(self._transfers.stage(_tables(table, first_block, len(payloads)), payloads.blocks))

    def close(self) -> None:
        self._loads.close(_CLOSE_S)


class _LoadingLayers(Sequence[torch.Tensor]):
    """`PagePool.kv`, whose layers a model takes one after the other as it comes to them."""

    def __init__(self, kv: list[torch.Tensor], loads: list[DeviceLoad], transfers: Transfers) -> None:
        self._kv = kv
        self._loads = loads
        self._transfers = transfers

    def __len__(self) -> int:
        return len(self._kv)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
        layer = range(len(self))[index]
        for load in self._loads:
            load.wait_layer(self._transfers.device.current(), layer)
        return self._kv[layer]


def _tables(table: PageTable, first_block: int, count: int) -> list[list[int]]:
    """Pages of blocks, for the one group of the pool."""
    return [table.units(first_block, count)]
