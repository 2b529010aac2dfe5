from __future__ import annotations

from pathlib import Path

import pytest
from conftest import cli_json, run_cli

from cachesvc.classes import TrafficClass, TrafficClasses
from cachesvc.config import load, parse_duration, parse_size
from cachesvc.errors import ConfigError, InvalidCall


@pytest.mark.parametrize(
    ("text", "value"),
    [("20GB", 20_000_000_000), ("512MiB", 1 << 29), ("1.5k", 1536), ("7", 7), (7, 7), ("1 tb", 10**12), ("3b", 3)],
)
def test_sizes(text: object, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("3d", 259_200), ("1.5h", 5400), ("30m", 1800), ("9", 9), ("2w", 1_209_600)]
)
def test_durations(text: object, value: float) -> None:
    assert parse_duration(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1GB", "3 parsecs", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text('workers = 2\nstore_bytes = "1GB"\nlog_level = "error"\n[classes]\nagent = "1d"\nbatch = "1h"\n')
    monkeypatch.setenv("CACHESVC_STORE_BYTES", "2GB")
    monkeypatch.setenv("CACHESVC_LOG_LEVEL", "debug")
    loaded = load({"log_level": "warning"}, file)
    assert (loaded.config.workers, loaded.config.store_bytes, loaded.config.log_level) == (2, 2 * 10**9, "warning")
    assert loaded.config.classes == {"agent": 86_400, "batch": 3600}
    assert {name: loaded.sources[name] for name in ("workers", "store_bytes", "log_level", "segment_bytes")} == {
        "workers": f"file {file}",
        "store_bytes": "environment CACHESVC_STORE_BYTES",
        "log_level": "flag --log-level",
        "segment_bytes": "default",
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"workers": 0}, ["workers", "--workers", "greater than or equal to 1"]),
        ({"store_bytes": "many"}, ["store_bytes", "'many'"]),
        ({"listen": "0.0.0.0:7733"}, ["listen", "loopback"]),
        ({"listen": "127.0.0.1:99999"}, ["listen", "99999"]),
        ({"classes": {"Agent!": "3d"}}, ["classes", "'Agent!'"]),
        ({"classes": {"agent": "0s"}}, ["classes", "at least 1 s"]),
        ({"classes": {}}, ["at least one"]),
        ({"socket": "/" + "x" * 120}, ["socket", "101"]),
        ({"colour": "red"}, ["colour", "known: store"]),
        ({"log_level": "loud"}, ["log_level", "'loud'"]),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(flags: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_wrong_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load({}, tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("workers = = 2")
    with pytest.raises(ConfigError, match="not TOML"):
        load({}, tmp_path / "bad.toml")


def test_the_command_prints_values_and_where_they_came_from(tmp_path: Path) -> None:
    shown = cli_json("config", "--store", str(tmp_path), "--class", "agent=2d")
    assert shown["store"] == {"value": str(tmp_path), "source": "flag --store"}
    assert shown["classes"] == {"value": {"agent": 172_800.0}, "source": "flag --class"}
    table = run_cli("config", "--store", str(tmp_path), environment={"COLUMNS": "200"})
    assert table.returncode == 0 and "flag --store" in table.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("serve", "--class", "agent"), 2, "NAME=TTL"),
        (("serve", "--workers", "0"), 2, "workers"),
        (("serve", "--config", "/none.toml"), 2, "/none.toml"),
        (("serve", "--store", "/proc/none", "--metrics", "", "--listen", ""), 5, "/proc/none"),
        (("status", "--address", "unix:/none.sock"), 6, "cachesvc serve"),
        (("report", "--address", "nowhere"), 2, "nowhere"),
    ],
)
def test_errors_reach_the_person_as_one_line_and_a_code(
    arguments: tuple[str, ...], code: int, word: str, tmp_path: Path
) -> None:
    if arguments[0] == "serve":
        arguments = (*arguments, "--socket", str(tmp_path / "s"))
    result = run_cli(*arguments)
    assert result.returncode == code, result.stderr
    assert word in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flags in (("--listen", address, "--metrics", ""), ("--listen", "", "--metrics", address)):
            result = run_cli("serve", "--store", str(tmp_path / "store"), "--socket", str(tmp_path / "s"), *flags)
            assert result.returncode == 4, result.stderr
            assert address in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr


def test_slices_end_after_the_expiry_of_what_is_in_them() -> None:
    traffic_class = TrafficClass("agent", 259_200.0)
    for used in (0.0, 1.0, 10_799.9, 10_800.0, 1_800_000_123.4):
        assert 0 < traffic_class.slice_end(used) - (used + traffic_class.ttl) <= 259_200 / 24


def test_a_class_of_an_old_file_is_kept_but_cannot_be_asked_for() -> None:
    classes = TrafficClasses({"agent": 1.0})
    assert classes.of_file("batch", 50.0).ttl == 50.0
    assert classes.of_file("agent", 99.0).ttl == 1.0
    with pytest.raises(InvalidCall, match="'batch'"):
        classes.named("batch")
