"""Numbers of the connector for vLLM's log and its ``/metrics``: what was counted since they were last taken."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from cachesvc.connector.stats import CacheStats

SCHEDULER_COUNTERS: Final = {
    "lookups": "Requests whose prefix was looked up",
    "input_tokens": "Tokens of the prompts that were looked up",
    "hit_tokens": "Tokens found in the cache, those in the engine's own cache included",
    "timeouts": "Look-ups without an answer by their deadline",
    "unreachable": "Look-ups during which no daemon could be asked",
    "declined": "Hits that were not loaded, because computing was predicted to be faster",
}
"""Counted where vLLM schedules, and so once per request."""

WORKER_COUNTERS: Final = {
    "loads": "Loads of a worker",
    "loaded_tokens": "Tokens whose KV a worker has loaded",
    "loaded_bytes": "Bytes that a worker has loaded",
    "load_seconds": "Time that loads of a worker took",
    "failed_loads": "Loads that ended before the hit was complete; the rest was computed",
    "corrupt_blocks": "Blocks that failed their checksum",
    "stored_blocks": "Blocks that a worker has stored",
    "stored_bytes": "Bytes that a worker has stored",
    "present_blocks": "Blocks that were stored already by another engine",
    "refused_blocks": "Blocks for which the daemon had no room",
    "failed_blocks": "Blocks lost on the way to the daemon",
    "dropped_blocks": "Blocks not saved because the save queue was full",
    "unsaved_blocks": "Blocks not saved because there was no daemon",
    "boot_changes": "Restarts of the daemon that were noticed",
}
"""Summed over the workers."""

GAUGES: Final = {
    "attached": "1 when this engine's scheduler and all its workers have a daemon",
    "queued_bytes": "Bytes in the fullest save queue",
}

PERIOD_S: Final = 0.2
"""Numbers are handed on no more often than this."""


class ConnectorStats(KVConnectorStats):
    """`data` maps names to numbers: counts are of an interval, gauges are the last seen."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        total = dict(self.data)
        for name, value in other.data.items():
            if name in GAUGES:
                total[name] = (min if name == "attached" else max)(total.get(name, value), value)
            else:
                total[name] = total.get(name, 0) + value
        return ConnectorStats(data=total)

    def reduce(self) -> dict[str, int | float]:
        """For the log: what happened, without zeros."""
        return {name: round(value, 3) for name, value in self.data.items() if value or name == "attached"}


class Meter:
    """Turns counts since the start into counts since the last time."""

    def __init__(self, counters: Mapping[str, str]) -> None:
        self._counters = counters
        self._last: dict[str, float] = {}
        self._taken = 0.0

    def take(self, stats: CacheStats, **more: float) -> ConnectorStats | None:
        now = time.monotonic()
        if now - self._taken < PERIOD_S:
            return None
        self._taken = now
        data: dict[str, float] = {}
        for name in self._counters:
            total = more[name] if name in more else getattr(stats, name)
            new = total - self._last.get(name, 0)
            if new > 0:
                data[name] = new
            self._last[name] = total
        gauges = {"attached": float(stats.attached), "queued_bytes": float(stats.queued_bytes)}
        if not data and all(self._last.get(name) == value for name, value in gauges.items()):
            return None
        self._last.update(gauges)
        return ConnectorStats(data=data | gauges)


class PromMetrics(KVConnectorPromMetrics):
    """``cachesvc_connector_…`` beside vLLM's own, with vLLM's labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._per_engine(self._counter_cls(f"cachesvc_connector_{name}", text, labelnames=labelnames))
            for name, text in (SCHEDULER_COUNTERS | WORKER_COUNTERS).items()
        }
        self._gauges = {
            name: self._per_engine(self._gauge_cls(f"cachesvc_connector_{name}", text, labelnames=labelnames))
            for name, text in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
            elif name in self._gauges:
                self._gauges[name][engine_idx].set(value)

    def _per_engine(self, metric: Any) -> dict[int, Any]:
        return {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}
