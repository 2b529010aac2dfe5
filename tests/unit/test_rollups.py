"""Minutes of counts: written once, found again, kept within limits, read past damage."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import xxhash

from cachesvc.accounting import RowKey
from cachesvc.rollups import Counts, Rollups

KEY = RowKey("agent", "m", "t")
START = 1_800_000_000 // 86_400 * 86_400.0  # midnight


class Counted:
    """What a daemon has counted since it started."""

    def __init__(self) -> None:
        self.counts = Counts({KEY: Counter()}, Counter(), {})

    def add(self, **counts: int) -> None:
        self.counts.rows[KEY].update(counts)
        self.counts.other.update({"reuse.3": 64})
        self.counts.store["blocks"] = self.counts.store.get("blocks", 0) + 1

    def __call__(self) -> Counts:
        return Counts({KEY: Counter(self.counts.rows[KEY])}, Counter(self.counts.other), dict(self.counts.store))


def total(rollups: Rollups, counted: Counted, now: float, since: float = 0, until: float = 1e18) -> Counter[str]:
    return next(iter(rollups.history(counted, now, since, until, 0).values()), Counts()).rows.get(KEY, Counter())


def test_each_minute_holds_what_was_counted_in_it_and_survives_a_restart(tmp_path: Path) -> None:
    rollups, counted = Rollups(tmp_path / "r"), Counted()
    for minute in range(5):
        for second in (1, 30, 59):
            rollups.keep(counted, START + 60 * minute + second)
            counted.add(input=10 * (minute + 1), pending=5 if second == 1 else -2)
    # Killed here: the second half of the fifth minute is not on disk.
    found = Rollups(tmp_path / "r").history(Counted(), START + 400, 0, 1e18, 60)
    assert [start - START for start in found] == [0, 60, 120, 180, 240]
    assert [c.rows[KEY]["input"] for c in found.values()] == [30, 60, 90, 120, 50]
    assert [c.rows[KEY]["pending"] for c in found.values()] == [1] * 4 + [5]
    assert [c.store["blocks"] for c in found.values()] == [3, 6, 9, 12, 13]
    assert [c.other["reuse.3"] for c in found.values()] == [192] * 4 + [64]
    # The living one counts the minute under way too, once.
    assert total(rollups, counted, START + 299)["input"] == 450
    rollups.keep(counted, START + 299, closing=True)
    assert total(rollups, counted, START + 299)["input"] == 450
    assert total(Rollups(tmp_path / "r"), Counted(), START + 400)["input"] == 450


def test_only_the_asked_time_is_summed(tmp_path: Path) -> None:
    rollups, counted = Rollups(tmp_path / "r"), Counted()
    for minute in range(10):
        rollups.keep(counted, START + 60 * minute)
        counted.add(input=1)
    rollups.keep(counted, START + 600)
    assert total(rollups, counted, START + 601, START + 120, START + 300)["input"] == 3
    assert list(rollups.history(counted, START + 601, 0, 1e18, 300)) == [START, START + 300]


def test_a_line_cut_off_by_a_crash_is_left_out_and_the_next_one_is_whole(tmp_path: Path) -> None:
    rollups, counted = Rollups(tmp_path / "r"), Counted()
    for minute in range(3):
        rollups.keep(counted, START + 60 * minute)
        counted.add(input=7)
    rollups.keep(counted, START + 180)
    (path,) = (tmp_path / "r").glob("*.jsonl")
    path.write_text(path.read_text()[:-9])
    again, fresh = Rollups(tmp_path / "r"), Counted()
    again.keep(fresh, START + 200)
    fresh.add(input=1)
    again.keep(fresh, START + 240)
    assert total(again, fresh, START + 240)["input"] == 7 + 7 + 1


@pytest.mark.parametrize(
    "line", ['{"minute": 1}', "[1,2", '{"minute": "x", "rows": [], "other": {}, "store": {}}', "\x00"]
)
def test_foreign_lines_are_left_out(tmp_path: Path, line: str) -> None:
    for text in (line, f"{xxhash.xxh3_64_hexdigest(line.encode())} {line}"):
        (tmp_path / "2027-01-15.jsonl").write_text(text + "\n")
    assert Rollups(tmp_path).history(Counted(), START, 0, 1e18, 60) == {}


def test_past_days_are_compressed_and_the_oldest_of_more_than_thirty_go(tmp_path: Path) -> None:
    rollups, counted = Rollups(tmp_path), Counted()
    for day in range(35):
        rollups.keep(counted, START + 86_400 * day)
        counted.add(input=1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 31
    assert [name.endswith(".gz") for name in names] == [True] * 30 + [False] or all(n.endswith(".gz") for n in names)
    assert total(rollups, counted, START + 86_400 * 34)["input"] in (31, 32)


def test_a_clock_that_jumps_a_year_ahead_and_back_clears_nothing(tmp_path: Path) -> None:
    rollups, counted = Rollups(tmp_path), Counted()
    for now in (START, START + 60, START + 365 * 86_400, START + 120, START + 180):
        rollups.keep(counted, now)
        counted.add(input=1)
    assert total(rollups, counted, START + 181)["input"] == 5


def test_the_byte_budget_holds_but_for_the_newest_day(tmp_path: Path) -> None:
    rollups, counted = Rollups(tmp_path, budget=600), Counted()
    for day in range(9):
        rollups.keep(counted, START + 86_400 * day)
        counted.add(input=1)
    sizes = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    assert len(sizes) > 1 and sum(sizes) <= 600 + sizes[-1]


@pytest.mark.long
def test_a_busy_day_stays_within_the_budget_and_loses_its_oldest_part(tmp_path: Path) -> None:
    rollups, counted = Rollups(tmp_path, budget=8_000), Counted()
    for half in range(400):
        counted.add(**{f"{half}-{n}": 1 for n in range(20)}, input=1)
        rollups.keep(counted, START + 30 * half)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 8_000 + 2_000
    kept = Rollups(tmp_path).history(Counted(), START + 12_000, 0, 1e18, 60)
    assert min(kept) > START and max(kept) == START + 199 * 60
    assert {c.rows[KEY]["input"] for c in list(kept.values())[1:-1]} == {2}


def test_a_clock_before_1970_loses_nothing(tmp_path: Path) -> None:
    rollups, counted = Rollups(tmp_path), Counted()
    for now in (START, START + 60, -3e9, -2.9e9, START + 120):
        rollups.keep(counted, now)
        counted.add(input=1)
    rollups.keep(counted, START + 180)
    assert total(Rollups(tmp_path), Counted(), START + 181)["input"] == 5


def test_a_days_file_under_another_name_counts_not_at_all(tmp_path: Path) -> None:
    rollups, counted = Rollups(tmp_path), Counted()
    rollups.keep(counted, START)
    counted.add(input=1)
    rollups.keep(counted, START + 60)
    for name in ("2027-01-14.jsonl", "2027-01-16.jsonl", "2027-01-15.0001.jsonl.gz"):
        content = (tmp_path / "2027-01-15.jsonl").read_bytes()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert total(Rollups(tmp_path), Counted(), START + 181)["input"] == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": [["agent", "m", "t", {"input": 10**19}]]},
        {"rows": [["agent", "\ud800", "t", {"input": 1}]]},
        {"minute": float("inf")},
    ],
)
def test_lines_that_no_daemon_wrote_stop_no_report(tmp_path: Path, changed: dict[str, Any]) -> None:
    line = {"minute": int(START) // 60, "ids": ["a"], "rows": [], "other": {}, "store": {"blocks": -1}}
    good = line | {"ids": ["b"], "rows": [["agent", "m", "t", {"input": 1}]]}
    bodies = [json.dumps(line | changed), json.dumps(good)]
    text = "".join(f"{xxhash.xxh3_64_hexdigest(body.encode())} {body}\n" for body in bodies)
    (tmp_path / "2027-01-15.jsonl").write_text(text)
    (counts,) = Rollups(tmp_path).history(Counted(), START, 0, 1e18, 60).values()
    assert counts.rows[KEY]["input"] == 1 and counts.store == {"blocks": 0}


def test_what_the_disk_refuses_goes_into_the_next_minute(tmp_path: Path) -> None:
    rollups, counted = Rollups(tmp_path / "r"), Counted()
    rollups.keep(counted, START)
    counted.add(input=3)
    name = tmp_path / "r" / "2027-01-15.jsonl"
    name.mkdir()
    with pytest.raises(OSError):
        rollups.keep(counted, START + 60)
    name.rmdir()
    counted.add(input=4)
    rollups.keep(counted, START + 120)
    assert total(Rollups(tmp_path / "r"), Counted(), START + 130)["input"] == 7
    assert len([json.loads(line.partition(" ")[2]) for line in name.read_text().splitlines() if line]) == 1


def test_a_flipped_bit_costs_its_line_and_changes_no_other_number(tmp_path: Path) -> None:
    rollups, counted = Rollups(tmp_path / "r"), Counted()
    for minute in range(3):
        rollups.keep(counted, START + 60 * minute)
        counted.add(input=7)
    rollups.keep(counted, START + 180)
    (path,) = (tmp_path / "r").glob("*.jsonl")
    whole = path.read_bytes()
    for bit in range(3, 8 * len(whole), 131):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert total(Rollups(tmp_path / "r"), Counted(), START + 200)["input"] in (7, 14)


def test_a_day_that_a_kill_left_both_plain_and_compressed_counts_once(tmp_path: Path) -> None:
    rollups, counted = Rollups(tmp_path), Counted()
    rollups.keep(counted, START)
    counted.add(input=7)
    rollups.keep(counted, START + 60)
    plain = (tmp_path / "2027-01-15.jsonl").read_bytes()
    counted.add(input=1)
    rollups.keep(counted, START + 86_400)
    (tmp_path / "2027-01-15.jsonl").write_bytes(plain)
    assert total(rollups, counted, START + 86_500)["input"] == 8
    assert total(Rollups(tmp_path), Counted(), START + 86_500)["input"] == 8


def test_what_is_in_the_way_of_old_files_does_not_stop_new_minutes(tmp_path: Path) -> None:
    (tmp_path / "2027-01-14.jsonl").mkdir()
    rollups, counted = Rollups(tmp_path), Counted()
    for minute in range(3):
        rollups.keep(counted, START + 60 * minute)
        counted.add(input=1)
    rollups.keep(counted, START + 180)
    assert [c.rows[KEY]["input"] for c in rollups.history(counted, START + 190, 0, 1e18, 60).values()] == [1, 1, 1]
