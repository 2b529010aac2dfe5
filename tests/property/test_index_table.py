"""The table of blocks on disk, beside a dict: what is inserted, replaced, removed and freed is what is found."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.index import hashes
from cachesvc.index.hashes import KeyIndex, Words
from cachesvc.index.rows import NO_CLASS, Rows

UNIVERSE = np.random.default_rng(1).integers(0, 2**64, (20_000, 2), np.uint64)
ALIKE = np.zeros((20_000, 2), np.uint64)  # keys that are anything but random
ALIKE[:, 1] = np.arange(20_000)

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append", "drop", "free"]),
        st.integers(0, len(UNIVERSE) - 1),
        st.integers(1, 2_500),
        st.sampled_from([0, 0, 3]),
    ),
    max_size=12,
)


class Model:
    """Each block's row, and the rows of each segment."""

    def __init__(self, keys: Words) -> None:
        self.keys = keys
        self.rows = Rows(1 << 17)
        self.index = KeyIndex(self.rows)
        self.expected: dict[tuple[int, int], int] = {}
        self.segments: dict[int, list[int]] = {}
        self.numbers = itertools.count(1)

    def append(self, first: int, count: int, shard: int) -> None:
        # Every third key twice, as in a segment that got a block again after it had been dropped.
        some = (first + np.arange(count) * 2 // 3) % len(self.keys)
        segment = next(self.numbers)
        done = 0
        while done < count:  # as a writer does: part by part
            part = some[done : done + 700]
            rows = self.rows.append(segment, len(part))
            self.rows.keys[rows] = self.keys[part]
            self.rows.shards[rows] = shard
            self.rows.classes[rows] = 0
            gone = self.index.insert(rows)
            expected_gone = []
            for number, row in zip(part.tolist(), rows.tolist(), strict=True):
                if (number, shard) in self.expected:
                    expected_gone.append(self.expected[number, shard])
                self.expected[number, shard] = row
            assert sorted(gone.tolist()) == sorted(expected_gone)
            done += len(part)
        self.segments[segment] = self.rows.of(segment).tolist()
        assert len(self.segments[segment]) == count
        numbers, records = self.rows.place(self.rows.of(segment))
        assert (numbers == segment).all() and records.tolist() == list(range(count))

    def drop(self, first: int, count: int, shard: int) -> None:
        blocks = [(n, shard) for n in range(first, min(first + count, len(self.keys)))]
        rows = [self.expected.pop(block) for block in blocks if block in self.expected]
        self.index.remove(np.array(rows, np.int64))
        self.index.remove(np.array(rows[:5], np.int64))  # again: nothing happens

    def free(self, first: int, count: int, shard: int) -> None:
        del count, shard
        if not self.segments:
            return
        segment = sorted(self.segments)[first % len(self.segments)]
        rows = set(self.segments.pop(segment))
        self.index.remove(self.rows.of(segment))
        self.rows.free(segment)
        assert (self.rows.classes[list(rows)] == NO_CLASS).all()
        self.expected = {block: row for block, row in self.expected.items() if row not in rows}

    def check(self) -> None:
        assert len(self.index) == len(self.expected)
        for shard in (0, 1, 2, 3):
            found = self.index.find(self.keys, shard).tolist()
            assert found == [self.expected.get((number, shard), -1) for number in range(len(self.keys))]


def play(keys: Words, steps: list[Any]) -> Model:
    model = Model(keys)
    for name, first, count, shard in steps:
        getattr(model, name)(first, count, shard)
    model.check()
    return model


@given(STEPS)
@settings(max_examples=25, deadline=None)
def test_the_table_finds_what_a_dict_finds(steps: list[Any]) -> None:
    play(UNIVERSE, steps)


@given(STEPS)
@settings(max_examples=10, deadline=None)
def test_keys_need_not_be_random(steps: list[Any]) -> None:
    play(ALIKE, steps)


@given(STEPS)
@settings(max_examples=10, deadline=None)
def test_a_table_that_cannot_grow_keeps_the_rest_beside_it(steps: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashes, "_MAX_DEPTH", 1)
        play(UNIVERSE, steps)


def test_it_grows_to_many_pages_and_stays_small() -> None:
    model = Model(UNIVERSE)
    for first in range(0, 60_000, 5_000):
        model.append(first % 20_000, 7_500, first // 20_000)
        used = (model.rows.nbytes + model.index.nbytes) / len(model.rows.of(1)) / len(model.segments)
        assert first < 20_000 or used < 64
    model.check()
    assert model.index._pages > 16 and not model.index._spilled


def test_a_full_table_says_so() -> None:
    rows = Rows(128)
    rows.append(1, 65)
    assert rows.room == 0
    with pytest.raises(MemoryError, match="full at 128 blocks"):
        rows.append(2, 1)
    rows.free(1)
    assert rows.room == 128 and len(rows.append(2, 128)) == 128


def test_tags_are_never_trusted() -> None:
    """With hashes that are all alike every look-up meets every block: the keys decide."""
    rows = Rows(1 << 10)
    index = KeyIndex(rows)
    index._factors[:] = 0
    some = rows.append(1, 40)
    rows.keys[some] = UNIVERSE[:40]
    index.insert(some)
    assert index.find(UNIVERSE[:40], 0).tolist() == some.tolist()
    assert (index.find(UNIVERSE[40:60], 0) == -1).all()
    assert (index.find(UNIVERSE[:40], 1) == -1).all()
    index.remove(some[10:20])
    assert index.find(UNIVERSE[:40], 0).tolist() == [r if not 10 <= i < 20 else -1 for i, r in enumerate(some.tolist())]
