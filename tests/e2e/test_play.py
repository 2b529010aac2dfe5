"""Made traffic against a real daemon hits what a replay of the same traffic hits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Daemon, run_cli

pytestmark = pytest.mark.long

TRAFFIC = ("--agents", "3", "--chats", "30", "--session-gap", "20s", "--seed", "2", "--requests", "90")


def played(*arguments: str) -> dict[str, Any]:
    ended = run_cli("workload", *TRAFFIC, *arguments, "--json")
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def replayed(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    assert run_cli("workload", *TRAFFIC, "--out", str(tmp_path / "trace.gz")).returncode == 0
    row: dict[str, Any] = json.loads(run_cli("replay", str(tmp_path / "trace.gz"), *arguments, "--json").stdout)
    return dict(row["results"][-1])


def test_a_daemon_in_the_time_of_the_traffic(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    offset = tmp_path / "offset"
    offset.write_text("0")
    daemon = make_daemon("--clock-offset-file", str(offset), "--class", "agent=20s", "--class", "chat=100s").start()
    found = played("--play", "--address", daemon.address, "--clock-offset-file", str(offset))
    expected = replayed(tmp_path, "--ttl", "agent=20s,chat=100s")
    assert expected["miss_tokens_by_reason"]["expired"] > 0
    assert (
        (found["requests"], found["input"]) == (expected["requests"], expected["input_tokens"]) == (90, found["input"])
    )
    assert found["hits"] == expected["hit_tokens"] and found["refused_blocks"] == 0


def test_a_rate_is_kept_on_the_virtual_clock(daemon: Daemon, tmp_path: Path) -> None:
    found = played("--play", "--address", daemon.address, "--rate", "60")
    assert found["seconds"] >= 89 / 60
    assert found["hits"] == replayed(tmp_path)["hit_tokens"]
