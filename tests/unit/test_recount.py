"""A recording whose first files are gone: what is counted of the rest."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from cachesvc.accounting import MISS, by_prefix
from cachesvc.trace.recorder import KEY_BYTES
from cachesvc.trace.recount import Recount


def ask(blocks: int, tail: int = 5, local: int = 0) -> dict[str, Any]:
    keys = base64.b64encode(bytes(range(1, KEY_BYTES + 1)) * blocks).decode()
    names = {"class": "agent", "model": "m", "tenant": ""}
    sizes = {"block": 128, "input": 128 * blocks + tail, "local": local, "shards": 1}
    return {"event": "ask", "pass": 1, "id": "", "keys": keys} | names | sizes


def end(tiers: int, loaded: int) -> dict[str, Any]:
    packed = base64.b64encode(bytes([1]) * tiers).decode()
    return {"event": "end", "pass": 1, "tiers": packed, "loaded": loaded, "reason": "bypassed"}


@pytest.mark.parametrize("local", [0, 130])
def test_what_was_stored_before_the_recording_hits_and_nothing_is_less_than_none(local: int) -> None:
    recount = Recount()
    recount.add(ask(10, local=local))
    recount.add(end(8, 8))
    assert not recount.whole
    ((_, row),) = recount.accounting.rows()
    assert by_prefix(row.items(), MISS) == {"never_seen": 2 * 128, "partial_tail": 5}
    assert row["hit.dram"] == 8 * 128 - local
    assert row["input"] == 10 * 128 + 5 == local + row["hit.dram"] + 2 * 128 + 5 and not row["pending"]
    assert min(row.values()) >= 0


def test_an_end_that_says_more_than_was_asked_is_malformed() -> None:
    recount = Recount()
    recount.add(ask(2))
    with pytest.raises(ValueError, match="tiers of 4 blocks, for 261 tokens"):
        recount.add(end(4, 4))
