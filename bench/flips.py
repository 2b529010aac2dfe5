"""Single bits flipped in a store's data files: each is harmless, or a counted miss. No wrong byte is ever served.

A flip within a record is looked for by asking the store for that block: it must come as it was saved (the bit lies in
padding), or be a miss that is counted as corrupt. A flip in a header or a footer is looked for by reading the file as
an opening store does: it must give the same records, by the other copy of the header or by a scan. The bit is flipped
back before the next.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cachesvc.benchmark.harness import Result, Run
from cachesvc.classes import DEFAULT_TTLS, TrafficClasses
from cachesvc.clock import SystemClock
from cachesvc.errors import BlockUnreadable
from cachesvc.index.table import block_id
from cachesvc.record import PAGE, TRAILER_BYTES, checksum
from cachesvc.rpc.cache_pb2 import MissReason
from cachesvc.segments.format import ForeignFile, shape_of
from cachesvc.segments.recover import Found, read_segment
from cachesvc.store import Store

SIZE: Final = 3_000
BLOCKS: Final = 160
SHAPE: Final = shape_of("ab" * 32, SIZE)
CLASSES: Final = TrafficClasses(DEFAULT_TTLS)


def open_store(path: Path) -> Store:
    return Store(
        path,
        budget=1 << 30,
        segment_bytes=16 * PAGE,
        arena_bytes=4 << 20,
        slab_bytes=1 << 20,
        arena_policy="lru",
        classes=CLASSES,
        clock=SystemClock(),
        scrub_rate=0,
    )


class Flips:
    """`counts`: what became of the flips, by where they were."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong = 0
        self._random = random.Random(seed)
        agent = CLASSES.named("agent")
        self._payloads = {self._random.randbytes(16): self._random.randbytes(SIZE) for _ in range(BLOCKS)}
        store = open_store(directory / "store")
        slots = store.reserve(list(self._payloads), SIZE)
        for slot in slots:
            store.arena.view(slot)[:] = self._payloads[slot.identity]
        sums = [checksum(store.arena.view(slot)) for slot in slots]
        store.commit(slots, sums, SHAPE, agent, verified=True, durable=True)
        store.close()
        self.store = open_store(directory / "store")  # with an empty arena: every read comes from the files
        self._files: dict[Path, Found] = {path: read_segment(path) for path in directory.glob("store/*/*/*/*.seg")}
        assert sum(len(found.heads) for found in self._files.values()) == BLOCKS, "every block lies in a sealed file"

    def run(self, flips: int) -> None:
        paths = list(self._files)
        weights = [self._files[path].size for path in paths]
        for path in self._random.choices(paths, weights, k=flips):
            found = self._files[path]
            offset = self._random.randrange(found.size)
            with _flipped(path, offset, self._random.randrange(8)):
                number, inside = divmod(offset - PAGE, found.head.stride)
                if offset >= PAGE and number < found.records:
                    self._ask(found, number, inside)
                else:
                    self._read(path, found, "header" if offset < PAGE else "footer")

    def _ask(self, found: Found, number: int, inside: int) -> None:
        """Asks for the block whose record was hit."""
        record = found.heads[number]
        identity = block_id(record.key, record.shard)
        entry = self.store.catalog.where(identity)
        assert entry is not None, "it was put back after the last flip"
        before = self.store.events["corrupt_blocks"]
        padding = SIZE <= inside < found.head.stride - TRAILER_BYTES
        try:
            ((payload, _),) = next(self.store.read([identity], [entry], 1))
        except BlockUnreadable as error:
            reason = self.store.catalog.match([[identity]], [SHAPE], entry.traffic_class).reason
            counted = self.store.events["corrupt_blocks"] == before + 1
            if not (error.corrupt and counted and reason == MissReason.CORRUPT):
                self.wrong += 1
            self.counts["a counted miss"] += 1
            with self.store.catalog.lock:
                self.store.catalog.insert_locked(identity, entry)
        else:
            self.counts["harmless: padding" if padding else "harmless: elsewhere in a record"] += 1
            self.wrong += payload != self._payloads[identity] or not padding

    def _read(self, path: Path, found: Found, where: str) -> None:
        """Reads the file as an opening store does."""
        try:
            same = read_segment(path).heads == found.heads
        except ForeignFile:
            same = False
        self.counts[f"harmless: {where}"] += same
        self.wrong += not same


@contextmanager
def _flipped(path: Path, offset: int, bit: int) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte[0] ^ 1 << bit]), offset)
        yield
        os.pwrite(descriptor, byte, offset)
    finally:
        os.close(descriptor)


def flip(flips: int, seed: int, directory: Path) -> Run:
    run = Run("bench/flips.py", {"flips": flips, "seed": seed, "payload_bytes": SIZE, "blocks": BLOCKS})
    work = Flips(directory, seed)
    try:
        work.run(flips)
    finally:
        work.store.close()
    run.results.append(
        Result(
            "neither harmless nor counted", {}, work.wrong, (work.wrong, work.wrong), "flips", target=0, at_most=True
        )
    )
    for name, count in sorted(work.counts.items()):
        run.results.append(Result(name, {}, count, (count, count), "flips"))
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="JSON is what it prints; accepted for uniformity")
    parser.add_argument("--quick", action="store_true", help="3,000 flips")
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="cachesvc-flips-"))
    try:
        run = flip(3_000 if given.quick else given.flips, given.seed, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(run.to_json(), indent=2))
    sys.exit(0 if all(result.passes is not False for result in run.results) else 1)


if __name__ == "__main__":
    main()
