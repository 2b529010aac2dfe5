"""What Prometheus scrapes, and that dashboard and alert rules ask only for what is there."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Client, Daemon, make_payloads, wait_until
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from cachesvc.keys import Namespace, chain_keys, tenant_id
from cachesvc.rpc import cache_pb2 as pb

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "cachesvc.json"
RULES = DEPLOY / "prometheus" / "cachesvc.rules.yml"
SIZE = 4_000


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """OpenMetrics text of a daemon that has served two tenants."""
    directory = tmp_path_factory.mktemp("metrics")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["--metrics", f"127.0.0.1:{port}"]
    daemon = Daemon(directory / "store", tmp_path_factory.mktemp("s") / "s", directory / "log", arguments).start()
    namespace = Namespace("a-model", "1", "float32")
    with Client(daemon.address) as client:
        client.attach(namespace, SIZE)
        for salt in (b"red", b"blue"):
            keys = chain_keys(namespace, range(1024), salt=salt)
            client.save(keys, make_payloads(8, SIZE))
            match = client.match(keys, tail=5, tenant=tenant_id(salt), pass_id=b"p" * 8 + salt.ljust(8))
            client.release(match, 6, pb.MissReason.LOAD_ERROR)
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )

    def scrape() -> str:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return str(reply.read().decode())

    wait_until(lambda: 'cachesvc_passes_total{class="agent",model="a-model"} 2.0' in scrape())  # once they are closed
    yield scrape()
    daemon.kill()


def samples(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_tokens_by_class_model_tier_and_reason_are_those_of_all_tenants(scraped: str) -> None:
    found = samples(scraped)
    assert found["cachesvc_lookup_tokens_total"] == {("agent", "a-model"): 2 * 1029}
    assert found["cachesvc_hit_tokens_total"] == {("agent", "a-model", "dram"): 2 * 768}
    assert found["cachesvc_miss_tokens_total"] == {
        ("agent", "a-model", "load_error"): 512,
        ("agent", "a-model", "partial_tail"): 10,
    }
    assert found["cachesvc_load_bytes_total"] == {("agent", "a-model", "dram"): 12 * SIZE}
    assert found["cachesvc_load_seconds_count"] == {(): 2}


def test_a_load_can_be_traced_to_its_pass(scraped: str) -> None:
    exemplars = [
        sample.exemplar.labels["pass"]
        for family in text_string_to_metric_families(scraped)
        for sample in family.samples
        if sample.exemplar
    ]
    assert (b"p" * 8 + b"blue".ljust(8)).hex() in exemplars


def expressions(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            if name in ("expr", "query") and isinstance(value, str):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from expressions(value)


def test_dashboard_and_rules_ask_only_for_metrics_that_are_there(scraped: str) -> None:
    there = {*samples(scraped), "cachesvc_events_total"}
    asked = {
        name
        for text in [*expressions(json.loads(DASHBOARD.read_text())), RULES.read_text()]
        for name in re.findall(r"\bcachesvc_[a-z_]+", text)
    }
    assert len(asked) > 15
    assert asked <= there


def test_the_dashboard_is_one_that_grafana_knows() -> None:
    """Read by Grafana's own types and written again, nothing of it is lost."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    ours = json.loads(DASHBOARD.read_text())
    theirs = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(ours)))

    def check(a: Any, b: Any, path: str) -> None:
        if isinstance(a, dict):
            for name, value in a.items():
                assert name in b, f"{path}.{name} is unknown to Grafana"
                check(value, b[name], f"{path}.{name}")
        elif isinstance(a, list):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                check(x, y, f"{path}[{i}]")
        else:
            assert a == b, path

    check(ours, theirs, "dashboard")


def test_the_rules_are_valid() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool here to check the rules with")
    result = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
