"""vLLM's KV events: which blocks the daemon has now, for routers that send a prompt to where its prefix lies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored, KVCacheEvent

MAX_WAITING: Final = 8192
"""Blocks on their way to the daemon; past it the oldest are forgotten, and no event says that they are stored."""


class Events:
    """Turns keys that workers have stored into events, once all shards of a block are there."""

    def __init__(self, block_tokens: int, shards: int) -> None:
        self._block_tokens = block_tokens
        self._shards = shards
        self._waiting: OrderedDict[bytes, tuple[BlockStored, int]] = OrderedDict()
        self._ready: list[KVCacheEvent] = []

    def expect(self, keys: Sequence[bytes], block: int, tokens: Sequence[int], lora: Any) -> None:
        """A worker was told to save block `block` of a prompt with these keys."""
        event = BlockStored(
            block_hashes=[keys[block]],
            parent_block_hash=keys[block - 1] if block else None,
            token_ids=list(tokens[block * self._block_tokens : (block + 1) * self._block_tokens]),
            block_size=self._block_tokens,
            lora_id=lora.lora_int_id if lora is not None else None,
            lora_name=lora.lora_name if lora is not None else None,
            medium=MEDIUM_STORAGE,
        )
        self._waiting[keys[block]] = event, self._shards
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popitem(last=False)

    def stored(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            event, missing = self._waiting.pop(key, (None, 0))
            if event is None:
                continue
            if missing > 1:
                self._waiting[key] = event, missing - 1
            else:
                self._ready.append(event)

    def take(self) -> list[KVCacheEvent]:
        ready, self._ready = self._ready, []
        return ready
