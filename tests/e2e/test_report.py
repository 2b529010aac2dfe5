"""What an operator sees: tables, JSON, CSV, and a page in a real browser."""

from __future__ import annotations

import csv
import io
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from conftest import Client, Daemon, cli_json, make_payloads, run_cli, wait_until

from cachesvc.keys import Namespace, chain_keys, tenant_id
from cachesvc.limits import CLOSE_TIMED_OUT_SECONDS, HOUSEKEEPING_SECONDS, KEEP_SECONDS
from cachesvc.rpc import cache_pb2 as pb

SIZE = 4_000


def some_traffic(client: Client, namespace: Namespace) -> None:
    """12 passes of 8 blocks and a tail of 10 tokens each: 6 cold, 6 warm; 2 tenants and classes, a failure each."""
    client.attach(namespace, SIZE)
    for salt, traffic_class, first in ((b"", "agent", 0), (b"red", "chat", 5)):
        for number in range(3):
            keys = chain_keys(namespace, range(first + number, first + number + 1024), salt=salt)
            fields = {"traffic_class": traffic_class, "tenant": tenant_id(salt), "tail": 10}
            client.lookup(keys, **fields)
            client.save(keys, make_payloads(8, SIZE), traffic_class=traffic_class)
            match = client.match(keys, **fields)
            client.release(match, 8 if number else 6, pb.MissReason.LOAD_ERROR)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("report")
    daemon = Daemon(directory / "store", tmp_path_factory.mktemp("s") / "s", directory / "log").start()
    with Client(daemon.address) as client:
        some_traffic(client, Namespace("a-model", "1", "float32"))
    yield daemon
    daemon.kill()


def test_the_sums_by_class_and_in_all(reported: Daemon) -> None:
    found = cli_json("report", "--address", reported.address)
    rows, total = found["rows"], found["total"]
    assert isinstance(rows, list) and isinstance(total, dict)
    assert [(row["class"], row["model"], row["passes"]) for row in rows] == [
        ("agent", "a-model", 6),
        ("chat", "a-model", 6),
    ]
    assert total["input_tokens"] == 12 * 1034
    assert total["hit_tokens_by_tier"] == {"dram": 2 * (8 + 8 + 6) * 128}
    assert total["miss_tokens_by_reason"] == {"load_error": 512, "never_seen": 6 * 1024, "partial_tail": 120}
    assert total["hit_rate"] == total["hit_tokens"] / total["input_tokens"]
    # Of 12 x 8 blocks asked 48 were new: estimated, but exactly so with so few.
    assert total["ceiling_tokens"] == 48 * 128


@pytest.mark.parametrize(
    ("by", "labels"),
    [
        (["tenant"], ["", tenant_id(b"red").hex()]),
        (["tier"], ["dram"]),
        (["reason"], ["load_error", "never_seen", "partial_tail"]),
        (["class"], ["agent", "chat"]),
    ],
)
def test_rows_by_something_else(reported: Daemon, by: list[str], labels: list[str]) -> None:
    found = cli_json("report", "--address", reported.address, *(f"--by={name}" for name in by))
    assert isinstance(found["rows"], list)
    assert [row[by[0]] for row in found["rows"]] == labels


def test_hours_sum_to_the_total(reported: Daemon) -> None:
    found = cli_json("report", "--address", reported.address, "--by", "hour", "--by", "class", "--last", "48h")
    assert isinstance(found["rows"], list) and isinstance(found["total"], dict)
    assert sum(row["input_tokens"] for row in found["rows"]) == found["total"]["input_tokens"] == 12 * 1034


def test_csv_has_a_column_for_every_tier_and_reason(reported: Daemon) -> None:
    result = run_cli("report", "--address", reported.address, "--csv")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["class"] for row in rows] == ["agent", "chat"]
    assert {"hit_tokens.dram", "miss_tokens.load_error", "hit_rate", "ceiling_rate"} <= set(rows[0])
    assert int(rows[0]["hit_tokens.dram"]) == 22 * 128


def test_the_table_names_weight_and_denominator(reported: Daemon) -> None:
    text = run_cli("report", "--address", reported.address).stdout
    for words in ("hit tokens / input tokens", "never_seen 3,072", "ceiling", "dram 2,816", "all"):
        assert words in text


def test_two_daemons_are_merged(reported: Daemon, make_daemon: Callable[..., Daemon], namespace: Namespace) -> None:
    other = make_daemon().start()
    with Client(other.address) as client:
        some_traffic(client, namespace)
    found = cli_json("report", "--address", reported.address, "--address", other.address)
    assert isinstance(found["total"], dict)
    assert (found["daemons"], found["total"]["passes"], len(found["rows"])) == (2, 24, 4)  # type: ignore[arg-type]


def test_what_was_counted_before_a_restart_is_still_reported(
    make_daemon: Callable[..., Daemon], namespace: Namespace
) -> None:
    daemon = make_daemon().start()
    with Client(daemon.address) as client:
        some_traffic(client, namespace)
    daemon.restart()
    found = cli_json("report", "--address", daemon.address)
    assert isinstance(found["total"], dict) and found["total"]["passes"] == 12


def test_an_empty_store_is_one_clear_line(daemon: Daemon) -> None:
    result = run_cli("report", "--address", daemon.address)
    assert (result.returncode, result.stdout) == (0, "No lookups in this time.\n")
    assert run_cli("report", "--address", daemon.address, "--html", "/dev/null").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--last", "yesterday"], "'yesterday' is not a duration"),
        (["--since", "noon"], "--since 'noon' is no time"),
        (["--since", "2027-01-02", "--until", "2027-01-01"], "ends at 2027-01-01 before it begins"),
        (["--since", "1", "--last", "1h"], "--since or --last, not both"),
        (["--by", "tier", "--by", "class"], "go with no other"),
        (["--json", "--csv"], "only one of"),
        (["--html", "/nonexistent/page.html"], "cannot write /nonexistent/page.html"),
    ],
)
def test_mistakes_are_one_line(reported: Daemon, arguments: list[str], words: str) -> None:
    result = run_cli("report", "--address", reported.address, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr and result.stderr.count("\n") == 1


def test_no_daemon_is_one_line() -> None:
    for command in ("report", "record"):
        result = run_cli(command, "--address", "unix:/nonexistent/s")
        assert result.returncode == 6
        assert "no answer from a daemon at unix:/nonexistent/s" in result.stderr and result.stderr.count("\n") == 1


def test_recording_from_the_command_line(daemon: Daemon) -> None:
    assert cli_json("record", "--address", daemon.address)["on"] is False
    assert cli_json("record", "on", "--address", daemon.address)["on"] is True
    result = run_cli("record", "off", "--address", daemon.address)
    assert result.stdout.startswith(f"recording is off: {daemon.store}/trace/*.jsonl")


@pytest.fixture(scope="module")
def page(reported: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    result = run_cli("report", "--address", reported.address, "--html", str(path))
    assert (result.returncode, result.stdout) == (0, f"wrote {path}\n")
    return path


def test_the_page_needs_no_network_and_every_chart_says_what_it_shows(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"<script|<link|src=|@import|url\((?!#)", text)
    assert text.count("<svg") == text.count('role="img" aria-label="') == text.count("<figcaption>") == 8
    for words in ("45.39%", "What is the hit rate?", "Why is it not higher?", "What would more room", "load error"):
        assert words in text


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_the_window_of_a_real_browser(page: Path, tmp_path: Path, width: int) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium here to look at the page with")
    numbers = "innerWidth, document.documentElement.scrollWidth, document.querySelectorAll('svg').length"
    probe = f"<script>document.title = [{numbers}].join()</script>"
    copy = tmp_path / "probed.html"
    copy.write_text(page.read_text().replace("</body>", probe + "</body>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    result = subprocess.run([*command, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=90)
    title = re.search(r"<title>(\d+),(\d+),(\d+)</title>", result.stdout)
    assert title is not None, result.stderr
    inner, needed, charts = map(int, title.groups())
    assert needed <= inner, f"the page is {needed} wide in a window of {inner}"
    assert charts == 8


def test_an_output_that_takes_no_more_is_one_line(reported: Daemon) -> None:
    command = [sys.executable, "-m", "cachesvc", "report", "--address", reported.address]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr == "cachesvc: cannot write the output: No space left on device\n"


def test_a_watched_table_is_shown_again_until_it_is_interrupted(reported: Daemon) -> None:
    command = [sys.executable, "-m", "cachesvc", "report", "--watch", "--address", reported.address]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    titles = 0
    while titles < 2:
        titles += "Hit rate by tokens" in watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    _, errors = watching.communicate(timeout=20)
    assert (watching.returncode, errors) == (0, "")


def test_a_recording_that_cannot_begin_is_one_line(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "trace").write_text("in the way")
    daemon = make_daemon("--record").start(wait=False)
    assert daemon.process is not None and daemon.process.wait(20) == 5
    assert "cannot record into" in daemon.log.read_text() and "Traceback" not in daemon.log.read_text()


def test_one_daemon_by_two_addresses_counts_once(reported: Daemon) -> None:
    other = str(reported.socket.parent / "." / ".") + "/./" + reported.socket.name
    both = cli_json("report", "--address", reported.address, "--address", f"unix:{other}")
    assert both["daemons"] == 1 and both == cli_json("report", "--address", reported.address)


@pytest.mark.parametrize("name", ["[/]", "[bold red]b", "=cmd|' /C calc'!A0", "$x$", "<script>"])
def test_names_of_models_are_text(daemon: Daemon, name: str, tmp_path: Path) -> None:
    with Client(daemon.address) as client:
        client.attach(Namespace(name, "1", "uint8"), SIZE)
        client.lookup([b"k" * 16])
        with pytest.raises(grpc.RpcError, match="printable"):
            client.attach(Namespace("\x1b[31mred", "1", "uint8"), SIZE)
    shown = run_cli("report", "--address", daemon.address)
    assert (shown.returncode, shown.stderr) == (0, "") and name in shown.stdout
    table = run_cli("report", "--address", daemon.address, "--csv")
    (row,) = csv.DictReader(io.StringIO(table.stdout))
    assert row["model"] == (f"'{name}" if name.startswith("=") else name)


@pytest.mark.long
def test_what_was_counted_more_than_a_minute_ago_survives_a_kill(
    make_daemon: Callable[..., Daemon], namespace: Namespace, tmp_path: Path
) -> None:
    """Real seconds for the passes to be closed, a set clock for the half minute."""
    offset = tmp_path / "offset"
    offset.write_text("0")
    daemon = make_daemon("--clock-offset-file", str(offset)).start()
    with Client(daemon.address) as client:
        some_traffic(client, namespace)
        match = client.match(chain_keys(namespace, range(1024)), lease_ms=1_000)  # never given back: times out
        assert match.lease_id
    before = cli_json("report", "--address", daemon.address)["total"]
    time.sleep(CLOSE_TIMED_OUT_SECONDS + HOUSEKEEPING_SECONDS + 2)

    def written() -> int:
        return sum(path.stat().st_size for path in (daemon.store / "rollups").glob("*.jsonl"))

    earlier = written()
    offset.write_text(str(KEEP_SECONDS))
    wait_until(lambda: written() > earlier)
    daemon.kill()
    after = cli_json("report", "--address", daemon.start().address)["total"]
    assert isinstance(before, dict) and isinstance(after, dict)
    assert after["input_tokens"] == before["input_tokens"] == 12 * 1034 + 1025
    assert after["hit_tokens"] == before["hit_tokens"]
    assert after["miss_tokens_by_reason"] == before["miss_tokens_by_reason"] | {"timed_out": 1024}
