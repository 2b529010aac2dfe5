"""Copies are exact, whatever lies beside what, and their checksums are those of the payloads."""

from __future__ import annotations

import mmap
import random
import threading
import time

import pytest
import xxhash

from cachesvc.connector import copying
from cachesvc.connector.copying import Copier


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("size", [1, 100, 4096, 113_920, 600_000, 3 << 20])
@pytest.mark.parametrize("padding", [0, 4096])
def test_copies_are_exact(threads: int, checksums: bool, size: int, padding: int) -> None:
    source_of = random.Random(size)
    stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    count = min(40, max(3, (6 << 20) // stride))
    memory, arena = mmap.mmap(-1, stride * count), mmap.mmap(-1, stride * count)
    memory.write(source_of.randbytes(stride * count))
    arena.write(b"\xaa" * (stride * count))
    order = list(range(count))
    order[1], order[2] = order[2], order[1]  # some lie behind each other, some do not
    sources = [memoryview(memory)[i * stride : i * stride + size].toreadonly() for i in range(count)]
    targets = [memoryview(arena)[i * stride : i * stride + size] for i in order]
    copier = Copier(threads)
    sums = copier.copy(targets, sources, checksums=checksums, padding=padding)
    copier.close()
    assert all(target == source for target, source in zip(targets, sources, strict=True))
    assert sums == ([xxhash.xxh3_64_intdigest(source) for source in sources] if checksums else [])
    if not padding:
        gaps = (memoryview(arena)[i * stride + size : (i + 1) * stride] for i in range(count))
        assert all(bytes(gap) == b"\xaa" * (stride - size) for gap in gaps), "bytes of nobody were overwritten"


def test_nothing_to_copy() -> None:
    assert Copier(2).copy([], [], checksums=True) == []


def test_when_it_raises_nobody_writes_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = mmap.mmap(-1, 8 << 20)
    views = [memoryview(memory)[i << 20 : (i + 1) << 20] for i in range(8)]
    running, main = threading.Event(), threading.main_thread()

    def part(*what: object) -> list[int]:
        if threading.current_thread() is main:
            running.wait(10)
            raise MemoryError
        running.set()
        time.sleep(0.3)
        running.clear()
        return []

    monkeypatch.setattr(copying, "_copy_part", part)
    copier = Copier(2)
    with pytest.raises(MemoryError):
        copier.copy(views[:4], views[4:], checksums=False)
    assert not running.is_set()
    copier.close()
