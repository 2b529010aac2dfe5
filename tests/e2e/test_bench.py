"""`cachesvc bench` runs and speaks the language of all benchmarks. What it measures here means nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SIZES = {113_920, 1 << 20, 4 << 20, 16 << 20}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cachesvc", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.long
def test_the_result_has_the_shape_that_all_benchmarks_have() -> None:
    ended = run("--quick", "--json", "--repeats", "1", "--bytes", "1MiB", "--arena-bytes", "160MiB")
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["benchmark"] == "cachesvc bench" and result["skipped"] == {}
    assert set(result["host"]) == {"cpu", "cores", "memory", "kernel", "gpu"}
    measured: dict[str, set[int]] = {}
    for row in result["results"]:
        assert row["value"] > 0 and row["unit"] and len(row["spread"]) == 2
        measured.setdefault(row["name"], set()).add(row["params"].get("block_bytes") or row["params"].get("keys"))
        if row["baseline"] is not None:
            assert row["baseline"]["name"] and row["baseline"]["value"] > 0 and row["ratio"] > 0
        assert (row["pass"] is None) == (row["target"] is None)
    for name in ("get", "put", "put, checksums by the daemon", "remote get", "remote put"):
        assert measured[name] == SIZES
    for name in ("match p50", "match p99"):
        assert measured[name] == {1, 1_000, 8_000}
    assert "get, positions only" in measured


def test_a_wrong_size_and_an_absent_daemon_are_one_line() -> None:
    for arguments, code in ((("--bytes", "much"), 2), (("--address", "unix:/nowhere/daemon.sock"), 6)):
        ended = run(*arguments)
        assert ended.returncode == code and len(ended.stderr.strip().splitlines()) == 1, ended.stderr
