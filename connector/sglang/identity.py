"""What the pages of one host pool belong to. In doubt, nobody else's."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any, Final

from cachesvc.connector.sglang.settings import Settings
from cachesvc.connector.weights import digest_files, nobody_elses
from cachesvc.keys import KEY_BYTES, Namespace

logger = logging.getLogger("cachesvc.connector")

LAYOUT_VERSION: Final = 1

SHARDED: Final = ("mamba",)
"""Pools that differ between tensor-parallel ranks also where the KV of a model is the same on all of them."""

_GEOMETRY: Final = ("layout", "layer_num", "head_num", "head_dim", "v_head_dim", "kv_cache_dim", "size_per_token")


def revision_of(config: Any, settings: Settings) -> str:
    """Names the weights. Reads them once, unless `revision` is set."""
    if settings.revision:
        return settings.revision
    try:
        return digest_files(Path(config.model_name or ""))
    except (OSError, ValueError) as error:
        logger.warning(
            "the weights of %s cannot be told from others (%s): KV is shared with nobody and lost when the engine "
            'ends; set `revision` in "cachesvc"',
            config.model_name,
            error,
        )
        return nobody_elses()


def namespace_of(config: Any, revision: str, name: str, pool: Any, form: str) -> Namespace:
    """Of the pages of pool `name` in this rank's part of the model. `form`: how their bytes are put together."""
    replicated = config.is_mla_model and name not in SHARDED
    return Namespace(
        model=Path(config.model_name).name if config.model_name else "unnamed",
        revision=revision,
        dtype=str(getattr(pool, "dtype", "unknown")).removeprefix("torch."),
        block_tokens=page_tokens(pool),
        layout={
            "engine": "sglang",
            "version": LAYOUT_VERSION,
            "pool": name,
            "form": form,
            "geometry": {key: str(getattr(pool, key)) for key in _GEOMETRY if getattr(pool, key, None) is not None},
            "parts": [
                *(config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size),
                *(config.dcp_rank, config.dcp_size, bool(config.should_split_heads)),
            ],
            "heads": "replicated" if replicated else f"split in {config.tp_size}",
        },
        shards=1 if replicated else config.tp_size,
    )


def shard_of(config: Any, name: str) -> int:
    return 0 if config.is_mla_model and name not in SHARDED else int(config.tp_rank)


def page_tokens(pool: Any) -> int:
    """Tokens of a page, which is a block of this namespace. A pool of states counts one for each."""
    return int(getattr(pool, "page_size", 1) or 1)


def keys_of(namespace: Namespace, hashes: list[str]) -> list[bytes]:
    """SGLang names a page by a chained hash over all tokens up to its end, seeded with the salts of the request. What
    it does not know, such as the weights, comes from the namespace."""
    return [hashlib.sha256(namespace.digest + name.encode()).digest()[:KEY_BYTES] for name in hashes]
