"""What runs in a step: budget, alignment of chunks, order, preemption."""

from __future__ import annotations

import pytest
import torch
from engine_support import TINY

from cachesvc.engine.errors import RequestError
from cachesvc.engine.kv import PagePool, PageTable
from cachesvc.engine.models.llama import LlamaConfig
from cachesvc.engine.request import Request, SamplingParams
from cachesvc.engine.scheduler import Scheduler


class Bench:
    """A scheduler with a pool of its own, and steps without a model."""

    def __init__(self, *, num_pages: int = 100, max_running: int = 4, max_batch_tokens: int = 512) -> None:
        config = LlamaConfig.from_dict(TINY)
        self.pool = PagePool(config, num_pages=num_pages, page_size=10, dtype=torch.float32)
        self.scheduler = Scheduler(self.pool, max_running=max_running, max_batch_tokens=max_batch_tokens)

    def add(self, name: str, length: int, new: int = 16) -> Request:
        params = SamplingParams(max_new_tokens=new)
        request = Request(name, [1] * length, params, (), PageTable(self.pool))
        self.scheduler.add(request)
        return request

    def step(self) -> list[tuple[str, int, int]]:
        """One step in which every sampled token is a 1; returns (name, start, stop) of its chunks."""
        self.scheduler.make_room()
        self.scheduler.admit()
        chunks = self.scheduler.plan()
        done = [(chunk.request.request_id, chunk.start, chunk.stop) for chunk in chunks]
        for chunk in chunks:
            assert chunk.request.table.capacity >= chunk.stop
            chunk.request.num_computed = chunk.stop
            if chunk.samples:
                chunk.request.tokens.append(1)
        return done


def test_chunks_end_at_multiples_of_128_whatever_the_budget() -> None:
    bench = Bench(max_batch_tokens=300)
    bench.add("a", 700)
    assert [bench.step() for _ in range(4)] == [
        [("a", 0, 256)],
        [("a", 256, 512)],
        [("a", 512, 700)],
        [("a", 700, 701)],
    ]


def test_a_budget_below_a_block_still_advances() -> None:
    bench = Bench(max_batch_tokens=100)
    bench.add("a", 250)
    assert [bench.step()[0][1:] for _ in range(4)] == [(0, 100), (100, 128), (128, 228), (228, 250)]


def test_decoding_goes_first_and_the_oldest_prompt_next() -> None:
    bench = Bench(max_batch_tokens=256)
    bench.add("a", 20)
    bench.step()
    bench.add("b", 300)
    bench.add("c", 10)
    assert bench.step() == [("a", 20, 21), ("b", 0, 128), ("c", 0, 10)]
    assert bench.step() == [("a", 21, 22), ("c", 10, 11), ("b", 128, 300)]


def test_the_budget_is_never_exceeded() -> None:
    bench = Bench(max_batch_tokens=40, max_running=4)
    for name, length in zip("abcd", (33, 90, 1, 57), strict=True):
        bench.add(name, length, new=40)
    for _ in range(30):
        assert 0 < sum(stop - start for _, start, stop in bench.step()) <= 40


def test_no_more_than_max_running_and_no_jumping_the_queue() -> None:
    bench = Bench(num_pages=10, max_running=3)
    bench.add("a", 50)
    bench.add("big", 60)
    bench.add("small", 5)
    assert [name for name, _, _ in bench.step()] == ["a"]  # "small" would fit but came after "big".
    bench = Bench(max_running=2)
    for name in "abc":
        bench.add(name, 5)
    assert [name for name, _, _ in bench.step()] == ["a", "b"]


def test_the_youngest_is_preempted_and_starts_over_at_the_head_of_the_queue() -> None:
    bench = Bench(num_pages=6)
    old, young = bench.add("old", 20, new=30), bench.add("young", 20, new=30)
    late = bench.add("late", 5, new=1)
    assert [name for name, _, _ in bench.step()] == ["old", "young"]
    while not young.preemptions:
        assert [name for name, _, _ in bench.step()][:1] == ["old"]
    assert (young.num_computed, young.table.pages, old.preemptions) == (0, [], 0)
    assert [request.request_id for request in bench.scheduler.requests] == ["old", "young", "late"]
    assert late.preemptions == 0
    bench.scheduler.remove(old)
    generated = len(young.generated)
    assert bench.step()[0] == ("young", 0, 20 + generated)
    assert len(young.generated) == generated + 1


def test_the_oldest_is_never_preempted_and_everyone_ends() -> None:
    bench = Bench(num_pages=9, max_running=4)
    requests = [bench.add(str(index), 10 + 7 * index, new=40) for index in range(4)]
    for _ in range(400):
        oldest = bench.scheduler.requests[0]
        before = oldest.preemptions
        bench.step()
        assert oldest.preemptions == before
        for request in list(bench.scheduler.requests):
            if len(request.generated) == 40:
                bench.scheduler.remove(request)
        if not bench.scheduler.requests:
            break
    assert [len(request.generated) for request in requests] == [40] * 4
    assert sum(request.preemptions for request in requests) > 0
    assert bench.pool.free_pages == 9


def test_what_can_never_fit_is_refused_and_what_just_fits_is_not() -> None:
    bench = Bench(num_pages=5)
    with pytest.raises(RequestError, match=r"needs 6 pages of 10 tokens \(50 input tokens and up to 2 .*has 5"):
        bench.add("a", 50, new=2)
    assert bench.scheduler.requests == []
    request = bench.add("b", 50, new=1)
    assert bench.step() == [("b", 0, 50)]
    bench.scheduler.remove(request)
    request = bench.add("c", 41, new=10)
    for _ in range(10):
        bench.step()
    assert (len(request.generated), request.preemptions) == (10, 0)


def test_every_running_request_must_fit_into_the_budget() -> None:
    with pytest.raises(ValueError, match="max_running is 5 and max_batch_tokens 4"):
        Bench(max_running=5, max_batch_tokens=4)
