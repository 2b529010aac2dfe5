"""Counts a recording again, from its events alone: what the daemon itself counted must come out.

What is stored is followed from ``stored`` and ``dropped`` events, so the length of every match and the reason of every
miss are found anew; what became of a match (loaded blocks, tiers, failures) is what the ``end`` events say.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

from cachesvc.accounting import Accounting, Pass, RowKey
from cachesvc.ghosts import Ghosts
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.trace.recorder import KEY_BYTES


class Recount:
    def __init__(self) -> None:
        self.accounting = Accounting()
        self.lost = 0
        """Events that the recording lacks: if there are any, the counts are not exact."""
        self.whole = True
        """Whether it tells from its beginning on what is stored."""
        self._begun = False
        self._boot()

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes the next event. Raises `KeyError`, `ValueError` or `TypeError` for a malformed one."""
        self.whole &= self._begun or event["event"] == "boot"
        self._begun = True
        match event["event"]:
            case "ask":
                self._ask(event)
            case "end":
                opened = self._passes.pop(event["pass"], None)
                if opened is not None:
                    reason = MissReason.Value(event["reason"].upper())
                    self.accounting.settle(opened, base64.b64decode(event["tiers"]), event["loaded"], reason)
            case "unreachable":
                self.accounting.unreachable(_row(event), event["tokens"])
            case "stored":
                for key in _keys(event):
                    self._stored.add((event["shard"], key))
                    self._ghosts.forget(_ghost(event["shard"], key))
            case "dropped":
                for key in _keys(event):
                    self._stored.discard((event["shard"], key))
                    self._ghosts.remember(_ghost(event["shard"], key), MissReason.Value(event["reason"].upper()))
            case "boot":
                self._boot()
            case "lost":
                self.lost += event["count"]

    def _boot(self) -> None:
        self._stored: set[tuple[int, bytes]] = set()
        self._ghosts = Ghosts()
        self._passes: dict[int, Pass] = {}

    def _ask(self, event: Mapping[str, Any]) -> None:
        keys = _keys(event)
        matched, reason = len(keys), MissReason.MISS_REASON_UNSPECIFIED
        prefixes = event["shards"] - event.get("checkpoints", 0)
        for shard in range(prefixes):
            missing = next((i for i, key in enumerate(keys[:matched]) if (shard, key) not in self._stored), None)
            if missing is not None:
                matched, reason = missing, self._ghosts.reason(_ghost(shard, keys[missing]))
        stored = matched
        while prefixes < event["shards"] and matched:
            behind = range(prefixes, event["shards"])
            absent = next((shard for shard in behind if (shard, keys[matched - 1]) not in self._stored), None)
            if absent is None:
                break
            if matched == stored:
                reason = self._ghosts.reason(_ghost(absent, keys[matched - 1]))
            matched -= 1
        self._passes[event["pass"]] = self.accounting.open(
            bytes.fromhex(event["id"]),
            _row(event),
            block_tokens=event["block"],
            input_tokens=event["input"],
            local_tokens=event["local"],
            asked_blocks=len(keys),
            matched_blocks=matched,
            reason=reason,
        )


def recount(events: Iterable[Mapping[str, Any]]) -> Recount:
    counted = Recount()
    for event in events:
        counted.add(event)
    return counted


def _keys(event: Mapping[str, Any]) -> list[bytes]:
    packed = base64.b64decode(event["keys"])
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


def _ghost(shard: int, key: bytes) -> bytes:
    return shard.to_bytes(2, "big") + key


def _row(event: Mapping[str, Any]) -> RowKey:
    return RowKey(event["class"], event["model"], event["tenant"])
