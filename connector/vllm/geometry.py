"""KV groups: what the payload of one block holds, and where its pages lie in vLLM's tensors.

A *page* is what vLLM calls a block: the KV of `block_size` tokens in one layer, in whatever order the attention backend
keeps it. Pages are moved as bytes, so a payload is ``[parts, layers, pages, bytes of a page]``: copies are as large as
vLLM's memory allows, and nothing here knows heads. The price is that engines share KV only where the backend, the block
size and the parallel layout agree; all of that is in the namespace.

All groups that vLLM's own prefix cache may serve are stored together in one payload, those with a sliding window too:
a hit is one of every group at once. Groups that it may not (``prefix_cacheable`` is false) are never stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    KVCacheSpecKind,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from cachesvc.connector.vllm.metadata import Pages
from cachesvc.kernels import kernels_for
from cachesvc.keys import BLOCK_TOKENS

NULL_PAGE: Final = 0
"""vLLM's stand-in for a page that nobody needs, such as one behind a sliding window."""

_KINDS: Final = (
    KVCacheSpecKind.FULL_ATTENTION,
    KVCacheSpecKind.MLA_ATTENTION,
    KVCacheSpecKind.SLIDING_WINDOW,
    KVCacheSpecKind.SLIDING_WINDOW_MLA,
    KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION,
)
"""Those whose state is a page of KV per so many tokens, and nothing else."""


class Unsupported(Exception):
    """This engine's KV cannot be stored; says why. The engine runs without the cache."""


@dataclass(frozen=True)
class Part:
    """Layers of one KV group whose pages are alike."""

    group: int
    kind: str
    window: int | None
    layer_names: tuple[str, ...]
    layers: int
    """How many the payload has room for: the most of any pipeline stage."""
    page_tokens: int
    page_bytes: int
    pages: int
    """Of one layer in one block."""

    @property
    def payload_bytes(self) -> int:
        return self.layers * self.pages * self.page_bytes


@dataclass(frozen=True)
class Geometry:
    parts: tuple[Part, ...]
    block_tokens: int
    align_tokens: int
    """A hit that vLLM can use has a multiple of this many tokens."""
    shards: int
    several_groups: bool
    """Of KV, stored or not: vLLM then takes a load as a whole or not at all."""
    replicas: int
    """Consecutive tensor-parallel ranks that hold the same KV: it is stored once for all of them."""

    @property
    def payload_bytes(self) -> int:
        return sum(part.payload_bytes for part in self.parts)

    def describe(self) -> list[dict[str, Any]]:
        """The form that enters the namespace (plain JSON types)."""
        return [
            {
                "kind": part.kind,
                "window": part.window,
                "layers": part.layers,
                "page_tokens": part.page_tokens,
                "page_bytes": part.page_bytes,
            }
            for part in self.parts
        ]

    def pages_of(self, block_ids: Sequence[Sequence[int]], first_block: int, end_block: int) -> Pages:
        """Page ids of blocks [first_block, end_block) by part, from vLLM's block tables by group."""
        return tuple(
            list(block_ids[part.group][first_block * part.pages : end_block * part.pages]) for part in self.parts
        )

    def complete(self, pages: Pages, blocks: int = 1) -> bool:
        """Whether all pages of `blocks` blocks are there."""
        return all(
            len(ids) == blocks * part.pages and NULL_PAGE not in ids
            for part, ids in zip(self.parts, pages, strict=True)
        )


def geometry_of(vllm_config: Any, kv_cache_config: Any) -> Geometry:
    """Raises `Unsupported`."""
    parallel = vllm_config.parallel_config
    chunked = vllm_config.scheduler_config.enable_chunked_prefill
    if current_platform.is_cpu() and vllm_config.model_config.use_mla and not chunked:
        # vLLM turns its own prefix cache off there: its attention is not exact behind a prefix that is in the cache.
        raise Unsupported("MLA on a CPU on which vLLM does not continue a prefix")
    replay = 0
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        replay = max(replay, group.kv_cache_spec.prefix_replay_tokens)
        if group.host_resident and index in kv_cache_config.transfer_group_ids:
            raise Unsupported("KV that vLLM keeps in host memory (HiSparse)")
    stored = kv_cache_config.prefix_cacheable_group_ids
    if not stored:
        raise Unsupported("this model has no KV group that can be cached by prefix")
    if len(stored) < len(kv_cache_config.transfer_group_ids) and not replay:
        raise Unsupported("KV groups that are neither cached by prefix nor rebuilt by vLLM after a hit")
    if max(parallel.decode_context_parallel_size, getattr(parallel, "prefill_context_parallel_size", 1)) > 1:
        raise Unsupported("context parallelism")
    found: list[tuple[int, Any, list[str]]] = []
    for index in stored:
        group = kv_cache_config.kv_cache_groups[index]
        by_page: dict[int, tuple[Any, list[str]]] = {}
        for name in sorted(group.layer_names, key=_natural):
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            kind = get_kv_cache_spec_kind(spec)
            if kind not in _KINDS:
                raise Unsupported(f"KV of kind {kind.value}")
            by_page.setdefault(spec.unpadded_page_size_bytes, (spec, []))[1].append(name)
        found += [(index, spec, names) for spec, names in by_page.values()]
    block_tokens = math.lcm(BLOCK_TOKENS, *(spec.block_size for _, spec, _ in found))
    every = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    replicas = kv_cache_config.kv_tp_replicas
    return Geometry(
        parts=tuple(
            Part(
                group=index,
                kind=get_kv_cache_spec_kind(spec).value,
                window=get_kv_cache_spec_sliding_window(spec),
                layer_names=tuple(names),
                layers=_most_layers(vllm_config, len(names), len(found)),
                page_tokens=spec.block_size,
                page_bytes=spec.unpadded_page_size_bytes,
                pages=block_tokens // spec.block_size,
            )
            for index, spec, names in found
        ),
        block_tokens=block_tokens,
        align_tokens=math.lcm(block_tokens, kv_cache_config.cache_hit_alignment_tokens or 1, *every),
        shards=parallel.tensor_parallel_size // replicas * parallel.pipeline_parallel_size,
        several_groups=len(kv_cache_config.kv_cache_groups) > 1,
        replicas=replicas,
    )


def _most_layers(vllm_config: Any, here: int, parts: int) -> int:
    """Of any pipeline stage: all shards of a block have payloads of one size."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1:
        return here
    if parts > 1:
        raise Unsupported("pipeline parallelism with more than one kind of KV")
    total = vllm_config.model_config.get_total_num_hidden_layers()
    spans: list[tuple[int, int]] = [get_pp_indices(total, stage, stages) for stage in range(stages)]
    return max(end - start for start, end in spans)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 10 behind layer 9."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", name)]


class PagedKV:
    """The KV tensors of one worker, as pages. Raises `Unsupported` when they are not what `geometry` says."""

    def __init__(self, geometry: Geometry, kv_caches: dict[str, torch.Tensor], num_pages: int) -> None:
        self._geometry = geometry
        self._layers: list[list[torch.Tensor]] = []
        for part in geometry.parts:
            missing = [name for name in part.layer_names if name not in kv_caches]
            if missing:
                raise Unsupported(f"vLLM has registered no KV tensor for {missing[0]}")
            layers = [_as_pages(kv_caches[name], num_pages, part, name) for name in part.layer_names]
            if len({(layer.shape, layer.dtype, layer.device) for layer in layers}) > 1:
                raise Unsupported(f"KV tensors of one group that differ: those of {', '.join(part.layer_names)}")
            self._layers.append(layers)
        self._kernels = kernels_for(self._layers[0][0].device)

    def scatter(self, payloads: Sequence[memoryview], pages: Pages, skip_tokens: int) -> None:
        """Copies payloads of consecutive blocks into their pages, without the first `skip_tokens` tokens.

        Pages that vLLM has no use for are left out.
        """
        for part, ids, layers, views in self._by_part(payloads, pages):
            first = max(skip_tokens // part.page_tokens, next((i for i, page in enumerate(ids) if page), len(ids)))
            if NULL_PAGE in ids[first:]:
                raise ValueError(f"a page of group {part.group} is missing among those to be loaded")
            start = first // part.pages
            if start < len(payloads):
                slots = torch.tensor(ids[start * part.pages :], dtype=torch.int64, device=layers[0].device)
                self._kernels.scatter(views[start:], layers, slots, skip=first - start * part.pages)

    def gather(self, payloads: Sequence[memoryview], pages: Pages) -> None:
        """Fills payloads of consecutive blocks from their pages, all of which must be there."""
        if not self._geometry.complete(pages, len(payloads)):
            raise ValueError("a page is missing among those to be saved")
        for _, ids, layers, views in self._by_part(payloads, pages):
            slots = torch.tensor(ids, dtype=torch.int64, device=layers[0].device)
            self._kernels.gather(layers, slots, views)

    def _by_part(
        self, payloads: Sequence[memoryview], pages: Pages
    ) -> list[tuple[Part, list[int], list[torch.Tensor], list[memoryview]]]:
        every, offset = [], 0
        for part, ids, layers in zip(self._geometry.parts, pages, self._layers, strict=True):
            size = len(layers) * part.pages * part.page_bytes
            every.append((part, ids, layers, [payload[offset : offset + size] for payload in payloads]))
            offset += part.payload_bytes
        return every


def _as_pages(tensor: torch.Tensor, num_pages: int, part: Part, name: str) -> torch.Tensor:
    """A layer's KV as the kernels take it: ``[planes, pages, 1, words of a page]``, over the same memory."""
    physical = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    planes = 2 if physical.shape[0] == 2 and num_pages != 2 and physical.dim() > 2 else 1
    if planes == 1:
        physical = physical.unsqueeze(0)
    per_page = physical.shape[1] // num_pages  # vLLM may divide a page for the kernels of attention
    try:
        words = physical.view(planes, physical.shape[1], -1)
        if per_page > 1:
            words = words.view(planes, num_pages, -1)
    except RuntimeError as error:
        raise Unsupported(f"pages of {name} do not lie together: {tuple(tensor.shape)}, {tensor.stride()}") from error
    size = planes * words.shape[-1] * words.element_size()
    if words.shape[1] != num_pages or size != part.page_bytes:
        raise Unsupported(
            f"the KV tensor of {name}, {tuple(tensor.shape)}, is not {num_pages} pages of {part.page_bytes} bytes"
        )
    word = torch.int64 if words.shape[-1] * words.element_size() % 8 == 0 else torch.uint8
    return words.view(word).unsqueeze(2)
