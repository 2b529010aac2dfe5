"""What KV belongs to: the namespace of an engine; which requests can be cached. In doubt, nobody else's."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import deepinfer
import torch

from cachesvc.connector.deepinfer.pages import LAYOUT_VERSION, Layout
from cachesvc.connector.deepinfer.settings import Settings
from cachesvc.connector.weights import digest_files, nobody_elses
from cachesvc.keys import Namespace

logger = logging.getLogger("cachesvc.connector")

HINTS: Final = "cachesvc"
"""Key of a request's hints in the argument `extra` of ``add_request``."""

_OF_THE_ENGINE: Final = ("max_num_seqs", "max_num_batched_tokens", "runtime_max_model_len", "engine_type")
"""What DeepInfer adds to the model's configuration and KV does not depend on."""


@dataclass(frozen=True)
class Hints:
    """What a request can say: ``extra={"cachesvc": {"traffic_class": …, "salt": …, "no_store": true}}``."""

    traffic_class: str | None = None
    salt: bytes = b""
    no_store: bool = False


def hints_of(extra: Any) -> Hints:
    """A hint of the wrong kind counts as none. Raises `ValueError` for a salt that cannot be read."""
    given = extra.get(HINTS) if isinstance(extra, Mapping) else None
    if not isinstance(given, Mapping):
        return Hints()
    named, salt = given.get("traffic_class"), given.get("salt", "")
    if not isinstance(salt, str | bytes):
        raise ValueError(f"salt is {type(salt).__name__}; it must be text or bytes")
    return Hints(
        traffic_class=named if isinstance(named, str) else None,
        salt=salt.encode() if isinstance(salt, str) else salt,
        no_store=bool(given.get("no_store")),
    )


def namespace_of(model_config: Any, layout: Layout, payload_bytes: int, settings: Settings) -> Namespace:
    """Everything in this engine's configuration that KV depends on. DeepInfer's ranks hold the same KV: one shard."""
    model = dict(model_config.model_cfg)
    if isinstance(model.get("gpt"), Mapping):
        model["gpt"] = {key: value for key, value in model["gpt"].items() if key not in _OF_THE_ENGINE}
    text = json.dumps(model, sort_keys=True, default=str)
    return Namespace(
        model=Path(model_config.model).name or str(model_config.model),
        revision=settings.revision or _weights_of(model_config),
        dtype=str(model_config.dtype).removeprefix("torch."),
        layout={
            "engine": "deepinfer",
            "version": LAYOUT_VERSION,
            "deepinfer": deepinfer.__version__,
            "device": _device(),
            "config": hashlib.sha256(text.encode()).hexdigest(),
            "layers": [[layer, length] for layer, _, length in layout],
            "payload_bytes": payload_bytes,
        },
    )


def _weights_of(model_config: Any) -> str:
    if model_config.load_format == "dummy":
        logger.warning("weights are made up by this engine: its KV is shared with nobody")
        return nobody_elses()
    try:
        return digest_files(Path(model_config.model))
    except (OSError, ValueError) as error:
        logger.warning(
            "the weights of %s cannot be told from others (%s): KV is shared with nobody and lost when the engine "
            "ends; set `revision`",
            model_config.model,
            error,
        )
        return nobody_elses()


def _device() -> str:
    """The formats of the two platforms' kernels are not known to be the same."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
