"""Prometheus metrics, computed from the accounting when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cachesvc.config import split_host_port
from cachesvc.errors import AddressInUse
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.service import Service


class ServiceCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        report = self._service.report(pb.ReportRequest())
        passes = CounterMetricFamily("cachesvc_passes", "Prompts looked up", labels=["class", "model"])
        lookups = CounterMetricFamily("cachesvc_lookup_tokens", "Input tokens", labels=["class", "model"])
        hits = CounterMetricFamily("cachesvc_hit_tokens", "Tokens served", labels=["class", "model", "tier"])
        misses = CounterMetricFamily("cachesvc_miss_tokens", "Tokens not served", labels=["class", "model", "reason"])
        loaded = CounterMetricFamily("cachesvc_load_bytes", "Payload bytes sent", labels=["class", "model"])
        stored = CounterMetricFamily("cachesvc_stored_bytes", "Payload bytes committed", labels=["class", "model"])
        for row in report.lookups:
            labels = [row.traffic_class, row.model]
            passes.add_metric(labels, row.passes)
            lookups.add_metric(labels, row.input_tokens)
            loaded.add_metric(labels, row.loaded_bytes)
            stored.add_metric(labels, row.stored_bytes)
            for tier, tokens in sorted(row.hit_tokens.items()):
                hits.add_metric([*labels, tier], tokens)
            for reason, tokens in sorted(row.miss_tokens.items()):
                misses.add_metric([*labels, reason], tokens)
        yield from (passes, lookups, hits, misses, loaded, stored)
        events = CounterMetricFamily("cachesvc_events", "Things that happened in the store", labels=["event"])
        for name, count in sorted(report.events.items()):
            events.add_metric([name], count)
        yield events
        for name, text, value in (
            ("cachesvc_store_bytes", "Bytes of the store's files", report.store_bytes),
            ("cachesvc_store_budget_bytes", "Byte budget of the store", report.store_budget_bytes),
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
