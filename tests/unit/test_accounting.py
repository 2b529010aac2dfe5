"""Hits and misses always sum to the input, each pass counts once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cachesvc.accounting import Accounting, Pass
from cachesvc.rpc.cache_pb2 import MissReason, Tier


def opened(accounting: Accounting, pass_id: bytes = b"", **changes: Any) -> Pass:
    fields: dict[str, Any] = {
        "block_tokens": 128,
        "input_tokens": 1000,
        "local_tokens": 0,
        "asked_blocks": 7,
        "matched_blocks": 5,
        "reason": MissReason.NEVER_SEEN,
    }
    return accounting.open(pass_id, "agent", "m", **(fields | changes))


def test_a_pass_that_loads_everything() -> None:
    accounting = Accounting()
    accounting.settle(opened(accounting), bytes([Tier.TIER_DISK] * 5), 5, MissReason.BYPASSED)
    ((_, _, row),) = accounting.rows()
    assert (dict(row.hits), row.pending) == ({"disk": 640}, 0)
    assert dict(row.misses) == {"never_seen": 256, "partial_tail": 104}


def test_a_pass_that_loads_half_counts_the_rest_under_its_reason_and_only_once() -> None:
    accounting = Accounting()
    one = opened(accounting)
    assert accounting.rows()[0][2].pending == 640
    for reason in (MissReason.CORRUPT, MissReason.TIMED_OUT):
        accounting.settle(one, bytes([Tier.TIER_DRAM] * 2 + [Tier.TIER_DISK] * 3), 3, reason)
    ((_, _, row),) = accounting.rows()
    assert dict(row.hits) == {"dram": 256, "disk": 128}
    assert dict(row.misses) == {"never_seen": 256, "partial_tail": 104, "corrupt": 256}


def test_what_the_engine_held_itself_is_neither_hit_nor_miss() -> None:
    accounting = Accounting()
    accounting.settle(opened(accounting, local_tokens=200), bytes([Tier.TIER_DISK] * 5), 5, MissReason.BYPASSED)
    ((_, _, row),) = accounting.rows()
    assert (row.local, dict(row.hits)) == (200, {"disk": 440})


def test_a_pass_that_asks_again_counts_once() -> None:
    accounting = Accounting()
    first = opened(accounting, b"p" * 16)
    accounting.settle(first, bytes([Tier.TIER_DISK] * 5), 5, MissReason.BYPASSED)
    second = opened(accounting, b"p" * 16, matched_blocks=2, reason=MissReason.EVICTED)
    accounting.settle(first, bytes([Tier.TIER_DISK] * 5), 5, MissReason.BYPASSED)
    accounting.settle(second, bytes([Tier.TIER_DISK] * 2), 2, MissReason.BYPASSED)
    ((_, _, row),) = accounting.rows()
    assert (row.passes, row.input, dict(row.hits)) == (1, 1000, {"disk": 256})
    assert dict(+row.misses) == {"evicted": 640, "partial_tail": 104}


def test_models_past_the_limit_are_counted_together() -> None:
    accounting = Accounting()
    for number in range(1100):
        accounting.unreachable("agent", f"m{number}", 10)
    rows = accounting.rows()
    assert len(rows) == 1025
    assert {model: row.input for _, model, row in rows}["other"] == 760


PASSES = st.tuples(
    st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.integers(0, 2000), st.integers(0, 12), st.booleans()
)


@given(st.lists(PASSES, max_size=12))
def test_the_sum_is_always_the_input(passes: list[tuple[int, int, int, int, int, bool]]) -> None:
    accounting = Accounting()
    for identity, asked, matched, local, loaded, settles in passes:
        matched = min(matched, asked)
        input_tokens = max(asked * 128 + 1, local)
        one = opened(
            accounting,
            bytes([identity]) * 16,
            input_tokens=input_tokens,
            local_tokens=local,
            asked_blocks=asked,
            matched_blocks=matched,
        )
        if settles:
            accounting.settle(one, bytes([Tier.TIER_DISK] * matched), loaded, MissReason.LOAD_ERROR)
    for _, _, row in accounting.rows():
        assert row.input == row.local + row.pending + sum(row.hits.values()) + sum(row.misses.values())
        assert min([row.pending, *row.hits.values(), *row.misses.values()]) >= 0
        assert row.passes == len({identity for identity, *_ in passes})


def test_a_pass_of_another_rank_is_not_counted() -> None:
    accounting = Accounting()
    opened(accounting)
    accounting.settle(opened(accounting, counted=False), bytes([Tier.TIER_DRAM] * 5), 5, MissReason.BYPASSED)
    ((_, _, row),) = accounting.rows()
    assert (row.passes, row.input, row.pending, dict(row.hits)) == (1, 1000, 640, {})
