"""The rules, one function each; what a function says in its first line is what holds for an adapter that passes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from cachesvc.connector.conformance.daemon import Daemon
from cachesvc.connector.conformance.driver import Answer, Driver, Engine

SETTLE_S: Final = 60.0


class Violation(AssertionError):
    """A rule does not hold; says which prompt, and what was expected."""


class Scene:
    """Two engines on one daemon, and prompts that no rule shares with another."""

    def __init__(self, driver: Driver, daemon: Daemon, first: Engine, second: Engine, name: str) -> None:
        self.driver, self.daemon, self.first, self.second = driver, daemon, first, second
        self._source = random.Random(name)

    def prompt(self, tokens: int, after: Sequence[int] = ()) -> list[int]:
        """`after`, and so many tokens more."""
        return [*after, *(self._source.randrange(10, self.driver.vocabulary) for _ in range(tokens))]

    def run(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        *,
        salt: str = "",
        abort: Mapping[int, int] | None = None,
    ) -> list[Answer]:
        started = time.monotonic()
        answers = engine.run(prompts, salt=salt, abort=abort)
        seconds = time.monotonic() - started
        need(len(answers) == len(prompts), f"{len(answers)} answers came to {len(prompts)} prompts")
        need(
            seconds <= self.driver.deadline_s,
            f"an answer took {seconds:.0f} s, more than the {self.driver.deadline_s:.0f} s that it may",
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            most = self.most(len(prompt))
            need(
                0 <= answer.hit_tokens <= most, f"{answer.hit_tokens} tokens of a prompt of {len(prompt)} count as hit"
            )
        return answers

    def one(self, engine: Engine, prompt: Sequence[int], *, salt: str = "") -> Answer:
        return self.run(engine, [prompt], salt=salt)[0]

    def store(self, prompt: Sequence[int], *, salt: str = "") -> Answer:
        """Computed by the first engine, and stored."""
        answer = self.one(self.first, prompt, salt=salt)
        self.settle()
        return answer

    def settle(self) -> None:
        need(self.first.settle(SETTLE_S), "what the engine has to store is not stored in time")
        self.daemon.settled_blocks(SETTLE_S)

    def most(self, tokens: int) -> int:
        """The longest hit that a prompt can have: whole blocks, and one token is always computed."""
        return max(0, (tokens - 1) // self.driver.block_tokens * self.driver.block_tokens)

    def full(self, tokens: int) -> int:
        """The hit that it must have when all of it is stored."""
        hit = self.most(tokens) - self.driver.replayed_tokens
        return max(0, hit)

    def until_hit(self, prompt: Sequence[int], expected: Any) -> None:
        """The second engine finds the daemon again, by itself, and then hits."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            answer = self.one(self.second, prompt)
            same(answer, expected, "after the daemon came back")
            if answer.hit_tokens >= self.full(len(prompt)):
                return
            need(time.monotonic() < deadline, "the engine does not find a daemon that has come back")
            time.sleep(0.2)


def need(condition: bool, text: str) -> None:
    if not condition:
        raise Violation(text)


def same(answer: Answer, expected: Answer, when: str) -> None:
    need(answer.output == expected.output, f"{when} the output is {answer.output!r}, and was {expected.output!r}")


def hits(scene: Scene) -> None:
    """What one engine has computed another one loads, and computes the same."""
    blocks = scene.driver.block_tokens
    for tokens in (3 * blocks + 1, 4 * blocks, 5 * blocks + blocks // 2):
        prompt = scene.prompt(min(tokens, scene.driver.max_tokens))
        cold = scene.store(prompt)
        need(cold.hit_tokens == 0, f"{cold.hit_tokens} tokens of a new prompt count as hit")
        warm = scene.one(scene.second, prompt)
        same(warm, cold, "after a hit")
        wanted = scene.full(len(prompt))
        need(warm.hit_tokens == wanted, f"{warm.hit_tokens} tokens were hit of a prompt of {len(prompt)}, not {wanted}")


def partial_hits(scene: Scene) -> None:
    """A prompt that shares a beginning hits as far as it is shared, and no further."""
    blocks = scene.driver.block_tokens
    shared = scene.prompt(3 * blocks)
    scene.store(scene.prompt(blocks + 3, after=shared))
    for cut in (3 * blocks, 2 * blocks + 1, blocks - 1):
        prompt = scene.prompt(2 * blocks, after=shared[:cut])
        answer = scene.one(scene.second, prompt)
        most = cut // blocks * blocks
        need(answer.hit_tokens <= most, f"{answer.hit_tokens} tokens were hit where {cut} are shared")
        need(answer.hit_tokens == max(0, most - scene.driver.replayed_tokens), f"only {answer.hit_tokens} were hit")
        scene.settle()
        same(scene.one(scene.first, prompt), answer, "on another engine")


def short_prompts(scene: Scene) -> None:
    """A prompt of less than a block, or of exactly one, is computed like any other."""
    for tokens in (1, scene.driver.block_tokens - 1, scene.driver.block_tokens):
        prompt = scene.prompt(tokens)
        same(scene.one(scene.second, prompt), scene.store(prompt), "on another engine")


def salts(scene: Scene) -> None:
    """A salt separates tenants."""
    if not scene.driver.salts:
        return
    prompt = scene.prompt(3 * scene.driver.block_tokens + 5)
    cold = scene.store(prompt, salt="tenant a")
    for salt in ("tenant b", ""):
        answer = scene.one(scene.second, prompt, salt=salt)
        need(answer.hit_tokens == 0, f"tenant {salt!r} hits {answer.hit_tokens} tokens of another's")
    answer = scene.one(scene.second, prompt, salt="tenant a")
    same(answer, cold, "after a hit under a salt")
    need(answer.hit_tokens == scene.full(len(prompt)), f"the same tenant hits {answer.hit_tokens} tokens")


def many_at_once(scene: Scene) -> None:
    """Prompts that run together and share beginnings are all right."""
    blocks = scene.driver.block_tokens
    shared = scene.prompt(2 * blocks)
    prompts = [scene.prompt(7 + number * blocks // 3, after=shared) for number in range(6)]
    cold = scene.run(scene.first, prompts)
    scene.settle()
    for answer, before in zip(scene.run(scene.second, prompts), cold, strict=True):
        same(answer, before, "among others")
    need(scene.second.held() == 0, f"{scene.second.held()} blocks are held when nothing runs")


def aborts(scene: Scene) -> None:
    """Requests that are given up, at whatever moment, leave nothing behind, and others are not touched."""
    blocks = scene.driver.block_tokens
    prompts = [scene.prompt(3 * blocks + 20 * number) for number in range(5)]
    cold = scene.run(scene.first, prompts)
    scene.settle()
    for moment in range(4):
        given_up = {0: moment, 3: moment + 1}
        answers = scene.run(scene.second, prompts, abort=given_up)
        for index, (answer, before) in enumerate(zip(answers, cold, strict=True)):
            if index not in given_up:
                same(answer, before, f"beside requests given up after {moment} steps")
        need(scene.second.held() == 0, f"{scene.second.held()} blocks are held by requests that were given up")


def restarts(scene: Scene) -> None:
    """What was stored is there after the daemon was stopped and started, and the engine finds it by itself."""
    prompt = scene.prompt(4 * scene.driver.block_tokens + 3)
    cold = scene.store(prompt)
    scene.daemon.stop()
    same(scene.one(scene.second, prompt), cold, "without a daemon")
    scene.daemon.start()
    scene.until_hit(prompt, cold)


def killed(scene: Scene) -> None:
    """A daemon that is killed costs hits, and nothing else."""
    prompts = [scene.prompt(3 * scene.driver.block_tokens + 9) for _ in range(3)]
    cold = scene.run(scene.first, prompts)
    scene.settle()
    scene.daemon.kill()
    for answer, before in zip(scene.run(scene.second, prompts), cold, strict=True):
        same(answer, before, "with the daemon killed")
        need(answer.hit_tokens == 0, f"{answer.hit_tokens} tokens came out of a cache that is not there")
    new = scene.prompt(3 * scene.driver.block_tokens + 9)
    scene.one(scene.second, new)
    scene.daemon.start()
    scene.run(scene.first, prompts)  # what had not reached the disk is computed, and stored, once more
    scene.settle()
    scene.until_hit(prompts[0], cold[0])
    need(scene.second.held() == 0, f"{scene.second.held()} blocks are held when nothing runs")


def stopped(scene: Scene) -> None:
    """A daemon that does not answer any more is given up in time."""
    prompts = [scene.prompt(3 * scene.driver.block_tokens + 9) for _ in range(3)]
    cold = scene.run(scene.first, prompts)
    scene.settle()
    scene.daemon.freeze()
    try:
        for answer, before in zip(scene.run(scene.second, prompts), cold, strict=True):
            same(answer, before, "with a daemon that hangs")
    finally:
        scene.daemon.thaw()
    scene.until_hit(prompts[0], cold[0])


def lying(scene: Scene) -> None:
    """Nothing that was changed on disk is ever used."""
    prompts = [scene.prompt(3 * scene.driver.block_tokens + 9) for _ in range(3)]
    cold = scene.run(scene.first, prompts)
    scene.settle()
    scene.daemon.stop()
    need(scene.daemon.spoil() > 0, "nothing was stored on disk")
    scene.daemon.start()
    deadline = time.monotonic() + SETTLE_S
    for _ in range(2):
        for answer, before in zip(scene.run(scene.second, prompts), cold, strict=True):
            same(answer, before, "after bits were flipped on disk")
        need(time.monotonic() < deadline, "it takes too long")
    need(scene.second.held() == 0, f"{scene.second.held()} blocks are held when nothing runs")


RULES: Final[tuple[Callable[[Scene], None], ...]] = (
    *(hits, partial_hits, short_prompts, salts, many_at_once, aborts),
    *(restarts, killed, stopped, lying),
)
"""In this order: what breaks the store comes last."""
