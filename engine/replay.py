"""Where to begin again after a hit, when the windows of a prefix are not stored.

A hit of H tokens brings the KV of the groups that see everything. The windows just before H are missing: a token at H
looks at those of [H - W + 1, H) in every window layer. Two ways to get them:

* ``exact``: a replayed token's value in the n-th window layer is right if it is right in the layers below for the whole
  window before it. So the last layer's window is right when the replay begins (W - 1) tokens earlier per window layer:
  the same KV as without the cache, at a cost that grows with depth.
* ``bounded``: only [H - W, H) is computed, with attention confined to it. The cost depends on neither depth nor context
  length; the windows are an approximation, and so is what is computed from them.

Either way the stored KV of the replayed tokens is not written again: in the exact replay's first tokens it would be
wrong, and what came out of the cache is right.
"""

from __future__ import annotations

from typing import Literal

from cachesvc.engine.models.config import ModelConfig

Replay = Literal["exact", "bounded"]


def replay_start(config: ModelConfig, window: int, hit_tokens: int, full_from: int | None, mode: Replay) -> int:
    """First token to compute again after a hit of `hit_tokens`.

    `full_from` is from where on tokens go through the decoder half, if the model has one: it takes its input from the
    encoder half, so the exact replay must have that right from there on. Nothing of the decoder half is replayed.
    """
    if mode == "bounded":
        return max(0, hit_tokens - window)
    right_from = hit_tokens if full_from is None else min(hit_tokens, full_from)
    return max(0, right_from - config.replay_layers * (window - 1))
