"""``cachesvc replay`` as it is typed: options, output, and one line for what is wrong."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trace_files import HEADER, ask, mooncake, session, write

Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    return write(
        tmp_path / "chat.jsonl",
        [mooncake(0, 1100, [1, 2, 3]), mooncake(1_000, 1024, [4, 5]), mooncake(2_000, 1536, [1, 2, 6])],
    )


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    return write(tmp_path / "agent.jsonl", [session((0, 1024, [[1, 16]]), (100, 1100, [[1, 17]]))])


def test_a_grid_as_json(typed: Typed, chat: Path, agent: Path) -> None:
    code, out, _ = typed(
        "replay", chat, agent, "--block", 512, "--blocks", "1,100", "--policy", "lru,infinite", "--json",
        "--ttl", "agent=1m,chat=1s", "--ttl", "1h", "--class", f"{chat.name}=batch", "--class", f"{chat}=chat",
    )  # fmt: skip
    result = json.loads(out)
    assert code == 0 and result["block"] == 512
    rows: dict[Any, Any] = {(r["policy"], r["capacity_blocks"], r["ttl"], r["class"]): r for r in result["results"]}
    assert len(rows) == 3 * 2 * 3
    assert rows["infinite", None, "1h", "chat"]["hit_tokens"] == 1024
    assert rows["lru", 100, "agent=1m,chat=1s", "chat"]["miss_tokens_by_reason"] == {
        "never_seen": 5 * 512, "expired": 1024, "evicted": 0, "partial_tail": 76,
    }  # fmt: skip
    assert rows["lru", 1, "1h", "all"]["miss_tokens_by_reason"]["evicted"] == 1024 + 1024


def test_what_the_engine_held_is_neither_hit_nor_miss(typed: Typed, tmp_path: Path) -> None:
    """As in the daemon's accounting: hits and misses begin behind the local tokens."""
    rows = [ask(0, [1, 2, 3], local=200), ask(1, [1, 2, 8, 9], tokens=600, local=130), ask(2, [5, 6], local=128)]
    rows.append(ask(3, [7], tokens=200, local=190))
    trace = write(tmp_path / "own", [HEADER, *rows])
    (_, row) = json.loads(typed("replay", trace, "--json")[1])["results"]
    assert row["local_tokens"] == 200 + 130 + 128 + 190
    assert row["hit_tokens"] == 2 * 128 - 130
    assert row["miss_tokens_by_reason"] == {
        "never_seen": 184 + 256 + 128, "expired": 0, "evicted": 0, "partial_tail": 88 + 10,
    }  # fmt: skip
    assert "648 input tokens were in the engines' own caches" in typed("replay", trace)[1]


def test_capacities_in_bytes_and_a_fixed_ttl(typed: Typed, chat: Path) -> None:
    code, out, _ = typed(
        "replay", chat, "--capacity", "1MB,2MB", "--bytes-per-token", 890, "--ttl", "1s,1m", "--ttl-mode", "fixed",
        "--json",
    )  # fmt: skip
    cells = {(r["capacity_blocks"], r["ttl"], r["ttl_mode"]) for r in json.loads(out)["results"]}
    assert code == 0 and cells == {(blocks, ttl, "fixed") for blocks in (2, 4) for ttl in ("1s", "1m")}


def test_the_curve_and_the_table(typed: Typed, chat: Path) -> None:
    result = json.loads(typed("replay", chat, "--curve", "--blocks", "4", "--bytes-per-token", 1, "--json")[1])
    by_capacity = {point["capacity_blocks"]: point for point in result["curve"]}
    assert by_capacity[4]["hit_tokens"] == 1024 and by_capacity[4]["capacity_bytes"] == 2048
    assert by_capacity[2]["hit_tokens"] == 0
    code, out, err = typed("replay", chat)
    assert code == 0 and not err and re.search(r"infinite .*chat .*1,024 .*0\.279", out)


@pytest.mark.parametrize("more", [["--curve"], ["--blocks", "1,4", "--policy", "lru,s3fifo"], ["--ttl", "1s"]])
@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_plots(typed: Typed, chat: Path, tmp_path: Path, more: list[str], suffix: str) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / f"plot.{suffix}"
    assert typed("replay", chat, "--plot", plot, *more)[0] == 0
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype html>"}
    assert plot.read_bytes().startswith(starts[suffix])
    assert suffix != "html" or not re.search(r'(?:src|href)="http', plot.read_text())


def test_plots_say_what_to_install(typed: Typed, chat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = typed("replay", chat, "--plot", "x.png")
    assert code == 2 and "cachesvc[plots]" in err


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (["--policy", "clock", "--blocks", "1"], 2, "--policy 'clock' is unknown"),
        (["--policy", "lru"], 2, "needs a capacity"),
        (["--policy", "infinite", "--blocks", "5"], 2, "has no capacity"),
        (["--blocks", "0"], 2, "holds no block"),
        (["--blocks", "-5"], 2, "holds no block"),
        (["--blocks", "many"], 2, "--blocks 'many'"),
        (["--blocks", "1e9"], 2, "--blocks '1e9' is not a whole number"),
        (["--capacity", "0", "--bytes-per-token", "890"], 2, "holds no block"),
        (["--capacity", "1TB"], 2, "needs --bytes-per-token"),
        (["--capacity", "1TB", "--blocks", "5", "--bytes-per-token", "890"], 2, "say the same"),
        (["--bytes-per-token", "-1"], 2, "must be more than 0"),
        (["--ttl", "agent=3d"], 7, "unknown class 'chat'"),
        (["--ttl", "agent=3d,7d"], 2, "mixes"),
        (["--ttl", "soon"], 2, "'soon' is not a duration"),
        (["--ttl", "0s"], 2, "must be more than 0"),
        (["--ttl", "Chat=1s"], 2, "must match"),
        (["--ttl-mode", "fixed"], 2, "says nothing without --ttl"),
        (["--ttl", "1s", "--ttl-mode", "wild"], 2, "'wild' is unknown"),
        (["--curve", "--ttl", "1s"], 2, "cannot be had with --ttl"),
        (["--curve", "--policy", "fifo"], 2, "of lru alone"),
        (["--class", "other=chat"], 2, "is not FILE=NAME"),
        (["--class", "chat.jsonl=Bad Name"], 2, "must match"),
        (["--sample", "1.5"], 2, "share of the blocks"),
        (["--sample", "0.01", "--blocks", "10"], 2, "leaves fewer than"),
        (["--block", "0"], 2, "at least 1 token"),
        (["--block", "128"], 2, "finer"),
        (["--block", "256"], 2, "not a multiple"),
        (["--blocks", ""], 2, "is not a whole number"),
        (["--blocks", "--5"], 2, "is not a whole number"),
        (["--blocks", "9" * 5_000], 2, "is not a whole number"),
        (["--capacity", "9" * 400, "--bytes-per-token", "890"], 2, "is not a size"),
        (["--ttl", "9" * 400 + "d"], 2, "is not a duration"),
        (["--policy", ""], 2, "--policy '' is unknown"),
        (["--policy", "lru,recorded", "--blocks", "5"], 2, "recorded alone"),
        (["--policy", "recorded", "--ttl-mode", "fixed"], 2, "takes no other option"),
        (["--policy", "recorded", "--session-gap", "1s"], 2, "takes no other option"),
        (["--policy", "recorded"], 7, "no recording of a daemon"),
        (["--sample", "0.7"], 2, "share of the blocks"),
        (["--sample", "5e-324"], 2, "share of the blocks"),
        (["--session-gap", "-1"], 2, "is not a duration"),
        (["--plot", "plot.gif"], 2, "must end in"),
    ],
)
def test_one_line_and_an_exit_code(typed: Typed, chat: Path, arguments: list[str], code: int, why: str) -> None:
    found, out, err = typed("replay", chat, *arguments)
    assert (found, out, err.count("\n")) == (code, "", 1), err
    assert why in err


AGENT = {"block_size": 128, "reqs": []}


@pytest.mark.parametrize(
    "row",
    [
        AGENT | {"reqs": [[0, "abc", 1, 0, []]]},
        AGENT | {"reqs": [[0, None, 1, 0, []]]},
        AGENT | {"reqs": [[0, 1 << 39, 1, 0, [[0, 1 << 32]]]]},
        AGENT | {"reqs": [[1e304, 128, 1, 0, [[0, 1]]]]},
        mooncake(1e307, 512, [1]),
        mooncake(0, 1024, [1.5, 2.5]),  # type: ignore[list-item]
        mooncake(0, 1024, [-1, 2]),
        HEADER | {"event": "ask"},
    ],
)
@pytest.mark.parametrize("options", [[], ["--sample", "0.5"], ["--blocks", "2"]])
def test_a_malformed_line_is_one_line(typed: Typed, tmp_path: Path, row: dict[str, Any], options: list[str]) -> None:
    code, out, err = typed("replay", write(tmp_path / "odd", [row, row]), *options)
    assert (code, out, err.count("\n")) == (7, "", 1), err
    assert "line" in err


BOOT = {"at": 1, "event": "boot"}
ASKED = ask(1, [1, 2], id="", again=False, model="m", tenant="", shards=1) | {"pass": 1}
END = {"at": 1, "event": "end", "pass": 1, "loaded": 0, "tiers": "", "reason": "bypassed"}


@pytest.mark.parametrize(
    "event",
    [
        END | {"reason": 5},
        END | {"reason": "bored"},
        END | {"loaded": -1},
        {"event": "dropped", "shard": 0, "keys": "", "reason": None},
        {"event": "stored", "shard": 70_000, "keys": ""},
        {"event": "stored", "shard": "a", "keys": ""},
        {"event": "stored", "shard": 0, "keys": "AAAA"},
        {"event": "unreachable", "tokens": "x", "class": "agent", "model": "m", "tenant": ""},
        {"event": "unreachable", "tokens": 1, "class": "agent", "model": None, "tenant": ""},
        {"event": "lost", "count": -1},
        ASKED | {"shards": 10**12},
        ASKED | {"checkpoints": 1},
        ASKED | {"input": -5},
        ASKED | {"input": 300.5},
        ASKED | {"local": 10**30},
        ASKED | {"class": 5},
        {name: value for name, value in ASKED.items() if name != "shards"},
    ],
)
def test_a_malformed_event_is_one_line_that_says_where(typed: Typed, tmp_path: Path, event: dict[str, Any]) -> None:
    trace = write(tmp_path / "own", [HEADER, BOOT, ASKED, event])
    code, out, err = typed("replay", trace, "--policy", "recorded")
    assert (code, out, err.count("\n")) == (7, "", 1), err
    assert f"{trace} line 4" in err


def test_a_recording_in_which_nothing_was_asked_is_empty(typed: Typed, tmp_path: Path) -> None:
    trace = write(tmp_path / "own", [HEADER, BOOT])
    code, _, err = typed("replay", trace, "--policy", "recorded")
    assert code == 7 and "empty" in err


def test_one_recording_named_twice_counts_once(typed: Typed, tmp_path: Path) -> None:
    trace = write(tmp_path / "own", [HEADER, BOOT, ASKED, END])
    code, out, _ = typed("replay", trace, tmp_path / "." / "own", "--policy", "recorded", "--json")
    assert code == 0 and json.loads(out)["total"]["passes"] == 1


def test_names_of_files_are_text(typed: Typed, tmp_path: Path) -> None:
    trace = write(tmp_path / r"$\frac{$[bold]", [mooncake(0, 512, [1])])
    for options in (["--curve"], ["--blocks", "1,2"]):
        code, _, err = typed("replay", trace, *options, "--plot", tmp_path / "plot.svg")
        assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["replay"], "Missing argument 'TRACE...'"),
        (["replay", "t", "--foo"], "No such option"),
        (["replay", "t", "--sample", "x"], "Invalid value for '--sample'"),
        (["report", "--last"], "Option '--last' requires an argument"),
    ],
)
def test_a_mistyped_command_is_one_line(typed: Typed, arguments: list[str], text: str) -> None:
    code, out, err = typed(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert text in err and "--help" in err
