"""How many blocks were never there before, and how far apart two requests for a block lie."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from cachesvc.ceiling import RELATIVE_ERROR, Ceiling
from cachesvc.histograms import REUSES, bucket
from cachesvc.reuse import ReuseDistances


def keys(first: int, count: int) -> bytes:
    return b"".join(hashlib.sha256(n.to_bytes(4)).digest()[:16] for n in range(first, first + count))


@pytest.mark.parametrize("count", [1, 100, 20_000, 150_000])
def test_different_keys_are_counted_within_the_stated_error(count: int) -> None:
    ceiling = Ceiling()
    new = sum(ceiling.asked(keys(first, min(1000, count - first))) for first in range(0, count, 1000))
    assert abs(new - count) <= 4 * RELATIVE_ERROR * count + 1


def test_what_was_asked_or_stored_before_is_not_new() -> None:
    ceiling = Ceiling()
    ceiling.asked(keys(0, 5000))
    ceiling.stored(keys(5000, 5000))
    assert ceiling.asked(keys(0, 10_000)) == 0


def test_a_key_twice_in_one_question_is_one() -> None:
    assert Ceiling().asked(keys(0, 1) * 50) == 1


def test_increments_are_unbiased_in_the_course_of_time() -> None:
    ceiling = Ceiling()
    parts = [sum(ceiling.asked(keys(20_000 * part + 1000 * i, 1000)) for i in range(20)) for part in range(5)]
    assert all(abs(new - 20_000) < 2_500 for new in parts)


def test_the_count_goes_on_after_a_restart_and_starts_anew_when_its_file_is_damaged(tmp_path: Path) -> None:
    one = Ceiling()
    one.asked(keys(0, 10_000))
    one.save(tmp_path / "ceiling")
    other = Ceiling()
    other.load(tmp_path / "ceiling")
    assert other.asked(keys(0, 10_000)) == 0
    damaged = bytearray((tmp_path / "ceiling").read_bytes())
    damaged[500] ^= 1
    (tmp_path / "ceiling").write_bytes(damaged)
    third = Ceiling()
    third.load(tmp_path / "ceiling")
    assert third.asked(keys(0, 10_000)) > 9_000


def test_reuse_distances_are_near_the_true_ones() -> None:
    reuse = ReuseDistances()
    for _ in range(3):
        for first in range(0, 100_000, 1000):
            reuse.asked(keys(first, 1000))
    counts = reuse.counts()
    assert set(counts) <= {bucket(REUSES, 60_000), bucket(REUSES, 100_000), bucket(REUSES, 140_000)}
    assert abs(sum(counts.values()) - 200_000) < 20_000


def test_reuse_within_a_prompt_counts_tail_first() -> None:
    reuse = ReuseDistances()
    prompt = keys(0, 6400)
    reuse.asked(prompt)
    reuse.asked(prompt)
    # The tail was touched first, so all others lie between; the second time each block has moved up one after another.
    assert set(reuse.counts()) == {bucket(REUSES, 64 * (sum(k < 4 for k in prompt[15::16]) - 1))}
