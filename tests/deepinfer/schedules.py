"""Random schedules: requests that come, share prefixes, are aborted, forked and preempted, while blocks are few."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import engines
import native
import simulated
from deepinfer.engine.engine_type import EngineType
from engines import SimulatedEngine, make_engine
from simulated import QUEUE

from cachesvc.connector.deepinfer.pages import PagedBlocks
from cachesvc.connector.deepinfer.settings import Settings


class Watch:
    """Looks at every copy: no block may be freed, or handed to another, while it is read or written."""

    def __init__(self, engine: SimulatedEngine, source: random.Random) -> None:
        self.faults: list[str] = []
        self.gathered = self.scattered = 0
        self._busy: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._slow = source.random() < 0.3
        session = engine._session
        assert session is not None
        self._manager = engine.block_manager
        pages: PagedBlocks = session.saving._pages
        self._scatter, self._gather = pages.scatter, pages.gather
        pages.scatter, pages.gather = self.scatter, self.gather  # type: ignore[method-assign]
        engine.block_manager.on_free = self.freed
        engine.block_manager.on_allocate = self.freed

    def freed(self, block: int) -> None:
        if self._busy[block]:
            self.faults.append(f"block {block} was freed or handed out while it was copied")

    def _copy(self, copy: Any, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        with self._lock:
            self._busy.update(blocks)
        idle = [block for block in blocks if not self._manager.references[block]]
        if idle:
            self.faults.append(f"blocks {idle} are copied, but are free")
        if self._slow:
            time.sleep(0.002)
        copy(blocks, payloads)
        with self._lock:
            self._busy.subtract(blocks)

    def scatter(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        for payload in payloads:
            if bytes(payload) not in EXPECTED:
                self.faults.append("a payload came from the cache that no prompt has")
        self.scattered += len(blocks)
        self._copy(self._scatter, blocks, payloads)

    def gather(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        self._copy(self._gather, blocks, payloads)
        self.gathered += len(blocks)
        for payload in payloads:
            if bytes(payload) not in EXPECTED:
                self.faults.append("a block is saved that does not hold what was computed for it")


LONGEST = 1400
"""Of a request, answer included."""

EXPECTED: set[bytes] = set()
"""Payloads of all blocks that any prompt and its answer have."""

ANSWERS: dict[tuple[tuple[int, ...], int], list[int]] = {}


def expect(prompt: list[int], max_tokens: int) -> list[int]:
    """What must be answered; all its blocks may be saved from now on, those of a few more tokens too: a step that
    computes ahead of the scheduler is no fault."""
    known = ANSWERS.get((tuple(prompt), max_tokens))
    if known is None:
        known = simulated.answer_to(prompt, max_tokens)
        EXPECTED.update(simulated.payloads_of([*prompt, *known]))
        ANSWERS[tuple(prompt), max_tokens] = known
    return known


class Prompts:
    """Conversations: each prompt extends an earlier one, or its answer, or begins anew."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)
        self._seen: list[list[int]] = []

    def make(self, source: random.Random, longest: int) -> list[int]:
        prompt: list[int] = []
        if self._seen and source.random() < 0.8:
            base = source.choice(self._seen[-40:])
            prompt = base[: source.choice((len(base), source.randrange(1, len(base) + 1)))]
        length = min(longest, len(prompt) + source.choice((1, 5, 60, 128, 129, 300, 500)))
        prompt = prompt[:length]
        prompt += [source.randrange(8, simulated.VOCABULARY) for _ in range(length - len(prompt))]
        self._seen.append(prompt)
        return list(prompt)

    def note(self, tokens: list[int]) -> None:
        self._seen.append(tokens)


def random_engine(source: random.Random, settings: Settings, seed: int) -> SimulatedEngine:
    chunked = source.random() < 0.8
    asynchronous, drafts = source.random() < 0.6, source.choice((0, 0, 3))
    return make_engine(
        settings,
        blocks=source.choice((14, 16, 18, 24, 40)),
        seed=seed,
        role=EngineType.NORMAL,
        max_num_seqs=source.choice((2, 4, 8)),
        max_batched_tokens=source.choice((256, 512, 2048)) if chunked else 2048,
        max_model_len=LONGEST,
        chunked=chunked,
        asynchronous=asynchronous,
        drafts=drafts,
        end_preempted=source.random() < 0.2,
        prefill_every=source.choice((1, 1, 3)),
    )


def one_schedule(
    engine: SimulatedEngine, watch: Watch, source: random.Random, prompts: Prompts, counts: Counter[str]
) -> None:
    """A few requests from beginning to end on an engine that is empty before and after."""
    outputs: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    asked: dict[str, tuple[list[int], int]] = {}
    live: dict[str, Any] = {}
    gone: set[str] = set()
    preempted_before = engine.scheduler.get_num_preempted_seqs()
    todo = source.choice((1, 2, 3, 4, 10))
    for _ in range(20_000):
        while todo and source.random() < 0.4:
            todo -= 1
            name = f"{counts['requests']}"
            counts["requests"] += 1
            max_tokens = source.choice((1, 4, 4, 30, 140))
            prompt = prompts.make(source, 1500 if source.random() < 0.05 else 900)
            expect(prompt, max_tokens)
            asked[name] = (prompt, max_tokens)
            extra = {"cachesvc": {"salt": "tenant"}} if source.random() < 0.1 else None
            live[name] = engines.add(engine, name, prompt, max_tokens, extra=extra)
        if live and source.random() < 0.005:
            name = source.choice(list(live))
            engine.abort_request(name)
            gone.add(name)
            counts["aborted"] += 1
        if not todo and not engine.has_unfinished_requests():
            break
        for pointer in engine.step():
            output = native.RequestOutput.clone(pointer)
            if output.token_id >= 0:
                outputs.setdefault(output.request_id, []).append(output.token_id)
            if output.finished:
                ends[output.request_id] = output.finish_reason
                live.pop(output.request_id, None)
    else:
        raise AssertionError("the engine did not come to an end")
    for pointer in engine.flush_inflight_reqs():
        output = native.RequestOutput.clone(pointer)
        if output.token_id >= 0:
            outputs.setdefault(output.request_id, []).append(output.token_id)
    assert not QUEUE.failures, QUEUE.failures[:3]
    assert not watch.faults, watch.faults[:3]
    for name, (prompt, max_tokens) in asked.items():
        expected = expect(prompt, max_tokens)
        got = outputs.get(name, [])
        capped = len(prompt) + len(got) > LONGEST
        whole = name not in gone and not capped and ends.get(name) not in ("FINISHED_IGNORED", "FINISHED_PREEMPTED")
        assert got == (expected if whole else expected[: len(got)]), (name, ends.get(name), got, expected)
        if whole:
            prompts.note([*prompt, *got])
            counts["answered"] += 1
    counts["preempted"] += engine.scheduler.get_num_preempted_seqs() - preempted_before


def nothing_left(engine: SimulatedEngine) -> None:
    """No block, no state and no request is held any more."""
    assert engine.flush_cache(20.0)
    engine.deferred_release.release()
    held = [block for block, count in enumerate(engine.block_manager.references) if count]
    assert not held, f"blocks {held} have leaked"
    assert engine.block_manager.get_num_free_blocks() == engine.block_manager.num_blocks - 1
    assert engine.state_manager is not None
    assert engine.state_manager.get_num_free_blocks() == engine.state_manager.num_blocks - 1, "states have leaked"
    session = engine._session
    assert session is not None
    assert not session._tracked and not session.admission._waiting and not session.saving.pinned_blocks
