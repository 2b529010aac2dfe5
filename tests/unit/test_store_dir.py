"""STORE.json: whatever it holds, the store opens or says what to do, and names of files never come again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from store_bench import Bench, ids

from cachesvc.errors import StoreUnusable
from cachesvc.store_dir import next_epoch


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"null",
        b"[" * 100_000,
        b'{"format": 1, "daemon": "0123abcd"}',
        b'{"format": 1, "daemon": "0123abcd", "epoch": 1e999}',
        b'{"format": 1, "daemon": "0123abcd", "epoch": NaN}',
        b'{"format": 1, "daemon": "0123abcd", "epoch": 1.5}',
        b'{"format": 1, "daemon": "0123abcd", "epoch": -2}',
        b'{"format": 1, "daemon": "0123abcd", "epoch": 1' + b"0" * 300 + b"}",
        b'{"format": 1, "daemon": "0123abcd", "epoch": 1' + b"0" * 5_000 + b"}",
        b'{"format": 1e999, "daemon": "0123abcd", "epoch": 1}',
        b'{"format": true, "daemon": "0123abcd", "epoch": 1}',
        b'{"format": 1, "daemon": "a/b", "epoch": 3}',
        b'{"format": 1, "daemon": "0123abc", "epoch": 3}',
        b'{"format": 1, "daemon": 12345678, "epoch": 3}',
    ],
)
def test_a_damaged_one_is_written_anew(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "STORE.json").write_bytes(content)
    daemon, epoch = next_epoch(tmp_path)
    assert epoch == 1 and daemon != "0123abcd"
    assert "is damaged and is written anew" in caplog.text
    assert next_epoch(tmp_path) == (daemon, 2)


def test_another_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "STORE.json").write_text('{"format": 3, "daemon": "0123abcd", "epoch": 1}')
    with pytest.raises(StoreUnusable, match=r"has format 3; this build reads 1: use .* or delete STORE.json if"):
        next_epoch(tmp_path)


def test_an_older_one_that_came_back_makes_no_name_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", scrub_rate=0)
    for _ in range(4):
        bench.save(ids(8))
    bench.reopen()
    bench.save(ids(8))
    bench.store.close()
    files = sorted(bench.path.rglob("*.seg"))
    for path in files[:2]:  # as expiry does: numbers go on from the files that are left
        path.unlink()
    state = json.loads((bench.path / "STORE.json").read_text())
    (bench.path / "STORE.json").write_text(json.dumps(state | {"epoch": state["epoch"] - 1}))
    bench.open()
    fresh = ids(24)
    bench.save(fresh)
    assert bench.stored(fresh) == [True] * 24
    bench.store.close()
    assert json.loads((bench.path / "STORE.json").read_text())["epoch"] == state["epoch"] + 1
