"""Counts a recording again, from its events alone: what the daemon itself counted must come out.

What is stored is followed from ``stored`` and ``dropped`` events, so the length of every match and the reason of every
miss are found anew; what became of a match (loaded blocks, tiers, failures) is what the ``end`` events say.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

from cachesvc.accounting import Accounting, Pass, RowKey
from cachesvc.ghosts import Ghosts
from cachesvc.index.table import block_id
from cachesvc.keys import KEY_BYTES as CHAIN_KEY_BYTES
from cachesvc.limits import MAX_SHARDS
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.trace.recorder import KEY_BYTES

_REASONS: Final = frozenset(MissReason.keys())


class NotRecorded(Exception):
    """An event that no daemon has written: a trace that was made otherwise does not say what became of a request."""


class Recount:
    def __init__(self) -> None:
        self.accounting = Accounting()
        self.lost = 0
        """Events that the recording lacks: if there are any, the counts are not exact."""
        self.whole = True
        """Whether it tells from its beginning on what is stored."""
        self.asked = 0
        """Look-ups, and tokens of those that could not ask."""
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
                    tiers, loaded = base64.b64decode(event["tiers"]), _number(event, "loaded")
                    if len(tiers) * opened.block_tokens > opened.counts["input"]:
                        raise ValueError(f"tiers of {len(tiers)} blocks, for {opened.counts['input']} tokens")
                    self.accounting.settle(opened, tiers, loaded, _reason(event))
            case "unreachable":
                self.asked += _number(event, "tokens")
                self.accounting.unreachable(_row(event), event["tokens"])
            case "stored":
                shard, keys = _number(event, "shard", MAX_SHARDS), _keys(event)
                self._stored.update((shard, key) for key in keys)
                self._ghosts.forget([_ghost(shard, key) for key in keys])
            case "dropped":
                shard, keys = _number(event, "shard", MAX_SHARDS), _keys(event)
                self._stored.difference_update((shard, key) for key in keys)
                self._ghosts.remember([_ghost(shard, key) for key in keys], _reason(event))
            case "boot":
                self._boot()
            case "lost":
                self.lost += _number(event, "count")

    def _boot(self) -> None:
        self._stored: set[tuple[int, bytes]] = set()
        self._ghosts = Ghosts()
        self._passes: dict[int, Pass] = {}

    def _ask(self, event: Mapping[str, Any]) -> None:
        if "shards" not in event:
            raise NotRecorded("a daemon says of how many shards a request was")
        shards, checkpoints = _number(event, "shards", MAX_SHARDS), 0
        if "checkpoints" in event:
            checkpoints = _number(event, "checkpoints", shards - 1)
        keys = _keys(event)
        self.asked += 1
        matched, reason = len(keys), MissReason.MISS_REASON_UNSPECIFIED
        prefixes = shards - checkpoints
        for shard in range(prefixes):
            missing = next((i for i, key in enumerate(keys[:matched]) if (shard, key) not in self._stored), None)
            if missing is not None:
                matched, reason = missing, self._ghosts.reason(_ghost(shard, keys[missing]))
        stored = matched
        while prefixes < shards and matched:
            behind = range(prefixes, shards)
            absent = next((shard for shard in behind if (shard, keys[matched - 1]) not in self._stored), None)
            if absent is None:
                break
            if matched == stored:
                reason = self._ghosts.reason(_ghost(absent, keys[matched - 1]))
            matched -= 1
        self._passes[event["pass"]] = self.accounting.open(
            bytes.fromhex(event["id"]),
            _row(event),
            block_tokens=_number(event, "block"),
            input_tokens=_number(event, "input"),
            local_tokens=_number(event, "local", event["input"]),
            asked_blocks=len(keys),
            matched_blocks=matched,
            reason=reason,
        )


def _keys(event: Mapping[str, Any]) -> list[bytes]:
    packed = base64.b64decode(event["keys"], validate=True)
    if len(packed) % KEY_BYTES:
        raise ValueError(f"{len(packed)} bytes of keys, not a multiple of {KEY_BYTES}")
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


def _ghost(shard: int, key: bytes) -> bytes:
    return block_id(key.ljust(CHAIN_KEY_BYTES, b"\0"), shard)


def _row(event: Mapping[str, Any]) -> RowKey:
    names = event["class"], event["model"], event["tenant"]
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"class, model and tenant must be texts: {names}")
    return RowKey(*names)


def _number(event: Mapping[str, Any], name: str, most: int = 1 << 40) -> int:
    value = event[name]
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{name} is {value!r}; it must be a whole number up to {most}")
    return value


def _reason(event: Mapping[str, Any]) -> MissReason.ValueType:
    name = str(event["reason"]).upper()
    if name not in _REASONS:
        raise ValueError(f"reason is {event['reason']!r}")
    return MissReason.Value(name)
