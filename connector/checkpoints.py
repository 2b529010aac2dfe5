"""Where the state of sliding windows is stored: at few positions, for it is many times larger than a block.

The usable hit ends at the last checkpoint within what is stored (DESIGN.md section 7). Checkpoints lie at the end of
the prompt, at the end of the answer, every so many tokens, and where this prompt leaves what an earlier one has stored:
Match says so, the pass that computes past it stores it, and the next prompt with that beginning hits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from cachesvc.connector.arena import NO_SLOT
from cachesvc.connector.base import GatherCheckpoint, RestoreCheckpoint
from cachesvc.connector.client import Client
from cachesvc.connector.errors import BadChecksum, BlockMissing
from cachesvc.connector.link import Link
from cachesvc.connector.loader import Loader, Loading
from cachesvc.connector.memory import FailedKeys, KnownKeys
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.passes import Lease, Pass
from cachesvc.connector.staging import HostStaging, Saver
from cachesvc.connector.stats import Counters


def checkpoints_due(
    prompt_tokens: int, wanted_blocks: int, start: int, end: int, *, block_tokens: int, interval_tokens: int
) -> dict[int, bool]:
    """Positions (in blocks) that are due of those in (`start`, `end`] tokens, which are computed just now, in order.

    False for one that is to be kept back, until a later one takes its place or the pass ends: the last of the answer.
    `wanted_blocks` is where Match has found none, 0 if it did not say so.
    """
    first, last = start // block_tokens + 1, end // block_tokens
    prompt_end = (prompt_tokens - 1) // block_tokens  # the hit of the same prompt again
    interval = max(1, interval_tokens // block_tokens)
    due = {block: True for block in (wanted_blocks, prompt_end) if first <= block <= last}
    due.update(dict.fromkeys(range(-(-first // interval) * interval, last + 1, interval), True))
    if last >= first and last > prompt_end:
        due.setdefault(last, False)
    return dict(sorted(due.items()))


class Checkpoints:
    """Stores and loads those of one rank. Without a size there are none."""

    def __init__(
        self, client: Client, link: Link, options: CacheOptions, counters: Counters, shard: int, payload_bytes: int
    ) -> None:
        size = max(1, payload_bytes)
        self._options = options
        self._loader = Loader(client, link, options, shard, size)
        self._known = KnownKeys(options.known_keys)
        self._failed = FailedKeys(options.failed_keys, options.failed_hit_s, time.monotonic)
        self.saver = Saver(
            client,
            link,
            self._known,
            self._failed,
            counters,
            options,
            shard,
            size,
            on_stored=lambda _: None,
            staging=HostStaging(options.copy_threads),
        )

    def good(self, key: bytes) -> bool:
        """Whether the checkpoint of this block has not failed to load lately."""
        return self._failed.good_prefix([key]) == 1

    def forget(self) -> None:
        self._known.clear()
        self._failed.clear()

    def save(
        self, p: Pass, start: int, end: int, gather: GatherCheckpoint, block_tokens: int, traffic_class: str
    ) -> int:
        """See `PrefixCache.save_checkpoints`."""
        wanted = p.stored_blocks if p.stored_blocks * block_tokens > p.hit_tokens else 0
        due = checkpoints_due(
            p.prompt_tokens,
            wanted,
            start,
            min(end, len(p.keys) * block_tokens),
            block_tokens=block_tokens,
            interval_tokens=self._options.checkpoint_interval_tokens,
        )
        taken = 0
        for block, at_once in due.items():
            key = p.keys[block - 1]
            if key in self._known:
                continue

            def fill(payloads: Sequence[memoryview], block: int = block) -> None:
                gather(block, payloads[0])

            settle = self.saver.take_back(key, fill, traffic_class=traffic_class)
            if settle is None:
                break
            taken += 1
            if at_once:
                settle(True)
                continue
            if p.kept_back is not None:
                p.kept_back(False)
            p.kept_back = settle
        return taken

    def load(self, behind: Loading, restore: RestoreCheckpoint) -> bool:
        """Restores the checkpoint at the end of a load. False when it failed, which `behind.error` then says."""
        lease, end = behind.lease, behind.end
        match = replace(lease.match, slots=[NO_SLOT], checksums=[0])
        loading = Loading(behind.p, Lease(match, lease.attachment), 0, 1)
        self._loader.bring(loading, lambda _, payloads: restore(end, payloads[0]))
        behind.error, behind.idle_s = loading.error, loading.idle_s
        if isinstance(loading.error, BadChecksum | BlockMissing):
            self._failed.add(behind.p.keys[end - 1])
            self._known.discard([behind.p.keys[end - 1]])
        return loading.loaded == 1
