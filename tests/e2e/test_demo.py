"""The demonstration as a user runs it: a real model, a real daemon process, real signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from cachesvc.connector.options import CacheOptions
from cachesvc.engine.__main__ import main
from cachesvc.engine.convert import ensure_model
from cachesvc.engine.demo_report import DemoResult, KillResult, TurnResult

pytestmark = pytest.mark.timeout(600)


def demo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cachesvc.engine", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "100"},
        check=False,
    )


def running_with(text: str) -> list[str]:
    """Command lines of the processes that mention `text`."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_bytes().decode(errors="replace"))
        except OSError:
            continue  # It ended meanwhile.
    return [line for line in lines if text in line]


def blocks(tokens: int) -> int:
    """The longest hit that leaves a token to compute."""
    return (tokens - 1) // 128 * 128


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Two turns with pages that do not divide a block; the daemon is killed in the second."""
    ensure_model()
    place = tmp_path_factory.mktemp("demo")
    arguments = ("--turns", "2", "--max-new-tokens", "8", "--page-size", "48", "--kill-at-turn", "2")
    result = demo("--json", *arguments, "--store", str(place / "store"), cwd=place)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "killed" in result.stderr  # Progress for people goes here, and nothing but JSON to stdout.
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded, place


def test_every_round_gives_the_same_words(played: tuple[dict[str, Any], Path]) -> None:
    result, _ = played
    assert [turn["identical"] for turn in result["turns"]] == [True] * 2
    assert result["totals"]["identical"] is True
    assert all(0 < turn["output_tokens"] <= 8 for turn in result["turns"])


def test_all_that_can_hit_hits(played: tuple[dict[str, Any], Path]) -> None:
    turns, totals = played[0]["turns"], played[0]["totals"]
    lengths = [turn["input_tokens"] for turn in turns]
    assert lengths == sorted(set(lengths))
    assert [turn["hit_tokens"] for turn in turns] == [blocks(length) for length in lengths]
    assert [turn["hit_tokens_restart"] for turn in turns] == [blocks(length) for length in lengths]
    # Cold: what the turn before has left, its answer but the last token included.
    known = [before["input_tokens"] + before["output_tokens"] - 1 for before in turns[:-1]]
    assert [turn["hit_tokens_cold"] for turn in turns] == [0, *(length // 128 * 128 for length in known)]
    assert totals["hit_rate"] == round(sum(map(blocks, lengths)) / sum(lengths), 4)
    assert totals["restart_hit_rate"] == totals["hit_rate"]


def test_a_daemon_killed_while_loading_changes_no_word(played: tuple[dict[str, Any], Path]) -> None:
    killed = played[0]["killed"]
    assert killed["identical"] is True
    assert killed["turn"] == 2
    assert killed["hit_tokens"] < played[0]["turns"][1]["hit_tokens"]  # the rest had to be computed
    options = CacheOptions()
    assert killed["deadline_s"] == options.match_deadline_s + options.load_deadline_s


def test_the_store_is_kept_and_nothing_runs_on(played: tuple[dict[str, Any], Path]) -> None:
    store = played[1] / "store"
    assert any(store.rglob("*.seg"))
    assert running_with(str(store)) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_told_to_stop_takes_its_daemon_along(number: signal.Signals) -> None:
    ensure_model()
    tmp_path = Path(tempfile.mkdtemp(prefix="t"))  # short, for a socket is made in it
    (tmp_path / "t").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "cachesvc.engine", "demo"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "t")},
    )
    try:
        deadline = time.monotonic() + 120
        while not any((tmp_path / "t").glob("*/daemon.sock")):  # Then it computes the first turn, for seconds.
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert "Traceback" not in said
    assert running_with(str(tmp_path)) == []
    assert list((tmp_path / "t").iterdir()) == []
    shutil.rmtree(tmp_path)


def test_a_temporary_directory_too_long_for_a_socket_is_one_line(tmp_path: Path) -> None:
    ensure_model()
    long = tmp_path / ("x" * 100)
    long.mkdir()
    result = subprocess.run(
        [sys.executable, "-m", "cachesvc.engine", "demo"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TMPDIR": str(long)},
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert "TMPDIR" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--turns", "0"), "--turns is 0; the conversation has 1 to 14"),
        (("--turns", "99"), "--turns is 99; the conversation has 1 to 14"),
        (("--turns", "3", "--kill-at-turn", "4"), "--kill-at-turn is 4; this run has the turns 1 to 3"),
        (("--page-size", "0"), "--page-size and --max-new-tokens must be at least 1"),
        (("--max-new-tokens", "5000"), "exceeds the model's context"),
        (("--store", "."), "is not empty; the cold round must start with an empty store"),
        (("--store", "file"), "is not a directory"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    code = main(["demo", *arguments])
    output = capsys.readouterr()
    assert (code, output.out) == (2, "")
    assert message in output.err.splitlines()[-1]


def test_a_daemon_that_cannot_start_is_reported_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ensure_model()
    monkeypatch.setenv("CACHESVC_CONFIG", str(tmp_path / "missing.toml"))
    code = main(["demo", "--turns", "1"])
    output = capsys.readouterr()
    assert (code, output.out) == (2, "")
    assert "the daemon did not start" in output.err
    assert "missing.toml" in output.err
    assert "turn  1" not in output.err


def test_a_model_directory_that_is_taken_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CACHESVC_MODEL_DIR", str(tmp_path))
    code = main(["demo", "--turns", "1"])
    output = capsys.readouterr()
    assert (code, output.out) == (2, "")
    assert "neither a complete checkpoint" in output.err


def turn(tokens: int, hit: int, ttft: float, *answer: int) -> TurnResult:
    return TurnResult(tokens, hit, ttft, ttft + 1, answer)


def result_with(warm_answer: int, *, killed: KillResult | None = None) -> DemoResult:
    off, cold = [turn(200, 0, 4.0, 1), turn(300, 0, 6.0, 2)], [turn(200, 0, 4.5, 1), turn(300, 128, 3.0, 2)]
    warm = [turn(200, 128, 1.0, 1), turn(300, 256, 0.5, warm_answer)]
    return DemoResult("model", "talk", {}, off, cold, warm, [turn(200, 128, 1.0, 1), turn(300, 128, 2.0, 2)], killed)


def test_totals_are_by_tokens() -> None:
    totals = result_with(2).to_json()["totals"]
    assert totals["hit_rate"] == 384 / 500
    assert totals["hit_rate_cold"] == 128 / 500
    assert totals["restart_hit_rate"] == 256 / 500
    assert totals["ttft_ratio_last_turn"] == 12.0
    assert totals["identical"] is True


def test_one_different_token_is_seen() -> None:
    result = result_with(3).to_json()
    assert [turn["identical"] for turn in result["turns"]] == [True, False]
    assert result["totals"]["identical"] is False


@pytest.mark.parametrize(("ttft", "within"), [(5.0, True), (11.9, True), (12.1, False)])
def test_the_killed_turn_is_measured_against_the_same_turn_without_a_cache(ttft: float, within: bool) -> None:
    killed = KillResult(2, [turn(200, 128, 1.0, 1), turn(300, 128, ttft, 2)], deadline_s=6.0)
    report = result_with(2, killed=killed).to_json()["killed"]
    assert report["within_deadline"] is within
    assert report["extra_over_off_s"] == round(ttft - 6.0, 4)
    assert report["identical"] is True


def test_a_different_word_in_the_killed_round_counts() -> None:
    killed = KillResult(2, [turn(200, 128, 1.0, 1), turn(300, 128, 1.0, 9)], deadline_s=6.0)
    result = result_with(2, killed=killed).to_json()
    assert result["killed"]["identical"] is False
    assert result["totals"]["identical"] is False
