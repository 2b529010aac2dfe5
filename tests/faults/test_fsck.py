"""`cachesvc fsck` finds planted damage of each kind, says it by its exit code, and mends what can be mended."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Typed
from store_bench import SEGMENT, STRIDE, Bench, ids

from cachesvc.disk.fsck import HARMLESS
from cachesvc.record import PAGE, TRAILER_BYTES
from cachesvc.segments.format import encode_footer
from cachesvc.segments.recover import read_segment

RECORDS = 8


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, list[bytes]]:
    """A store that was closed cleanly: two full segments and one with two records."""
    bench = Bench(tmp_path / "store", scrub_rate=0)
    prompt = ids(18)
    bench.save(prompt)
    bench.store.close()
    return bench.path, prompt


def segments(store: Path) -> list[Path]:
    return sorted(store.glob("*/*/*/*.seg"))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def swap_footer(store: Path) -> None:
    """A footer that is whole, and lies about a record."""
    path = segments(store)[0]
    found = read_segment(path)
    from dataclasses import replace

    heads = [replace(head, checksum=head.checksum ^ 1) if head.number == 3 else head for head in found.heads]
    with path.open("r+b") as file:
        file.seek(found.head.offset(found.records))
        file.write(encode_footer(found.head, heads))


def misplace(store: Path) -> None:
    path = segments(store)[0]
    target = path.parent.with_name("1234567")
    target.mkdir()
    path.rename(target / path.name)


def unseal(store: Path) -> None:
    cut(segments(store)[0], PAGE + RECORDS * STRIDE)


def tear(store: Path) -> None:
    cut(segments(store)[0], PAGE + 5 * STRIDE + 100)


def state(store: Path, **changed: object) -> None:
    target = store / "STORE.json"
    target.write_text(json.dumps(json.loads(target.read_text()) | changed))


def damage_index(store: Path) -> None:
    for path in (store / "index").iterdir():
        path.write_bytes(b"\xff" * 64)


def lose_a_segment(store: Path) -> None:
    segments(store)[1].unlink()


def beside(store: Path) -> Path:
    """A file that is called like one of ours."""
    return segments(store)[0].with_name("01234567-000009-00000001.seg")


DAMAGE: dict[str, tuple[Callable[[Path], object], bool]] = {
    "damaged_record": (lambda store: flip(segments(store)[0], PAGE + 3 * STRIDE + 7), True),
    "damaged_record ": (lambda store: flip(segments(store)[0], PAGE + 3 * STRIDE - TRAILER_BYTES + 20), True),
    "damaged_footer": (lambda store: flip(segments(store)[0], PAGE + RECORDS * STRIDE + 50), True),
    "damaged_footer ": (lambda store: flip(segments(store)[0], segments(store)[0].stat().st_size - 38), True),
    "damaged_footer  ": (lambda store: flip(segments(store)[0], segments(store)[0].stat().st_size - 1), True),
    "footer_mismatch": (swap_footer, True),
    "damaged_header": (lambda store: flip(segments(store)[0], 100), True),
    "foreign_file": (lambda store: [flip(segments(store)[0], at) for at in (100, PAGE // 2 + 100)], False),
    "foreign_file ": (lambda store: segments(store)[0].with_name("holiday.seg").write_bytes(b"x" * 9_000), False),
    "foreign_file  ": (lambda store: os.mkfifo(beside(store)), False),
    "foreign_file   ": (lambda store: beside(store).symlink_to("nothing"), False),
    "foreign_file    ": (lambda store: beside(store).mkdir(), False),
    "torn_file": (lambda store: cut(segments(store)[2], 100), True),
    "misplaced_segment": (misplace, False),
    "damaged_state": (lambda store: (store / "STORE.json").write_text("{"), True),
    "damaged_state ": (lambda store: state(store, epoch=float("inf")), True),
    "damaged_state  ": (lambda store: state(store, daemon="a/b"), True),
    "damaged_state   ": (lambda store: state(store, epoch=0), True),
    "damaged_namespace": (lambda store: (segments(store)[0].parents[2] / "namespace.json").write_text("{}"), True),
    "damaged_index": (damage_index, True),
    "index_mismatch": (lose_a_segment, True),
    "unsealed_segment": (unseal, True),
    "torn_end": (tear, True),
    "leftover": (lambda store: (store / "STORE.tmp").write_text("{"), True),
}


def test_a_sound_store_is_said_to_be_sound(typed: Typed, stored: tuple[Path, list[bytes]]) -> None:
    code, out, err = typed("fsck", stored[0], "--json")
    found = json.loads(out)
    assert (code, err, found["counts"]) == (0, "", {})
    assert (found["segments"], found["records"], found["blocks_in_index"]) == (3, 18, 18)
    code, out, _ = typed("fsck", stored[0])
    assert code == 0 and "nothing was found" in out


@pytest.mark.parametrize("kind", DAMAGE)
def test_planted_damage_is_found_and_mended(typed: Typed, stored: tuple[Path, list[bytes]], kind: str) -> None:
    store, prompt = stored
    plant, mendable = DAMAGE[kind]
    kind = kind.strip()
    plant(store)
    code, out, err = typed("fsck", store, "--json")
    assert json.loads(out)["counts"].get(kind) == 1, out
    assert code == (0 if kind in HARMLESS and set(json.loads(out)["left"]) <= HARMLESS else 8)
    if code:
        assert len(err.strip().splitlines()) == 1 and "--repair" in err
        assert kind in err or kind in HARMLESS
    code, out, _ = typed("fsck", store, "--repair", "--json")
    assert code == (0 if mendable else 8), out
    code, out, _ = typed("fsck", store, "--json")
    assert code == (0 if mendable else 8)
    assert json.loads(out)["counts"].get(kind, 0) == (0 if mendable else 1), out
    again = Bench(store, scrub_rate=0)
    lost = {
        "foreign_file": 8,
        "misplaced_segment": 0,
        "index_mismatch": 8,
        "damaged_record": 1,
        "torn_end": 3,
        "torn_file": 2,
    }
    there = again.stored(prompt)
    assert there.count(False) == (0 if kind == "foreign_file" and (store / "x").exists() else lost.get(kind, 0)) or (
        kind == "foreign_file" and there.count(False) == 0
    )
    again.store.close()


def test_a_store_that_is_open_or_none_is_one_line(typed: Typed, tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", scrub_rate=0)
    code, _, err = typed("fsck", bench.path)
    assert code == 3 and "in use by process" in err
    bench.store.close()
    code, _, err = typed("fsck", tmp_path / "nothing")
    assert code == 5 and "is no store" in err and not (tmp_path / "nothing").exists()


def test_durable_blocks_of_a_sealed_file_that_was_cut_are_said_to_be_lost(
    typed: Typed, stored: tuple[Path, list[bytes]]
) -> None:
    store, prompt = stored
    tear(store)
    code, out, err = typed("fsck", store, "--json")
    assert code == 8 and "1 index_mismatch" in err
    found = [finding["text"] for finding in json.loads(out)["findings"] if finding["kind"] == "index_mismatch"]
    assert found == ["3 blocks are in files that are not there or end before them"]
    assert typed("fsck", store, "--repair")[0] == typed("fsck", store)[0] == 0
    again = Bench(store, scrub_rate=0)
    assert again.stored(prompt).count(False) == 3
    again.store.close()


def test_a_start_forgets_blocks_beyond_the_end_of_a_file(typed: Typed, stored: tuple[Path, list[bytes]]) -> None:
    store, _ = stored
    tear(store)
    Bench(store, scrub_rate=0).store.close()
    code, out, _ = typed("fsck", store, "--json")
    assert code == 0 and json.loads(out)["counts"] == {}, out


def test_another_format_is_said_and_left_alone(typed: Typed, stored: tuple[Path, list[bytes]]) -> None:
    store, prompt = stored
    state(store, format=3)
    for repair in ([], ["--repair"]):
        code, out, _ = typed("fsck", store, "--json", *repair)
        found = json.loads(out)
        assert code == 8 and found["left"] == {"damaged_state": 1}
        assert "has format 3; this build reads 1: use" in found["findings"][0]["text"]
    (store / "STORE.json").unlink()  # as it says
    again = Bench(store, scrub_rate=0)
    assert all(again.stored(prompt))
    again.store.close()


def test_what_a_kill_left_is_no_damage(typed: Typed, tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", scrub_rate=0)
    bench.save(ids(5))
    shutil.copytree(bench.path, tmp_path / "killed")
    bench.store.close()
    code, out, _ = typed("fsck", tmp_path / "killed", "--json")
    assert code == 0 and json.loads(out)["counts"] == {"unsealed_segment": 1}
    assert SEGMENT > 5 * STRIDE
