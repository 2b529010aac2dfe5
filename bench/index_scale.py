"""The index at 100 thousand, 1 million and 10 million blocks: look-ups, memory, start-up, and what else could be used.

Each store is made of sparse segment files with real headers and footers, and of a durable index that knows a later use
of every block, as a clean shutdown leaves them. A process of its own opens it by the daemon's own code and is then
asked for prefixes, in turns with the other sizes. Beside it the same look-ups in a dict of the daemon's objects, and
by multi-get in RocksDB. Blocks of 113,920 bytes, 2,300 in a segment, none of them in memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from rocksdict import Options, Rdict, WriteBatch

from cachesvc.benchmark.harness import Baseline, Result, Run, percentile
from cachesvc.catalog import Catalog
from cachesvc.classes import DEFAULT_TTLS, TrafficClasses
from cachesvc.clock import ManualClock
from cachesvc.disk.tier import DiskTier
from cachesvc.index.blocks import StoredUses
from cachesvc.index.rocks import RocksIndex
from cachesvc.index.table import Entry
from cachesvc.record import PAGE
from cachesvc.segments.format import FOOTER_ENTRY, SegmentHead, encode_head, footer_of, shape_of

SIZES: Final = (100_000, 1_000_000, 10_000_000)
KEYS: Final = (1, 32, 1_000, 8_000)
A_SEGMENT: Final = 2_300
SHAPE: Final = shape_of("ab" * 32, 113_920)
NOW: Final = 1_800_000_000.0
CLASSES: Final = TrafficClasses(DEFAULT_TTLS)
AGENT: Final = CLASSES.named("agent")
MAX_DICT: Final = 1_000_000
"""Blocks in a dict: more of them take gigabytes."""


def keys_of(segment: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.random.default_rng(segment).integers(0, 2**64, (A_SEGMENT, 2), np.uint64)


def make_store(path: Path, blocks: int) -> int:
    """Leaves a store in `path`; how many blocks it has."""
    folder = path / SHAPE.namespace / AGENT.name / str(AGENT.slice_end(NOW))
    folder.mkdir(parents=True)
    index = RocksIndex(path / "index")
    uses = StoredUses((AGENT,), np.full(A_SEGMENT, NOW), np.zeros(A_SEGMENT, np.uint8), np.ones(A_SEGMENT, np.uint8))
    segments = blocks // A_SEGMENT
    for number in range(segments):
        entries = np.zeros(A_SEGMENT, FOOTER_ENTRY)
        entries["key"] = keys_of(number)
        entries["created"] = entries["used"] = int((NOW - 1_000) * 1e6)
        head = SegmentHead(
            SHAPE.namespace, SHAPE.payload_bytes, AGENT.name, AGENT.ttl, AGENT.slice_end(NOW), NOW, number + 1
        )
        with (folder / f"bench-000001-{number:08d}.seg").open("wb") as file:
            file.write(encode_head(head))
            file.seek(PAGE + A_SEGMENT * head.stride)  # a hole: nothing here reads payloads
            file.write(footer_of(head, entries.tobytes(), A_SEGMENT))
        index.write(put=[(number + 1, uses)])
    index.close()
    return segments * A_SEGMENT


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# ---- what a child process does ---------------------------------------------------------------------------------------


def prefix(segments: int, count: int, random: np.random.Generator) -> list[bytes]:
    """A run of blocks as they lie on disk, beginning anywhere."""
    first, skip = int(random.integers(segments)), int(random.integers(A_SEGMENT))
    needed = -(-(skip + count) // A_SEGMENT)
    packed = b"".join(keys_of((first + i) % segments).tobytes() for i in range(needed))
    return [packed[16 * i : 16 * i + 16] for i in range(skip, skip + count)]


def real(path: Path, segments: int) -> tuple[dict[str, float], Callable[[list[bytes]], int]]:
    before = resident()
    started, busy = time.perf_counter(), time.process_time()
    catalog = Catalog(ManualClock(NOW), Counter())
    disk = DiskTier(
        path,
        catalog,
        budget=1 << 50,
        segment_bytes=256 << 20,
        classes=CLASSES,
        clock=ManualClock(NOW),
        events=Counter(),
    )
    seconds = time.perf_counter() - started
    assert len(catalog) == segments * A_SEGMENT
    facts = {
        "start_s": seconds,
        "start_cpu_s": time.process_time() - busy,
        "bytes": (resident() - before) / len(catalog),
    }

    def ask(keys: list[bytes]) -> int:
        found = catalog.match([keys], [SHAPE], AGENT, pin=True).entries
        catalog.unpin(found)
        return len(found[0])

    ask.disk = disk  # type: ignore[attr-defined]  # it lives as long
    return facts, ask


def in_dict(path: Path, segments: int) -> tuple[dict[str, float], Callable[[list[bytes]], int]]:
    del path
    before = resident()
    table: dict[bytes, Entry] = {}
    for number in range(segments):
        packed = keys_of(number).tobytes()
        for i in range(A_SEGMENT):
            used = NOW + i * 1e-6
            key = packed[16 * i : 16 * i + 16]
            table[key] = Entry(SHAPE, None, i, 2**63 + number * A_SEGMENT + i, used, used, AGENT, used)
    facts = {"bytes": (resident() - before) / len(table)}

    def ask(keys: list[bytes]) -> int:
        found = 0
        for entry in map(table.get, keys):
            if entry is None or entry.shape is not SHAPE or entry.used <= NOW - AGENT.ttl:
                break
            found += 1
        return found

    return facts, ask


def in_rocks(path: Path, segments: int) -> tuple[dict[str, float], Callable[[list[bytes]], int]]:
    before = resident()
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    table = Rdict(str(path / "multi-get"), options)
    for number in range(segments):
        packed, batch = keys_of(number).tobytes(), WriteBatch(raw_mode=True)
        for i in range(A_SEGMENT):
            batch.put(packed[16 * i : 16 * i + 16], bytes(33))
        table.write(batch)
    facts = {"bytes": (resident() - before) / (segments * A_SEGMENT)}

    def ask(keys: list[bytes]) -> int:
        return sum(value is not None for value in table[keys])

    return facts, ask


KINDS: Final = {"index": real, "dict": in_dict, "RocksDB multi-get": in_rocks}


def child(kind: str, path: Path, segments: int) -> None:
    """Says what it took to be ready; then, for each line ``KEYS CALLS``, the seconds of each call."""
    facts, ask = KINDS[kind](path, segments)
    print(json.dumps(facts), flush=True)
    random = np.random.default_rng(segments)
    for line in sys.stdin:
        count, calls = map(int, line.split())
        asked = [prefix(segments, count, random) for _ in range(calls)]
        assert ask(asked[0]) == count
        gc.collect()
        gc.disable()
        seconds = []
        for keys in asked:
            started = time.perf_counter()
            ask(keys)
            seconds.append(time.perf_counter() - started)
        gc.enable()
        print(json.dumps(seconds), flush=True)


# ---- what the benchmark does -----------------------------------------------------------------------------------------


class Child:
    def __init__(self, kind: str, path: Path, blocks: int) -> None:
        self.kind, self.blocks = kind, blocks
        segments = str(blocks // A_SEGMENT)
        command = [sys.executable, __file__, "--child", kind, "--path", str(path), "--segments", segments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts: dict[str, float] = json.loads(self._line())
        self.seconds: dict[int, list[list[float]]] = {}

    def ask(self, keys: int, calls: int) -> None:
        assert self._process.stdin is not None
        print(keys, calls, file=self._process.stdin, flush=True)
        self.seconds.setdefault(keys, []).append(json.loads(self._line()))

    def p50(self, keys: int) -> tuple[float, tuple[float, float]]:
        """Milliseconds, of all calls and the spread of the turns."""
        each = [1e3 * percentile(seconds, 0.5) for seconds in self.seconds[keys]]
        every = [1e3 * second for seconds in self.seconds[keys] for second in seconds]
        return percentile(every, 0.5), (min(each), max(each))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process with {self.blocks} blocks ({self.kind}) has ended: see above")
        return line


def measure(run: Run, sizes: Sequence[int], turns: int, folder: Path) -> None:
    children: list[Child] = []
    try:
        for size in sizes:
            path = folder / str(size)
            path.mkdir()
            started = time.perf_counter()
            blocks = make_store(path, size)
            print(f"made {blocks:,} blocks in {time.perf_counter() - started:.0f} s", file=sys.stderr)
            children.append(Child("index", path, blocks))
            if size <= MAX_DICT:
                children += [Child("dict", path, blocks), Child("RocksDB multi-get", path, blocks)]
        for _ in range(turns):
            for keys in KEYS:
                for one in children:
                    one.ask(keys, max(10, 20_000 // (keys + 100)))
    finally:
        for one in children:
            one.close()
    for one in children:
        largest = one.kind == "index" and one.blocks > 9_000_000
        if "start_s" in one.facts:
            params = {"blocks": one.blocks}
            seconds = one.facts["start_s"]
            spread = (seconds, seconds)
            target = 30.0 if largest else None
            run.results.append(Result("start-up", params, seconds, spread, "s", target=target, at_most=True))
            seconds = one.facts["start_cpu_s"]
            run.results.append(Result("start-up, processor time", params, seconds, (seconds, seconds), "s"))
        size = one.facts["bytes"]
        params_kind = {"of": one.kind, "blocks": one.blocks}
        target = 64.0 if largest else None
        run.results.append(Result("memory", params_kind, size, (size, size), "B/block", target=target, at_most=True))
    for keys in KEYS:
        few = children[0].p50(keys)[0]
        for one in children:
            value, spread = one.p50(keys)
            baseline = Baseline(f"{children[0].blocks:,} blocks", few) if one.kind == "index" else None
            target = 1.3 if one.kind == "index" and one.blocks > 9_000_000 and keys == 1_000 else None
            params_kind = {"keys": keys, "of": one.kind, "blocks": one.blocks}
            run.results.append(Result("match p50", params_kind, value, spread, "ms", baseline, target, at_most=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="without 10 million blocks, and fewer turns")
    parser.add_argument("--json", action="store_true", help="as it is printed anyway")
    parser.add_argument("--folder", type=Path, help="for the stores (1 GB); default: where temporary files go")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--segments", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.path, given.segments)
        return
    sizes = SIZES[:-1] if given.quick else SIZES
    run = Run("bench/index_scale.py", {"sizes": list(sizes)})
    folder = Path(tempfile.mkdtemp(prefix="index-scale-", dir=given.folder))
    try:
        measure(run, sizes, 3 if given.quick else 7, folder)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(run.to_json(), indent=2))
    sys.exit(0 if all(result.passes is not False for result in run.results) else 1)


if __name__ == "__main__":
    main()
