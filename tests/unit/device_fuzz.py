"""Random schedules of loads, saves, preemptions and aborts over one pool, against a dictionary. For any device.

A request's KV is a function of its key, layer and page. Compute is one kernel per layer on the compute stream that
checks what it reads and writes what is new, so that a page used too early or too late is found out.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from cachesvc.connector.device import DeviceLoad, DeviceLoads, DeviceStaging, Transfers
from cachesvc.connector.device.device import Device
from cachesvc.connector.payloads import SLOT_PAGE, Payloads, Region
from cachesvc.kernels import pool_of_layers

LAYERS, PLANES, PAGE_TOKENS, BLOCK_TOKENS = 4, 2, 16, 32
PAGES_PER_BLOCK = BLOCK_TOKENS // PAGE_TOKENS


@dataclass
class Settings:
    row_bytes: int = 16
    num_pages: int = 40
    arena_blocks: int = 64
    prompts: int = 12
    max_blocks: int = 6
    steps: int = 150
    stage_bytes: int = 4096
    staging_bytes: int = 16384


@dataclass(eq=False)
class Request:
    prompt: int
    blocks: int
    hit: int
    pages: list[int]
    load: DeviceLoad | None = None
    computed: int = 0
    saved: int = field(default=0)


class FakePass:
    def __init__(self, prompt: int, hit: int) -> None:
        self.prompt, self.hit, self.finished = prompt, hit, False


class Store:
    """What a daemon's arena and the cache in front of it come to: slots, and which key lies in which."""

    def __init__(self, payload_bytes: int, settings: Settings, rng: random.Random) -> None:
        self.slot = -(-payload_bytes // SLOT_PAGE) * SLOT_PAGE
        self.payload_bytes = payload_bytes
        self.memory = mmap.mmap(-1, self.slot * settings.arena_blocks)
        self.region = Region(memoryview(self.memory))
        self.region.writable = self.region
        self.free = list(range(settings.arena_blocks))
        self.at: dict[tuple[int, int], int] = {}
        self.rng = rng
        self.fails = 0.0

    def payloads(self, slots: Sequence[int]) -> Payloads:
        return Payloads(self.region, [slot * self.slot for slot in slots], self.payload_bytes)

    def load(self, p: FakePass, scatter: Callable[[int, Sequence[memoryview]], None]) -> int:
        """In one or several batches; sometimes it turns out at the end that some were not good."""
        slots = [self.at[p.prompt, block] for block in range(p.hit)]
        cuts = sorted(self.rng.sample(range(1, p.hit), min(p.hit - 1, self.rng.choice((0, 0, 1)))))
        edges = [0, *cuts, p.hit]
        for start, end in pairwise(edges):
            if p.finished:
                return start
            scatter(start, self.payloads(slots[start:end]))
        return self.rng.randrange(p.hit) if self.rng.random() < self.fails else p.hit


def fuzz(
    device: Device, seed: int, settings: Settings | None = None, between: Callable[[], None] = lambda: None
) -> dict[str, int]:
    """Raises `AssertionError` at the first wrong byte. `between` is called now and then; returns what happened."""
    s = settings or Settings()
    rng = random.Random(seed)
    where = device.torch_device
    kv = [
        torch.full((PLANES, s.num_pages * PAGE_TOKENS, 1, s.row_bytes), 0x5A, dtype=torch.uint8, device=where)
        for _ in range(LAYERS)
    ]
    pool = pool_of_layers(kv, page_tokens=PAGE_TOKENS, block_tokens=BLOCK_TOKENS)
    staging = DeviceStaging(device)
    transfers = Transfers(
        pool, staging._kernels, device, staging.windows, stage_bytes=s.stage_bytes, staging_bytes=s.staging_bytes
    )
    loads, buffers = DeviceLoads(transfers), staging.slots(pool.payload_bytes, 8)
    store = Store(pool.payload_bytes, s, rng)
    store.fails = 0.2
    free = list(range(s.num_pages))
    running: list[Request] = []
    counts = dict.fromkeys(("loads", "failed", "saves", "aborts", "preempted"), 0)
    wrong = torch.zeros((), dtype=torch.int64, device=where)
    compute = device.current()
    size = PAGE_TOKENS * s.row_bytes

    def content(prompt: int, page: int, layer: int, plane: int) -> torch.Tensor:
        start = (prompt * 7919 + page * 613 + layer * 101 + plane * 31) % 251
        return ((torch.arange(size, device=where) * (1 + prompt % 5) + start) % 251).to(torch.uint8)

    def one_layer(request: Request, layer: int, known: int, upto: int, pages: list[int]) -> None:
        for plane in range(PLANES):
            rows = kv[layer][plane].view(-1, size)
            for number, page in enumerate(pages[: upto * PAGES_PER_BLOCK]):
                wanted = content(request.prompt, number, layer, plane)
                if number < known * PAGES_PER_BLOCK:
                    wrong.add_((rows[page] != wanted).sum())
                else:
                    rows[page] = wanted

    def tables(request: Request) -> Callable[[int, int], list[list[int]]]:
        return lambda first, count: [request.pages[first * PAGES_PER_BLOCK : (first + count) * PAGES_PER_BLOCK]]

    def release(request: Request) -> None:
        if request.load is not None:
            request.load.abandon(compute)
        rng.shuffle(request.pages)
        free.extend(request.pages)
        running.remove(request)

    def start() -> None:
        prompt, blocks = rng.randrange(s.prompts), rng.randint(1, s.max_blocks)
        hit = 0
        while hit < blocks - 1 and (prompt, hit) in store.at:
            hit += 1
        if len(free) < blocks * PAGES_PER_BLOCK:
            return
        request = Request(prompt, blocks, hit, [free.pop() for _ in range(blocks * PAGES_PER_BLOCK)])
        running.append(request)
        if hit:
            p: object = FakePass(prompt, hit)
            request.load = loads.start(store, p, tables(request), hit_blocks=hit, after=compute.record())  # type: ignore[arg-type]
            counts["loads"] += 1

    def step(request: Request) -> None:
        known = request.computed or request.hit
        if request.load is not None and not request.load.wait_start(5.0):
            raise AssertionError("a load does not start")
        for layer in range(LAYERS):
            if request.load is not None:
                request.load.wait_layer(compute, layer)
            pages = list(request.pages)
            compute.submit(
                lambda layer=layer, known=known, pages=pages: one_layer(request, layer, known, request.blocks, pages)
            )
        if request.load is not None:
            load, request.load = request.load, None
            loaded = load.result(compute)
            if loaded < request.hit:
                counts["failed"] += 1
                request.hit = request.computed = loaded
                return
        request.computed = request.blocks

    def save(request: Request) -> None:
        new = [block for block in range(request.hit, request.computed) if (request.prompt, block) not in store.at]
        taken = buffers.take(len(new))
        new = new[: len(taken)]
        if not new or len(store.free) < len(new):
            buffers.give(taken)
            return
        views = buffers.views(taken)
        pages = [
            page for block in new for page in request.pages[block * PAGES_PER_BLOCK : (block + 1) * PAGES_PER_BLOCK]
        ]
        views.filled(transfers.stage([pages], views.blocks))
        store.rng.shuffle(store.free)
        slots = [store.free.pop() for _ in new]
        if rng.random() < 0.5:
            slots.sort()

        def work() -> None:
            staging.copy(store.payloads(slots), views, checksums=True)

        thread = threading.Thread(target=work)
        thread.start()
        saves.append((thread, request.prompt, new, slots, taken))
        counts["saves"] += len(new)

    def settle() -> None:
        for thread, prompt, blocks, slots, taken in saves:
            thread.join(20.0)
            assert not thread.is_alive(), "a save does not end"
            buffers.give(taken)
            for block, slot in zip(blocks, slots, strict=True):
                found = torch.frombuffer(store.memory, dtype=torch.uint8)[slot * store.slot :][: pool.payload_bytes]
                parts = found.view(LAYERS, PLANES, PAGES_PER_BLOCK, size)
                for layer in range(LAYERS):
                    for plane in range(PLANES):
                        for page in range(PAGES_PER_BLOCK):
                            number = block * PAGES_PER_BLOCK + page
                            assert torch.equal(parts[layer, plane, page], content(prompt, number, layer, plane).cpu())
                store.at.setdefault((prompt, block), slot)
                if store.at[prompt, block] != slot:
                    store.free.append(slot)
        saves.clear()

    saves: list[tuple[threading.Thread, int, list[int], list[int], list[int]]] = []
    for _ in range(s.steps):
        action = rng.random()
        if action < 0.4 or not running:
            start()
        elif action < 0.7:
            request = rng.choice(running)
            if request.computed < request.blocks:
                step(request)
            if request.computed == request.blocks:
                save(request)
        elif action < 0.9:
            request = rng.choice(running)
            counts["aborts" if request.load is None else "preempted"] += 1
            release(request)
        else:
            settle()
        between()
        if len(store.at) > s.arena_blocks // 2 and rng.random() < 0.1:
            settle()
            key = rng.choice(list(store.at))
            for other in [k for k in store.at if k[0] == key[0] and k[1] >= key[1]]:
                if not any(r.prompt == other[0] for r in running):
                    store.free.append(store.at.pop(other))
    for request in list(running):
        release(request)
    settle()
    compute.record().synchronize()
    loads.close(5.0)
    staging.close()
    assert not int(wrong), f"{int(wrong)} wrong bytes were read"
    return counts
