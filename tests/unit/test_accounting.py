"""Hits and misses always sum to the input, each pass counts once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cachesvc.accounting import HIT, MISS, UNCOUNTED, Accounting, Pass, Row, RowKey, by_prefix
from cachesvc.clock import ManualClock
from cachesvc.histograms import DEPTHS, bucket
from cachesvc.limits import CLOSE_SECONDS, CLOSE_TIMED_OUT_SECONDS, HOUSEKEEPING_SECONDS, KEEP_SECONDS
from cachesvc.rpc.cache_pb2 import MissReason, Tier

KEY = RowKey("agent", "m")


def opened(accounting: Accounting, pass_id: bytes = b"", **changes: Any) -> Pass:
    fields: dict[str, Any] = {
        "block_tokens": 128,
        "input_tokens": 1000,
        "local_tokens": 0,
        "asked_blocks": 7,
        "matched_blocks": 5,
        "reason": MissReason.NEVER_SEEN,
    }
    return accounting.open(pass_id, KEY, **(fields | changes))


def only_row(accounting: Accounting) -> Row:
    ((key, row),) = accounting.rows()
    assert key == KEY
    return row


def hits(row: Row) -> dict[str, int]:
    return by_prefix(row.items(), HIT)


def misses(row: Row) -> dict[str, int]:
    return by_prefix(row.items(), MISS)


def test_a_pass_that_loads_everything() -> None:
    accounting = Accounting()
    accounting.settle(opened(accounting), bytes([Tier.TIER_DISK] * 5), 5, MissReason.BYPASSED)
    row = only_row(accounting)
    assert (hits(row), row["pending"]) == ({"disk": 640}, 0)
    assert misses(row) == {"never_seen": 256, "partial_tail": 104}
    assert by_prefix(row.items(), "depth.") == {str(bucket(DEPTHS, 640)): 1}


def test_a_pass_that_loads_half_counts_the_rest_under_its_reason_and_only_once() -> None:
    accounting = Accounting()
    one = opened(accounting)
    assert only_row(accounting)["pending"] == 640
    for reason in (MissReason.CORRUPT, MissReason.TIMED_OUT):
        accounting.settle(one, bytes([Tier.TIER_DRAM] * 2 + [Tier.TIER_DISK] * 3), 3, reason)
    row = only_row(accounting)
    assert hits(row) == {"dram": 256, "disk": 128}
    assert misses(row) == {"never_seen": 256, "partial_tail": 104, "corrupt": 256}


def test_what_the_engine_held_itself_is_neither_hit_nor_miss() -> None:
    accounting = Accounting()
    accounting.settle(opened(accounting, local_tokens=200), bytes([Tier.TIER_DISK] * 5), 5, MissReason.BYPASSED)
    row = only_row(accounting)
    assert (row["local"], hits(row)) == (200, {"disk": 440})


def test_a_pass_that_asks_again_counts_once() -> None:
    accounting = Accounting()
    first = opened(accounting, b"p" * 16)
    accounting.settle(first, bytes([Tier.TIER_DISK] * 5), 5, MissReason.BYPASSED)
    second = opened(accounting, b"p" * 16, matched_blocks=2, reason=MissReason.EVICTED)
    accounting.settle(first, bytes([Tier.TIER_DISK] * 5), 5, MissReason.BYPASSED)
    accounting.settle(second, bytes([Tier.TIER_DISK] * 2), 2, MissReason.BYPASSED)
    row = only_row(accounting)
    assert (row["passes"], row["input"], hits(row)) == (1, 1000, {"disk": 256})
    assert misses(row) == {"evicted": 640, "partial_tail": 104}
    assert sum(by_prefix(row.items(), "depth.").values()) == 1


def test_the_age_of_hits_counts_only_what_was_loaded_and_not_held_by_the_engine() -> None:
    accounting = Accounting()
    one = opened(accounting, local_tokens=128)
    one.ages = [(3, 2), (1, 3)]
    accounting.settle(one, bytes([Tier.TIER_DRAM] * 5), 4, MissReason.TIMED_OUT)
    assert by_prefix(only_row(accounting).items(), "age.") == {"1": 256, "3": 128}


def test_closed_counts_never_fall_and_a_pass_that_asks_again_late_stays_as_it_was() -> None:
    clock = ManualClock()
    accounting = Accounting(clock)

    def closed() -> Row:
        accounting.close()
        return dict(accounting.closed_rows()).get(KEY, Row())

    first = opened(accounting, b"p" * 16, matched_blocks=0)
    accounting.note_new(first, 896)
    accounting.settle(first, b"", 0, MissReason.BYPASSED)
    assert not closed()
    second = opened(accounting, b"p" * 16)  # at once: it replaces the first
    accounting.settle(second, bytes([Tier.TIER_DISK] * 5), 5, MissReason.BYPASSED)
    clock.advance(60)
    row = closed()
    assert (row["passes"], row["input"], row["new"], hits(row)) == (1, 1000, 896, {"disk": 640})
    late = opened(accounting, b"p" * 16, matched_blocks=0)
    accounting.settle(late, b"", 0, MissReason.BYPASSED)
    clock.advance(60)
    assert late.number == UNCOUNTED and closed() == row == only_row(accounting)


def test_a_pass_that_timed_out_is_waited_for_longer() -> None:
    """Its engine may have had no room for it, and may still ask."""
    clock = ManualClock()
    accounting = Accounting(clock)
    waits = opened(accounting, b"p" * 16)
    accounting.settle(waits, bytes([Tier.TIER_DISK] * 5), 0, MissReason.TIMED_OUT)
    other = opened(accounting, b"q" * 16)
    accounting.settle(other, bytes([Tier.TIER_DISK] * 5), 0, MissReason.BYPASSED)
    clock.advance(CLOSE_SECONDS + 1)
    accounting.close()
    assert misses(dict(accounting.closed_rows())[KEY]) == misses(other.counts)
    again = opened(accounting, b"p" * 16)
    accounting.settle(again, bytes([Tier.TIER_DISK] * 5), 5, MissReason.BYPASSED)
    clock.advance(CLOSE_TIMED_OUT_SECONDS + 1)
    accounting.close()
    row = dict(accounting.closed_rows())[KEY]
    assert (row["passes"], row["input"], hits(row)) == (2, 2000, {"disk": 640})


def test_both_waits_and_a_kill_lose_less_than_a_minute() -> None:
    assert max(CLOSE_SECONDS, CLOSE_TIMED_OUT_SECONDS) + KEEP_SECONDS + HOUSEKEEPING_SECONDS < 60


def test_a_pass_is_closed_whole() -> None:
    """Its input and its hits are counted in the same minute, however long it took."""
    clock = ManualClock()
    accounting = Accounting(clock)
    one = opened(accounting)
    clock.advance(300)
    accounting.close()
    assert not +dict(accounting.closed_rows())[KEY]
    accounting.settle(one, bytes([Tier.TIER_DISK] * 5), 5, MissReason.BYPASSED)
    accounting.close(all_settled=True)
    row = dict(accounting.closed_rows())[KEY]
    assert (row["input"], row["pending"], hits(row)) == (1000, 0, {"disk": 640})


def test_models_past_the_limit_are_counted_together() -> None:
    accounting = Accounting()
    for number in range(1100):
        accounting.unreachable(RowKey("agent", f"m{number}"), 10)
    rows = accounting.rows()
    assert len(rows) == 1025
    assert {key.model: row["input"] for key, row in rows}["other"] == 760


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
    for _, row in accounting.rows():
        assert row["input"] == row["local"] + row["pending"] + sum(hits(row).values()) + sum(misses(row).values())
        assert min(row.values()) >= 0
        assert row["passes"] == len({identity for identity, *_ in passes})


def test_a_pass_of_another_rank_is_not_counted() -> None:
    accounting = Accounting()
    opened(accounting)
    accounting.settle(opened(accounting, counted=False), bytes([Tier.TIER_DRAM] * 5), 5, MissReason.BYPASSED)
    row = only_row(accounting)
    assert (row["passes"], row["input"], row["pending"], hits(row)) == (1, 1000, 640, {})
