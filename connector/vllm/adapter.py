"""vLLM's connector interface, each call handed to the side that it is for. No policy here.

Written for vLLM 0.32's ``KVConnectorBase_V1``.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from cachesvc.connector.vllm import stats
from cachesvc.connector.vllm.events import Events
from cachesvc.connector.vllm.geometry import Geometry, Unsupported, geometry_of
from cachesvc.connector.vllm.identity import namespace_of
from cachesvc.connector.vllm.metadata import StepMetadata, WorkerReport
from cachesvc.connector.vllm.scheduler import SchedulerSide
from cachesvc.connector.vllm.settings import Settings, parse_settings
from cachesvc.connector.vllm.worker import WorkerSide

logger = logging.getLogger("cachesvc.connector")

_SOURCES = {
    "dram": CacheHitSource.HOST,
    "disk": CacheHitSource.DISK,
    "remote": CacheHitSource.EXTERNAL_UNSPECIFIED,
    "other": CacheHitSource.EXTERNAL_UNSPECIFIED,
}


class CacheConnector(KVConnectorBase_V1, SupportsHMA):
    """Where a model's KV cannot be stored, it says so once and the engine runs as without it.

    Raises `ValueError` for options that make no sense: that is found out when the engine starts.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        settings = parse_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._report: WorkerReport | None = None
        try:
            geometry = geometry_of(vllm_config, kv_cache_config)
            if role == KVConnectorRole.SCHEDULER:
                self._begin_scheduler(vllm_config, kv_cache_config, geometry, settings)
            else:
                self._begin_worker(vllm_config, geometry, settings)
        except Unsupported as reason:
            logger.warning("this engine runs without cachesvc, which does not know how to store %s", reason)
        except Exception:  # another vLLM than this was written for
            logger.exception("this engine runs without cachesvc, which does not understand it")
        atexit.register(self.shutdown)  # a script may end without a word to vLLM; idempotent

    def _begin_scheduler(self, vllm_config: Any, kv_cache_config: Any, geometry: Geometry, settings: Settings) -> None:
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning(
                "kv_load_failure_policy is %r, with which a block that cannot be loaded would end its request; it is "
                "'recompute' from here on",
                self._kv_transfer_config.kv_load_failure_policy,
            )
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
        namespace = namespace_of(vllm_config, kv_cache_config, geometry, settings)
        logger.info(
            "cachesvc: namespace %s of %s, %d bytes per block of %d tokens, %d shards",
            namespace.digest.hex()[:16],
            namespace.model,
            geometry.payload_bytes,
            geometry.block_tokens,
            geometry.shards,
        )
        events = Events(geometry.block_tokens, geometry.shards) if _publishes(vllm_config) else None
        self._scheduler = SchedulerSide(namespace, geometry, settings, events)
        self._meter = stats.Meter(stats.SCHEDULER_COUNTERS)

    def _begin_worker(self, vllm_config: Any, geometry: Geometry, settings: Settings) -> None:
        parallel = vllm_config.parallel_config
        size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        self._worker = WorkerSide(geometry, settings, parallel.rank % size, events=_publishes(vllm_config))
        self._meter = stats.Meter(stats.WORKER_COUNTERS)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: what is not saved is computed again

    # The scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        try:
            tokens = self._scheduler.match(request, num_computed_tokens)
        except Exception:
            logger.exception("a request is not looked up")
            return 0, False
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        sources: dict[CacheHitSource, int] = {}
        if self._scheduler is not None:
            for tier, tokens in self._scheduler.sources(request).items():
                sources[_SOURCES[tier]] = sources.get(_SOURCES[tier], 0) + tokens
        return sources

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._scheduler is None:
            return StepMetadata()
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(report, WorkerReport):
            self._scheduler.heard(report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never keeps blocks: what was saved has been copied."""
        return False, None if self._scheduler is None else self._scheduler.finished(request)

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events() if self._scheduler is not None else ()

    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # The workers' side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches, self._kv_cache_config.num_blocks)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StepMetadata):
            self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # loads are asynchronous: a request is not computed before they have ended

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # all layers at once, after the step

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        ended, failed, self._report = self._worker.results()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_pages() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        report, self._report = self._report, None
        return report

    # Both

    def get_kv_connector_stats(self) -> stats.ConnectorStats | None:
        if self._scheduler is not None:
            return self._meter.take(self._scheduler.cache.stats, declined=self._scheduler.prediction.declined)
        if self._worker is not None and self._worker.cache is not None:
            return self._meter.take(self._worker.cache.stats)
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> stats.ConnectorStats:
        return stats.ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> stats.PromMetrics:
        return stats.PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()


def _publishes(vllm_config: Any) -> bool:
    """Whether vLLM publishes KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


def _log_like_vllm() -> None:
    """vLLM configures its own logger only, and what a person has to know must not be lost."""
    theirs = logging.getLogger("vllm")
    if theirs.handlers and not logger.handlers and not logging.getLogger("cachesvc").handlers:
        logger.handlers = theirs.handlers[:]
        logger.setLevel(theirs.getEffectiveLevel())
        logger.propagate = False
