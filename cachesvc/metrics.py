"""Prometheus metrics, computed from the accounting when they are scraped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cachesvc.accounting import HIT, LOADED, MISS, Row, by_prefix
from cachesvc.config import split_host_port
from cachesvc.errors import AddressInUse
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.service import Service

_COUNTERS: Final = (
    ("cachesvc_passes", "Prompts looked up, each counted once", "passes"),
    ("cachesvc_lookup_tokens", "Input tokens", "input"),
    ("cachesvc_local_tokens", "Input tokens that the engine held itself", "local"),
    ("cachesvc_new_tokens", "Input tokens of blocks that were never there before (estimated)", "new"),
    ("cachesvc_stored_bytes", "Payload bytes committed", "stored_bytes"),
)
_PARTS: Final = (
    ("cachesvc_hit_tokens", "Input tokens served, by tier", HIT, "tier"),
    ("cachesvc_miss_tokens", "Input tokens not served, by reason", MISS, "reason"),
    ("cachesvc_load_bytes", "Payload bytes loaded, by tier", LOADED, "tier"),
)


class ServiceCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        report = self._service.report(pb.ReportRequest())
        rows: dict[tuple[str, str], Row] = {}
        # Closed passes, whose counts never fall; of all tenants: there may be too many for labels.
        for key, row in self._service.accounting.closed_rows():
            rows.setdefault((key.traffic_class, key.model), Counter()).update(row)
        for name, text, counted in _COUNTERS:
            family = CounterMetricFamily(name, text, labels=["class", "model"])
            for labels, row in rows.items():
                family.add_metric(labels, row[counted])
            yield family
        for name, text, prefix, label in _PARTS:
            family = CounterMetricFamily(name, text, labels=["class", "model", label])
            for labels, row in rows.items():
                for part, number in by_prefix(row.items(), prefix).items():
                    family.add_metric([*labels, part], number)
            yield family
        pending = sum(row["pending"] for _, row in self._service.accounting.rows())
        yield GaugeMetricFamily("cachesvc_pending_tokens", "Matched, not yet loaded or given up", value=pending)
        yield from self._service.observer.load_seconds.collect()
        events = CounterMetricFamily("cachesvc_events", "Things that happened in the store", labels=["event"])
        for name, count in sorted(report.events.items()):
            events.add_metric([name], count)
        yield events
        for name, text, value in (
            ("cachesvc_store_bytes", "Bytes of the store's files", report.store_bytes),
            ("cachesvc_store_budget_bytes", "Byte budget of the store", report.store_budget_bytes),
            ("cachesvc_store_dead_bytes", "Bytes of records that nobody can ask for any more", report.dead_bytes),
            (
                "cachesvc_write_amplification",
                "Bytes of records written, by those of new blocks",
                report.write_amplification,
            ),
            ("cachesvc_store_blocks", "Blocks stored", report.blocks),
            ("cachesvc_read_leases", "Read leases that live", report.read_leases),
            ("cachesvc_write_leases", "Write leases that live", report.write_leases),
            ("cachesvc_staged_bytes", "Bytes of payloads not yet committed", report.staged_bytes),
            ("cachesvc_arena_bytes", "Size of the arena", report.arena_bytes),
            ("cachesvc_arena_used_bytes", "Bytes of the arena in use", report.arena_used_bytes),
            ("cachesvc_arena_dirty_bytes", "Bytes in the arena that are not yet on disk", report.arena_dirty_bytes),
            ("cachesvc_healthy", "1 unless writes are refused", report.health == "ok"),
        ):
            yield GaugeMetricFamily(name, text, value=float(value))


def serve_metrics(service: Service, address: str) -> WSGIServer:
    """Answers scrapes on a loopback address from a thread of its own. Raises `AddressInUse`."""
    host, port = split_host_port(address)
    registry = CollectorRegistry()
    registry.register(ServiceCollector(service))
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise AddressInUse(f"metrics address {address}: {error.strerror}; give another --metrics or ''") from error
    return server
