"""What KV belongs to: the namespace of an engine; salt, adapter and images of a request. In doubt, nobody else's."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import vllm
from huggingface_hub import try_to_load_from_cache
from vllm.platforms import current_platform

from cachesvc.connector.vllm.geometry import Geometry
from cachesvc.connector.vllm.settings import Settings
from cachesvc.connector.weights import digest_files, nobody_elses
from cachesvc.keys import Namespace, canonical_json

logger = logging.getLogger("cachesvc.connector")

LAYOUT_VERSION: Final = 1
"""Of the payloads that `geometry` makes."""


def namespace_of(vllm_config: Any, kv_cache_config: Any, geometry: Geometry, settings: Settings) -> Namespace:
    """Everything in this engine's configuration that KV depends on.

    The version of vLLM and the device are part of it, for they decide how an attention backend lays out a page.
    """
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    configuration = json.loads(model.hf_config.to_json_string(use_diff=False))
    for incidental in ("_name_or_path", "transformers_version"):
        configuration.pop(incidental, None)
    return Namespace(
        model=_model_name(model),
        revision=settings.revision or _weights_of(vllm_config),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization or "none",
        block_tokens=geometry.block_tokens,
        layout={
            "engine": "vllm",
            "version": LAYOUT_VERSION,
            "vllm": vllm.__version__,
            "device": _device(),
            "attention": str(vllm_config.attention_config.backend),
            "kv_dtype": cache.cache_dtype,
            "kv_layout": kv_cache_config.kv_cache_layout,
            "parallel": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, geometry.replicas],
            "config": hashlib.sha256(canonical_json(configuration).encode()).hexdigest(),
            "groups": geometry.describe(),
        },
        shards=geometry.shards,
    )


def private(namespace: Namespace) -> Namespace:
    """One that no other engine has, and that this one never has again."""
    return replace(namespace, revision=nobody_elses())


def cacheable(request: Any) -> bool:
    """Whether a request's tokens say all about its KV, and stay what they are."""
    embeddings = request.prompt_embeds is not None or request.prompt_token_ids is None
    return not (embeddings or request.resumable or request.pooling_params is not None)


def salt_of(request: Any) -> bytes:
    return (request.cache_salt or "").encode()


def adapter_of(request: Any) -> bytes:
    """Digest of the LoRA adapter's files; empty without one. Raises `OSError` or `ValueError` when it has no files.

    Not its name or number: both may be given to another adapter later.
    """
    lora = request.lora_request
    if lora is None:
        return b""
    path = Path(lora.lora_path)
    if not path.exists():
        cached = try_to_load_from_cache(lora.lora_path, "adapter_config.json")
        path = Path(cached).parent if isinstance(cached, str) else path
    state = tuple((entry.name, entry.stat().st_mtime_ns, entry.stat().st_size) for entry in os.scandir(path))
    return _adapter_digest(path, state)


@functools.lru_cache(maxsize=256)
def _adapter_digest(path: Path, state: tuple[tuple[str, int, int], ...]) -> bytes:
    return digest_files(path).encode()


def extra_of(request: Any, block_tokens: int) -> dict[int, bytes]:
    """By block: the digests of images or audio whose tokens lie in it, and where in it each begins."""
    extra: dict[int, bytes] = {}
    for feature in request.mm_features:
        start, end = feature.mm_position.offset, feature.mm_position.offset + feature.mm_position.length
        for block in range(start // block_tokens, -(-end // block_tokens)):
            name = feature.identifier.encode()
            extra[block] = extra.get(block, b"") + struct.pack("<Iq", len(name), start - block * block_tokens) + name
    return extra


def _model_name(model: Any) -> str:
    """For people: the last part of a path, or a hub's id."""
    return Path(model.model).name if Path(model.model).exists() else str(model.model)


def _weights_of(vllm_config: Any) -> str:
    """Digest of the weights that were loaded; of nobody else's when it cannot be known."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if load.load_format == "dummy" or getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        logger.warning("weights or KV scales are made up by this engine: its KV is shared with nobody")
        return nobody_elses()
    try:
        return digest_files(_directory_of(model))
    except (OSError, ValueError) as error:
        logger.warning(
            "the weights of %s cannot be told from others (%s): KV is shared with nobody and lost when the engine "
            "ends; set `revision` in kv_connector_extra_config",
            model.model,
            error,
        )
        return nobody_elses()


def _directory_of(model: Any) -> Path:
    """Raises `ValueError` when the files are not on this machine."""
    path = Path(model.model)
    if path.exists():
        return path
    cached = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    if not isinstance(cached, str):
        raise ValueError("neither a path nor in the hub's cache")
    return Path(cached).parent


def _device() -> str:
    """CPU backends arrange a page by the instructions that the processor has, others by the device."""
    name = current_platform.device_type
    if name == "cpu":
        amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
        return f"cpu {torch.backends.cpu.get_cpu_capability()} amx={bool(amx)}"
    return f"{name} {current_platform.get_device_name()}"
