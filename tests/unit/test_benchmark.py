"""What benchmarks say about what they measured."""

from __future__ import annotations

import pytest

from cachesvc.benchmark.buffers import Blocks, copy_all
from cachesvc.benchmark.harness import Baseline, Result, Run, Side, interleaved, percentile
from cachesvc.benchmark.suite import SIZES, shape_of
from cachesvc.benchmark.table import filled_in, markdown, rows


def result(value: float, baseline: float | None, target: float | None, *, at_most: bool = False) -> Result:
    other = None if baseline is None else Baseline("memcpy", baseline)
    return Result("get", {"blocks": 5}, value, (value, value), "GB/s", other, target, at_most)


@pytest.mark.parametrize(
    ("measured", "passes"),
    [
        (result(9.0, 10.0, 0.9), True),
        (result(8.9, 10.0, 0.9), False),
        (result(200.0, None, 180.0), True),
        (result(9.0, None, 10.0, at_most=True), True),
        (result(11.0, None, 10.0, at_most=True), False),
        (result(13.0, 10.0, 1.2, at_most=True), False),
        (result(1.0, 2.0, None), None),
    ],
)
def test_a_target_speaks_of_the_ratio_or_else_of_the_value(measured: Result, passes: bool | None) -> None:
    assert measured.passes is passes
    assert measured.to_json()["pass"] is passes


def test_sides_take_turns_and_only_what_counts_is_counted() -> None:
    order: list[str] = []

    def side(name: str, seconds: float) -> Side:
        def run() -> float:
            order.append(name)
            return seconds

        return Side(name, run, lambda: order.append("before"), lambda: order.append("after"))

    times = interleaved([side("a", 1.0), side("b", 4.0)], repeats=2, warmups=1)
    assert order == ["before", "a", "after", "before", "b", "after"] * 3
    assert {name: taken.seconds for name, taken in times.items()} == {"a": [1.0, 1.0], "b": [4.0, 4.0]}
    assert times["b"].rate(8.0) == (2.0, (2.0, 2.0))


def test_percentiles() -> None:
    values = [float(i) for i in range(100)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([7.0], 0.99)) == (50.0, 99.0, 7.0)


def test_each_repeat_moves_about_what_was_asked() -> None:
    for size in SIZES:
        for total in (1, 1 << 20, 64 << 20, 256 << 20):
            shape = shape_of(size, total)
            assert 0 < shape.total <= max(size, total) and 2 * shape.total >= total


def test_blocks_are_copied_whole() -> None:
    source, target = Blocks(5000, 3), Blocks(5000, 3)
    source.fill(1)
    copy_all(target, source)
    assert [bytes(view) for view in target.views] == [bytes(view) for view in source.views]
    assert len({bytes(view) for view in source.views}) == 3


def test_a_table_replaces_the_one_before_it() -> None:
    run = Run("a benchmark", {}, [result(9.0, 10.0, 0.9)], {"c": "it is not here"}).to_json()
    assert list(rows(run)) == [("get", "blocks 5", "9 GB/s", "9 – 9", "memcpy 10", "0.90", "≥ 0.9", "yes")]
    text = "above\n<!-- a benchmark -->\nold\n<!-- /a benchmark -->\nbelow\n"
    once = filled_in(text, run)
    assert markdown(run) in once and "old" not in once and "c: it is not here" in once
    assert filled_in(once, run) == once
    assert once.startswith("above\n") and once.endswith("below\n")
    with pytest.raises(ValueError, match="a benchmark"):
        filled_in("nothing", run)
