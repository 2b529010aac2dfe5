"""Many clients at once, some of them killed: a short run of the benchmark that checks every byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_clients_that_are_killed_hurt_nobody() -> None:
    script = Path(__file__).parents[2] / "bench" / "stress.py"
    command = [sys.executable, str(script), "--seconds", "6", "--clients", "4", "--arena-bytes", str(96 << 20)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert result.stdout, result.stderr
    values = {item["name"]: item["value"] for item in json.loads(result.stdout)["results"]}
    assert (values["wrong blocks"], values["leaked slots"]) == (0, 0)
    assert values["clients killed"] >= 2 and values["blocks loaded and checked"] > 100 < values["blocks saved"]
