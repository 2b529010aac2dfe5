"""From the arena into paged KV and back, beside what the link does at all. Needs a CUDA device.

Both ways are those of the connector: `Transfers.load`, and `Transfers.stage` with the copy into the arena behind it.
Page tables are random. Slots of the arena are neighbours, as the daemon gives them out while it has some, or lie
anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from gpu_arena import POOLS, Arena, gpu_name, pool_of

from cachesvc.benchmark.harness import Baseline, Result, Run, Side, interleaved
from cachesvc.connector.device import CudaDevice, DeviceStaging
from cachesvc.connector.device.cuda import cuda
from cachesvc.connector.payloads import Payloads
from cachesvc.kernels import PagedPool

SAVE_BATCH = 256 << 20
"""Bytes that one call copies into the arena, as with `CacheOptions.save_batch_bytes` of that size."""


class Bench:
    def __init__(self, total: int, repeats: int) -> None:
        self.total, self.repeats = total, repeats
        self.device = CudaDevice()
        self.staging = DeviceStaging(self.device)
        self.saver = ThreadPoolExecutor(DeviceStaging.threads)
        self.arena = Arena(3 * total)
        self.pinned = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        self.there = torch.randint(0, 256, (total,), dtype=torch.uint8, device=self.device.torch_device)
        self.run = Run("bench/gpu_transfer.py", {"bytes": total, "repeats": repeats}, gpu=gpu_name())

    def all(self, names: list[str]) -> Run:
        for name in names:
            self.one_shape(name)
        self.both_ways()
        return self.run

    def one_shape(self, name: str) -> None:
        probe = pool_of(name, 1, torch.device("cpu"))
        size, count = probe.payload_bytes, self.total // probe.payload_bytes
        del probe
        pool = pool_of(name, count, self.device.torch_device)
        transfers = self.staging.transfers(pool)
        pages = np.random.default_rng(1).permutation(pool.groups[0].num_pages)[: count * pool.groups[0].pages]
        slots = self.staging.slots(size, count)
        views = slots.views(slots.take(count))
        near, far = (self.arena.slots(size, count, neighbours=neighbours) for neighbours in (True, False))

        def load(payloads: Payloads) -> None:
            transfers.load(payloads, [pages], after=self.device.current().record()).synchronize()

        step = max(1, SAVE_BATCH // size)
        per = pool.groups[0].pages
        parts = [slice(start, min(start + step, count)) for start in range(0, count, step)]

        def save(payloads: Payloads) -> None:
            copies = []
            for part in parts:  # in the engine's thread, while those that save are at earlier ones
                some = views[part]
                some.filled(transfers.stage([pages[part.start * per : part.stop * per]], some.blocks))
                copies.append(self.saver.submit(self.staging.copy, payloads[part], some, checksums=False))
            for copy in copies:
                copy.result()

        used = size * count
        ceiling_in, ceiling_out = self.pinned[:used], self.there[:used]
        sides = [
            Side("pinned in", partial(self.copied, self.there[:used], ceiling_in)),
            Side("load near", partial(load, near)),
            Side("load far", partial(load, far)),
            Side("pinned out", partial(self.copied, self.pinned[:used], ceiling_out)),
            Side("save near", partial(save, near)),
            Side("save far", partial(save, far)),
            Side("torch in", partial(self.one_by_one, size, count)),
            Side("bare in", partial(self.bare_one_by_one, far)),
        ]
        times = interleaved(sides, self.repeats, warmups=2)
        rates = {key: timed.rate(used / 1e9) for key, timed in times.items()}
        params = {"block bytes": size, "blocks": count, "pool": name}
        for way, ceiling in (("load", "pinned in"), ("save", "pinned out")):
            for key, slots_are in ((f"{way} near", "neighbours"), (f"{way} far", "anywhere")):
                value, spread = rates[key]
                pinned = Baseline("pinned copy", rates[ceiling][0])
                self.add(way, {**params, "slots": slots_are}, value, spread, pinned, 0.9)
        value, spread = rates["load far"]
        small = size == 113_920
        torch_side = Baseline("one by one, torch", rates["torch in"][0])
        self.add("load", {**params, "slots": "anywhere"}, value, spread, torch_side, 3.0 if small else None)
        bare = Baseline("one by one, bare cudaMemcpyAsync", rates["bare in"][0])
        self.add("load", {**params, "slots": "anywhere"}, value, spread, bare, None)
        self.check(name, pool, transfers, load, save, far, pages)

    def check(
        self,
        name: str,
        pool: PagedPool,
        transfers: object,
        load: Callable[[Payloads], None],
        save: Callable[[Payloads], None],
        slots: Payloads,
        pages: np.ndarray,
    ) -> None:
        """What was loaded into poisoned pages, saved into poisoned slots, is what lay in the arena."""
        before = [self.arena.bytes[offset : offset + slots.payload_bytes].clone() for offset in list(slots.offsets)[:8]]
        for region in pool.groups[0].regions:
            region.fill_(0x5A)
        load(slots)
        for offset in slots.offsets:
            self.arena.bytes[offset : offset + slots.payload_bytes] = 0xA5
        save(slots)
        for offset, wanted in zip(slots.offsets, before, strict=False):
            if not torch.equal(self.arena.bytes[offset : offset + slots.payload_bytes], wanted):
                sys.exit(f"gpu_transfer: a block of {name!r} does not come back as it was")

    def copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def one_by_one(self, size: int, count: int) -> None:
        for start in range(0, count * size, size):
            self.there[start : start + size].copy_(self.pinned[start : start + size], non_blocking=True)
        torch.cuda.synchronize()

    def bare_one_by_one(self, payloads: Payloads) -> None:
        runtime, stream = cuda(), torch.cuda.current_stream().cuda_stream
        base, size, target = self.arena.region.address, payloads.payload_bytes, self.there.data_ptr()
        for number, offset in enumerate(payloads.offsets):
            runtime.copy(target + number * size, base + offset, size, stream)
        torch.cuda.synchronize()

    def both_ways(self) -> None:
        half = self.total // 2
        other = torch.cuda.Stream()

        def both() -> None:
            self.there[:half].copy_(self.pinned[:half], non_blocking=True)
            with torch.cuda.stream(other):
                self.pinned[half:].copy_(self.there[half:], non_blocking=True)
            torch.cuda.synchronize()

        value, spread = interleaved([Side("both", both)], self.repeats)["both"].rate(2 * half / 1e9)
        self.add("pinned copies both ways at once", {}, value, spread, None, None)

    def add(
        self,
        name: str,
        params: dict[str, object],
        value: float,
        spread: tuple[float, float],
        baseline: Baseline | None,
        target: float | None,
    ) -> None:
        self.run.results.append(Result(name, params, value, spread, "GB/s", baseline, target))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less than a minute")
    parser.add_argument("--json", action="store_true", help="JSON only; it is what is printed in any case")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_transfer: torch finds no CUDA device here")
    total, repeats = (256 << 20, 5) if options.quick else (1 << 30, 9)
    run = Bench(total, repeats).all(list(POOLS))
    print(json.dumps(run.to_json(), indent=1))


if __name__ == "__main__":
    main()
