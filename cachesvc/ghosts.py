"""A bounded memory of dropped keys with the reason, so that a miss can be explained."""

from __future__ import annotations

from collections import OrderedDict

from cachesvc.limits import MAX_GHOSTS
from cachesvc.rpc.cache_pb2 import MissReason


class Ghosts:
    """Not thread-safe: the store's lock covers it."""

    def __init__(self, limit: int = MAX_GHOSTS) -> None:
        self._limit = limit
        self._reasons: OrderedDict[bytes, MissReason.ValueType] = OrderedDict()

    def remember(self, key: bytes, reason: MissReason.ValueType) -> None:
        self._reasons[key] = reason
        self._reasons.move_to_end(key)
        if len(self._reasons) > self._limit:
            self._reasons.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """The key is stored again."""
        if key in self._reasons:
            del self._reasons[key]

    def reason(self, key: bytes) -> MissReason.ValueType:
        return self._reasons.get(key, MissReason.NEVER_SEEN)
