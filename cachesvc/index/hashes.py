"""From block to row: a hash table of 8 bytes a slot that thousands of keys go through by a few calls.

Buckets of eight slots, one cache line each; a slot is a row number plus one (0: empty) and a 32-bit tag. A block lies
in its first bucket, or in its second if that was full when it came; if both are, one of those in the way moves to its
own other bucket (cuckoo hashing). The two differ by a few bits of the tag, so that a slot alone tells where else it may
be. What a tag says is never trusted: the key of the row is compared.

Buckets form pages of 512. A page that is nearly full gives half of its slots to a new one, chosen by the next bit of
the tag (extendible hashing): the table grows by 32 KiB at a time, and no look-up waits for more than that. Hashes are
random linear ones, so that keys need not be random, and nobody can choose keys that collide.
"""

from __future__ import annotations

import secrets
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cachesvc.index.rows import Numbers, Rows, reserved

Words = NDArray[np.uint64]
"""Keys, two words each: shape [n, 2]."""
Shard = int | NDArray[np.uint16]
"""Of all keys, or of each."""

_SLOTS: Final = 8
_BUCKETS: Final = 512  # of a page
_FULL: Final = int(0.75 * _SLOTS * _BUCKETS)  # slots in use at which a page is split
_MAX_DEPTH: Final = 20
_SHIFTS: Final = np.array([55, 32], np.uint64)
_AT_ONCE: Final = 1_024  # keys looked up, so that what is read of them stays in the processor's cache
_INSERTED: Final = 4_096  # rows inserted at once


class KeyIndex:
    """Not thread-safe: the catalog's lock covers it. Has room for as many keys as `rows` has rows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._factors: NDArray[np.uint64] = np.frombuffer(secrets.token_bytes(48), np.uint64).reshape(3, 2) | np.uint64(
            1
        )
        self._max_pages = max(4, 4 * rows.limit // (_BUCKETS * _SLOTS))
        self._buckets: NDArray[np.uint32] = reserved(self._max_pages * _BUCKETS * 2 * _SLOTS, np.uint32).reshape(
            -1, 2 * _SLOTS
        )
        self._slots = self._buckets.reshape(-1, 2)
        self._pages = 1
        self._fill: NDArray[np.int64] = np.zeros(self._max_pages, np.int64)
        """Slots in use, by page."""
        self._claims: NDArray[np.uint32] = reserved(len(self._buckets), np.uint32)
        """Which of the rows that are being inserted has a bucket to itself, this time."""
        self._depths = [0]
        """Bits of the tag that all slots of a page share, and those bits."""
        self._prefixes = [0]
        self._depth = 0
        self._directory: NDArray[np.int64] = np.zeros(1, np.int64)
        """First bucket of the page, by the first `_depth` bits of the tag."""
        self._spilled: dict[tuple[int, int, int], int] = {}
        """What finds no slot (two words and shard → row): next to nothing."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._pages * (self._buckets[:_BUCKETS].nbytes + 4 * _BUCKETS + 100) + self._directory.nbytes

    def find(self, words: Words, shard: Shard) -> Numbers:
        """The row of each key, -1 where it is not there."""
        if len(words) <= _AT_ONCE:
            return self._find(words, shard)
        return np.concatenate([self._find(words[part], _of(shard, part)) for part in _parts(len(words))])

    def insert(self, rows: Numbers, newest: NDArray[np.float64] | None = None) -> Numbers:
        """Makes rows findable by their keys. Of those with one key the last wins, or, if it has less in `newest`
        (by row), the one that was there. Returns the rows that are not found any more."""
        replaced: list[Numbers] = []
        for start in range(0, len(rows), _INSERTED):
            left = rows[start : start + _INSERTED]
            while len(left):
                left = self._insert(left, replaced, newest)
        return np.concatenate(replaced) if replaced else np.empty(0, np.int64)

    def remove(self, rows: Numbers) -> None:
        """These rows are not found any more; those that are not there are left alone."""
        for part in _parts(len(rows)):
            some = rows[part]
            buckets, _ = self._places(self._rows.keys[some], self._rows.shards[some])
            content = self._buckets.take(buckets, axis=0)
            hits = np.flatnonzero(content[:, :, 0::2] == (some + 1).astype(np.uint32)[:, None, None])
            at = buckets.reshape(-1)[hits >> 3]
            self._buckets[at, 2 * (hits & 7)] = 0
            self._count -= len(hits)
            self._fill[: self._pages] -= np.bincount(at // _BUCKETS, minlength=self._pages)
            if self._spilled:
                for row in some.tolist():
                    if self._spilled.get(key := self._spill_key(row)) == row:
                        del self._spilled[key]
                        self._count -= 1

    # ---- inside --------------------------------------------------------------------------------------------------

    def _places(self, words: Words, shard: Shard) -> tuple[Numbers, Numbers]:
        """Both buckets of each key [n, 2], and its tag."""
        mixed = words @ self._factors[:2]
        if isinstance(shard, np.ndarray):
            mixed += shard[:, None] * self._factors[2]
        elif shard:
            mixed += np.uint64(shard) * self._factors[2]
        hashes = (mixed >> _SHIFTS).view(np.int64)
        bucket, tags = hashes[:, 0], hashes[:, 1]
        home = self._directory.take(tags >> (32 - self._depth))
        both = np.empty((len(words), 2), np.int64)
        np.add(home, bucket, out=both[:, 0])
        np.add(home, bucket ^ _step(tags), out=both[:, 1])
        return both, tags

    def _find(self, words: Words, shard: Shard) -> Numbers:
        buckets, tags = self._places(words, shard)
        return self._look(self._buckets.take(buckets, axis=0), tags, words, shard)

    def _look(self, content: NDArray[np.uint32], tags: Numbers, words: Words, shard: Shard) -> Numbers:
        """The rows of keys whose buckets have this content [n, 2, 16]."""
        hits = np.flatnonzero(content[:, :, 1::2] == tags.astype(np.uint32)[:, None, None])
        key = hits >> 4
        found = content.reshape(-1)[::2][hits].astype(np.int64) - 1
        same = (self._rows.keys.take(found, axis=0, mode="wrap") == words.take(key, axis=0)).all(axis=1)
        same &= self._rows.shards.take(found, mode="wrap") == _of(shard, key)
        same &= found >= 0
        rows = np.full(len(words), -1, np.int64)
        if not same.all():
            key, found = key[same], found[same]
        rows[key] = found
        if self._spilled:
            for i in np.flatnonzero(rows < 0).tolist():
                one, other = words[i].tolist()
                number = int(shard[i]) if isinstance(shard, np.ndarray) else shard
                rows[i] = self._spilled.get((one, other, number), -1)
        return rows

    def _insert(self, rows: Numbers, replaced: list[Numbers], newest: NDArray[np.float64] | None) -> Numbers:
        """Inserts as many as can be at once, at least one; the rest."""
        words, shards = self._rows.keys[rows], self._rows.shards[rows]
        buckets, tags = self._places(words, shards)
        content = self._buckets.take(buckets, axis=0)
        known = self._look(content, tags, words, shards)
        free = (content[:, :, 0::2] == 0).reshape(len(rows), -1)
        column = free.argmax(axis=1)
        target = np.where(known < 0, buckets.reshape(-1)[2 * np.arange(len(rows)) + (column >> 3)], buckets[:, 0])
        # One a round goes into a bucket: no free slot is given twice, and equal keys (which have one target) meet.
        numbers = np.arange(len(rows), dtype=np.uint32)
        self._claims[target[::-1]] = numbers[::-1]  # the first stays
        chosen = np.flatnonzero(self._claims[target] == numbers)
        old = chosen[known[chosen] >= 0]
        if len(old):
            before, now = known[old], rows[old]
            wins = np.ones(len(old), np.bool_) if newest is None else newest[before] <= newest[now]
            replaced.append(np.where(wins, before, now))
            self._replace(before[wins], now[wins])
        new = chosen[known[chosen] < 0]
        has = free[new, column[new]]
        fit, stuck = new[has], new[~has]
        at = target[fit]
        slot = at * _SLOTS + (column[fit] & 7)
        self._slots[slot, 0] = rows[fit] + 1
        self._slots[slot, 1] = tags[fit]
        self._count += len(fit)
        for i in stuck.tolist():
            self._force(int(rows[i]), buckets[i].tolist(), int(tags[i]))
        added = np.bincount(at // _BUCKETS, minlength=self._pages)
        self._fill[: self._pages] += added
        for page in np.flatnonzero((added > 0) & (self._fill[: self._pages] > _FULL)).tolist():
            self._split(page)
        if len(chosen) == len(rows):
            return rows[:0]
        left = np.ones(len(rows), np.bool_)
        left[chosen] = False
        return rows[left]

    def _replace(self, old: Numbers, new: Numbers) -> None:
        """Rows whose keys are equal change places."""
        buckets, _ = self._places(self._rows.keys[old], self._rows.shards[old])
        content = self._buckets.take(buckets, axis=0)
        hits = np.flatnonzero(content[:, :, 0::2] == (old + 1).astype(np.uint32)[:, None, None])
        self._buckets[buckets.reshape(-1)[hits >> 3], 2 * (hits & 7)] = new[hits >> 4] + 1
        if self._spilled:
            for row in new.tolist():
                key = self._spill_key(row)
                if key in self._spilled:
                    self._spilled[key] = row

    def _force(self, row: int, buckets: list[int], tag: int) -> None:
        """Makes room by moving one block to its other bucket; if none can, the new one is kept beside the table."""
        self._count += 1
        for bucket in buckets:
            content = self._buckets[bucket]
            others = (bucket & -_BUCKETS) + ((bucket & (_BUCKETS - 1)) ^ _step(content[1::2].astype(np.int64)))
            free = self._buckets[others, 0::2] == 0
            if content[0::2].all():
                movable = np.flatnonzero(free.any(axis=1))
                if not len(movable):
                    continue
                slot = int(movable[0])
                into = 2 * int(free[slot].argmax())
                self._buckets[others[slot], into : into + 2] = content[2 * slot : 2 * slot + 2]
            else:  # one that was forced in this round has made room
                slot = int((content[0::2] == 0).argmax())
            content[2 * slot], content[2 * slot + 1] = row + 1, tag
            self._fill[bucket // _BUCKETS] += 1
            return
        self._spilled[self._spill_key(row)] = row

    def _split(self, page: int) -> None:
        """Gives the slots whose next tag bit is 1 to a new page, each at the same place."""
        depth = self._depths[page]
        new = self._pages
        if depth >= _MAX_DEPTH or new >= self._max_pages:
            return
        if depth == self._depth:
            self._directory = np.repeat(self._directory, 2)
            self._depth += 1
        old_part = self._slots[page * _BUCKETS * _SLOTS :][: _BUCKETS * _SLOTS]
        new_part = self._slots[new * _BUCKETS * _SLOTS :][: _BUCKETS * _SLOTS]
        moving = (old_part[:, 1] >> np.uint32(31 - depth)) & np.uint32(1) == 1
        new_part[moving] = old_part[moving]
        old_part[moving] = 0
        self._pages += 1
        self._fill[new] = np.count_nonzero(new_part[:, 0])
        self._fill[page] -= self._fill[new]
        prefix = 2 * self._prefixes[page]
        self._prefixes[page] = prefix
        self._prefixes.append(prefix + 1)
        self._depths[page] = depth + 1
        self._depths.append(depth + 1)
        width = 1 << (self._depth - depth - 1)
        self._directory[(prefix + 1) * width : (prefix + 2) * width] = new * _BUCKETS

    def _spill_key(self, row: int) -> tuple[int, int, int]:
        one, other = self._rows.keys[row].tolist()
        return one, other, int(self._rows.shards[row])


def _step(tags: Numbers) -> Numbers:
    """How the numbers of a slot's two buckets differ; never 0."""
    return (tags & (_BUCKETS - 1)) | 1


def _parts(count: int) -> list[slice]:
    return [slice(start, start + _AT_ONCE) for start in range(0, count, _AT_ONCE)]


def _of(shard: Shard, part: slice | Numbers) -> Shard:
    return shard[part] if isinstance(shard, np.ndarray) else shard
