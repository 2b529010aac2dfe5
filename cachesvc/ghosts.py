"""A bounded memory of dropped keys with the reason, so that a miss can be explained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachesvc.index.table import words_of
from cachesvc.limits import MAX_GHOSTS
from cachesvc.rpc.cache_pb2 import MissReason

_WAYS: Final = 8
_REASON_BITS: Final = 4
_MASK: Final = np.uint64((1 << _REASON_BITS) - 1)
# Any odd numbers; every bit of a key reaches the high bits of a product.
_FOR_SET: Final = [np.uint64(n) for n in (0x9E37_79B9_7F4A_7C15, 0xD6E8_FEB8_6659_FD93, 0xA076_1D64_78BD_642F)]
_FOR_HASH: Final = [np.uint64(n) for n in (0xE703_7ED1_A0B4_28DB, 0x8EBC_6AF0_9C88_C6E3, 0x5899_65CC_7537_4CC3)]


class Ghosts:
    """60 bits of a hash of each key, and the reason, in sets of eight. Not thread-safe: the store's lock covers it.

    Two keys may be taken for one, once in 10^17; a wrong reason is the worst of it.
    """

    def __init__(self, limit: int = MAX_GHOSTS) -> None:
        sets = 1 << max(1, (limit // _WAYS).bit_length() - 1)
        self._sets: NDArray[np.uint64] = np.zeros((sets, _WAYS), np.uint64)
        self._next: NDArray[np.uint8] = np.zeros(sets, np.uint8)
        self._shift = np.uint64(65 - sets.bit_length())
        self._count = 0

    def remember(self, identities: Sequence[bytes], reason: MissReason.ValueType) -> None:
        """Why these blocks (see `index.table.block_id`) are gone."""
        if not identities:
            return
        self.forget(identities)
        hashes, sets = self._hash(identities)
        order = np.argsort(sets, kind="stable")
        hashes, sets = hashes[order], sets[order]
        rank = np.arange(len(sets)) - np.searchsorted(sets, sets)
        self._sets[sets, (self._next[sets] + rank) % _WAYS] = hashes | np.uint64(reason)
        np.add.at(self._next, sets, 1)
        self._count += len(identities)

    def forget(self, identities: Sequence[bytes]) -> None:
        """They are stored again."""
        if not self._count or not identities:
            return
        hashes, sets = self._hash(identities)
        found, way = np.nonzero(self._sets[sets] & ~_MASK == hashes[:, None])
        self._sets[sets[found], way] = 0

    def reason(self, identity: bytes) -> MissReason.ValueType:
        hashes, sets = self._hash([identity])
        known = self._sets[sets[0]]
        known = known[(known & ~_MASK == hashes[0]) & (known != 0)]
        return MissReason.ValueType(int(known[0] & _MASK)) if len(known) else MissReason.NEVER_SEEN

    def _hash(self, identities: Sequence[bytes]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        words, shards = words_of(identities)
        shard = np.asarray(shards, np.uint64)
        a, b, c = _FOR_SET
        sets = (words[:, 0] * a + words[:, 1] * b + shard * c) >> self._shift
        a, b, c = _FOR_HASH
        return (words[:, 0] * a + words[:, 1] * b + shard * c) & ~_MASK, sets.astype(np.int64)
