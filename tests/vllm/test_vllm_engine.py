"""vLLM's real engine with the connector: hits between processes, and every way in which a daemon can fail.

An engine takes half a minute to start, so tests share engines; each test uses prompts of its own.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Client, Daemon, wait_until
from tiny_models import VOCABULARY, make_adapter, make_model
from vllm_engines import Engine

BLOCK = 128
BOUND = 20.0
"""Seconds within which an answer must come, whatever the daemon does: generous, a request takes one."""


def prompt_of(seed: int | str, tokens: int = 1000) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(10, VOCABULARY) for _ in range(tokens)]


def hit_of(answer: dict[str, Any]) -> int:
    return int(answer["params"]["cachesvc"]["hit_tokens"])


def stored_blocks(daemon: Daemon) -> int:
    with Client(daemon.address) as client:
        return int(client.report().blocks)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Daemon]]:
    """Makes daemons, not started, that live as long as the module's tests."""
    made: list[Daemon] = []

    def make() -> Daemon:
        directory = tmp_path_factory.mktemp("daemon")
        made.append(Daemon(directory / "store", tmp_path_factory.mktemp("s") / "s", directory / "log"))
        return made[-1]

    yield make
    for daemon in made:
        if daemon.process is not None and daemon.process.poll() is None:
            os.kill(daemon.process.pid, signal.SIGCONT)
            daemon.kill()


@pytest.fixture(scope="module")
def daemon(daemons: Callable[[], Daemon]) -> Daemon:
    return daemons().start()


@pytest.fixture(scope="module")
def cold(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Without a connector: what every answer must be."""
    with Engine(make_model(models, "llama"), None, tmp_path_factory.mktemp("cold") / "log", dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def pair(models: Path, daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that share one daemon. Small steps, so that prompts are computed in chunks."""
    logs = tmp_path_factory.mktemp("pair")
    engines = [
        Engine(
            make_model(models, "llama"),
            daemon.address,
            logs / str(number),
            environment={"PYTHONHASHSEED": str(number)},
            dtype="float32",
            max_num_batched_tokens=300,
            connector={"decline_slow_loads": False},
        )
        for number in range(2)
    ]
    yield engines[0], engines[1]
    for engine in engines:
        engine.close()


def saved(daemon: Daemon, blocks: int) -> None:
    """Waits until as many blocks are stored."""
    wait_until(lambda: stored_blocks(daemon) >= blocks)


def test_what_one_engine_has_computed_another_loads(pair: tuple[Engine, Engine], cold: Engine, daemon: Daemon) -> None:
    prompt = prompt_of("share")
    before = stored_blocks(daemon)
    expected = cold.run(prompt, max_tokens=160)[0]
    first = pair[0].run(prompt, max_tokens=160)[0]
    saved(daemon, before + 9)  # 1,000 tokens and 160 of the answer: those of the answer are blocks too
    second = pair[1].run(prompt, max_tokens=160)[0]
    assert first["tokens"] == second["tokens"] == expected["tokens"]
    assert (hit_of(first), hit_of(second)) == (0, 7 * BLOCK)
    assert second["cached"] == 7 * BLOCK
    assert second["params"]["cachesvc"] == {
        "prompt_tokens": 1000,
        "hit_tokens": 7 * BLOCK,
        "source": {"dram": 7 * BLOCK},
        "reason": "hit",
    }
    turn = prompt + expected["tokens"] + prompt_of("next turn", 40)
    third = pair[1].run(turn)[0]
    assert hit_of(third) == 9 * BLOCK
    assert third["tokens"] == cold.run(turn)[0]["tokens"]


def test_a_salt_separates_tenants_and_hints_are_heard(pair: tuple[Engine, Engine], daemon: Daemon) -> None:
    prompt, quiet = prompt_of("salted"), prompt_of("not stored")
    before = stored_blocks(daemon)
    pair[0].run(prompt, salt="tenant a", hints={"traffic_class": "chat"})
    saved(daemon, before + 7)
    assert hit_of(pair[1].run(prompt, salt="tenant b")[0]) == 0
    assert hit_of(pair[1].run(prompt)[0]) == 0
    assert hit_of(pair[1].run(prompt, salt="tenant a", hints={"traffic_class": "chat"})[0]) == 7 * BLOCK
    with Client(daemon.address) as client:
        rows = [row for row in client.report().lookups if row.traffic_class == "chat"]
        assert sum(sum(row.hit_tokens.values()) for row in rows) == 7 * BLOCK
        assert sum(row.input_tokens for row in rows) == 2 * len(prompt)
    pair[0].run(quiet, hints={"no_store": True})
    pair[0].run(prompt_of("after it"))
    assert hit_of(pair[1].run(quiet)[0]) == 0


def test_many_requests_with_a_shared_prefix_some_aborted(
    pair: tuple[Engine, Engine], cold: Engine, daemon: Daemon
) -> None:
    shared = prompt_of("system", 600)
    prompts = [shared + prompt_of(f"user {number}", 50 + 40 * number) for number in range(12)]
    expected = [answer["tokens"] for answer in cold.run(*prompts)]
    before = stored_blocks(daemon)
    assert [answer["tokens"] for answer in pair[0].run(*prompts)] == expected
    saved(daemon, before + 4)
    again = pair[1].run(*prompts, abort={"3": 1, "7": 2})
    assert all(again[number].get("aborted") for number in (3, 7))
    rest = [number for number in range(12) if number not in (3, 7)]
    assert [again[number]["tokens"] for number in rest] == [expected[number] for number in rest]
    assert all(hit_of(again[number]) >= 4 * BLOCK for number in rest)
    assert pair[1].run(prompts[3])[0]["tokens"] == expected[3]


def test_a_restarted_daemon_is_used_again(pair: tuple[Engine, Engine], cold: Engine, daemon: Daemon) -> None:
    prompt = prompt_of("restart")
    before = stored_blocks(daemon)
    expected = cold.run(prompt)[0]["tokens"]
    pair[0].run(prompt)
    saved(daemon, before + 7)
    daemon.restart()
    deadline = time.monotonic() + BOUND
    while True:
        answer = pair[1].run(prompt)[0]
        assert answer["tokens"] == expected
        if hit_of(answer) == 7 * BLOCK:
            break
        assert time.monotonic() < deadline, "the daemon was not found again"
    assert answer["params"]["cachesvc"]["source"] == {"disk": 7 * BLOCK}


def test_stopped_killed_and_damaged(pair: tuple[Engine, Engine], cold: Engine, daemon: Daemon) -> None:
    prompts = [prompt_of(f"fault {number}") for number in range(6)]
    expected = [answer["tokens"] for answer in cold.run(*prompts)]
    before = stored_blocks(daemon)
    pair[0].run(*prompts)
    saved(daemon, before + 6 * 7)

    daemon.freeze()
    for number in (0, 1):
        started = time.monotonic()
        assert pair[1].run(prompts[number])[0]["tokens"] == expected[number]
        assert time.monotonic() - started < BOUND
    assert daemon.process is not None
    os.kill(daemon.process.pid, signal.SIGCONT)
    recovered(pair[1], prompts[2], expected[2])

    pair[1].send(prompts=prompts)  # killed while it loads, or a little later
    daemon.kill()
    assert [answer["tokens"] for answer in pair[1].receive()] == expected
    daemon.start()
    recovered(pair[1], prompts[3], expected[3])

    daemon.stop()
    for segment in daemon.store.rglob("*.seg"):
        damage(segment)
    daemon.start()
    deadline, met = time.monotonic() + BOUND, 0
    while not met:
        answers = pair[1].run(*prompts)
        assert [(answer["tokens"], answer["reason"]) for answer in answers] == [(one, "length") for one in expected]
        with Client(daemon.address) as client:
            met = sum(row.miss_tokens["corrupt"] for row in client.report().lookups)
        assert time.monotonic() < deadline, "nothing damaged was met"
    recovered(pair[0], prompts[0], expected[0])  # it was stored again, and only the one that failed avoids it a while


def recovered(engine: Engine, prompt: list[int], expected: list[int]) -> None:
    deadline = time.monotonic() + BOUND
    while True:
        answer = engine.run(prompt)[0]
        assert answer["tokens"] == expected
        if hit_of(answer):
            return
        assert time.monotonic() < deadline, "the daemon was not found again"
        time.sleep(0.2)


def damage(segment: Path) -> None:
    """A byte in every page of payload but the first few: each record that is read will fail its checksum."""
    with segment.open("r+b") as file:
        for at in range(8192, segment.stat().st_size, 16384):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))


def test_a_cache_reset_begins_anew(pair: tuple[Engine, Engine], daemon: Daemon) -> None:
    prompt = prompt_of("reset")
    pair[0].run(prompt)
    pair[0].send(reset="connector")
    assert pair[0].receive() is True
    assert hit_of(pair[0].run(prompt)[0]) == 0


def test_preemption_in_a_tiny_pool_without_a_daemon_and_with_one(
    models: Path, cold: Engine, daemons: Callable[[], Daemon], tmp_path: Path
) -> None:
    """The daemon is absent when the engine starts."""
    daemon = daemons()
    prompts = [prompt_of(f"preempted {number}", 500) for number in range(6)]
    expected = [answer["tokens"] for answer in cold.run(*prompts, max_tokens=150)]
    with Engine(
        make_model(models, "llama"),
        daemon.address,
        tmp_path / "log",
        dtype="float32",
        num_gpu_blocks_override=16,
        max_model_len=1024,
        enable_prefix_caching=True,
        connector={"decline_slow_loads": False, "probe_max_s": 0.3},
    ) as engine:
        absent = engine.run(*prompts, max_tokens=150)
        assert [answer["tokens"] for answer in absent] == expected
        daemon.start()
        recovered_with = prompt_of("comes up", 500)
        deadline = time.monotonic() + BOUND
        while not stored_blocks(daemon):
            engine.run(recovered_with)
            recovered_with = prompt_of(time.monotonic(), 500)
            assert time.monotonic() < deadline
        for _ in range(2):
            assert [answer["tokens"] for answer in engine.run(*prompts, max_tokens=150)] == expected


def test_adapters_do_not_share_and_their_names_do_not_matter(models: Path, daemon: Daemon, tmp_path: Path) -> None:
    one, two = (str(make_adapter(tmp_path / str(seed), seed)) for seed in (1, 2))
    prompt = prompt_of("adapters", 600)
    before = stored_blocks(daemon)
    with Engine(
        make_model(models, "llama"),
        daemon.address,
        tmp_path / "log",
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        connector={"decline_slow_loads": False},
    ) as engine:
        asked = [{}, {"lora": ["x", 1, one]}, {"lora": ["y", 2, two]}]
        first = [engine.run(prompt, **command)[0] for command in asked]
        assert [hit_of(answer) for answer in first] == [0, 0, 0]
        saved(daemon, before + 3 * 4)
        asked[2] = {"lora": ["z", 3, two]}
        again = [engine.run(prompt, **command)[0] for command in asked]
    assert [hit_of(answer) for answer in again] == [4 * BLOCK] * 3
    tokens = [answer["tokens"] for answer in first]
    assert [answer["tokens"] for answer in again] == tokens
    assert tokens[0] != tokens[1] != tokens[2] != tokens[0]


def test_two_ranks_have_a_shard_each_and_one_pass_is_counted(
    models: Path, daemons: Callable[[], Daemon], tmp_path: Path
) -> None:
    daemon, prompt = daemons().start(), prompt_of("two ranks")
    with Engine(
        make_model(models, "llama"),
        daemon.address,
        tmp_path / "log",
        dtype="float32",
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
        connector={"decline_slow_loads": False},
    ) as engine:
        cold = engine.run(prompt)[0]
        saved(daemon, 7 * 2)
        warm = engine.run(prompt)[0]
    assert warm["tokens"] == cold["tokens"] and hit_of(warm) == 7 * BLOCK
    with Client(daemon.address) as client:
        (row,) = client.report().lookups
    assert (row.passes, row.input_tokens, dict(row.hit_tokens)) == (2, 2000, {"dram": 7 * BLOCK})


@pytest.mark.parametrize("name", ["gptoss", "gemma3"])
def test_groups_with_a_window(name: str, models: Path, daemon: Daemon, tmp_path: Path) -> None:
    """A hit must give what a hit in vLLM's own cache gives: cold tokens may differ, for a batch of another shape."""
    model = make_model(models, name)
    prompt = prompt_of(name)
    before = stored_blocks(daemon)
    with Engine(model, daemon.address, tmp_path / "first", enable_prefix_caching=True) as engine:
        engine.run(prompt)
        own = engine.run(prompt)[0]
        assert own["cached"] == 7 * BLOCK and hit_of(own) == 0
        saved(daemon, before + 7)
    with Engine(
        model, daemon.address, tmp_path / "second", connector={"decline_slow_loads": False}, max_num_batched_tokens=300
    ) as engine:
        answer = engine.run(prompt)[0]
    assert hit_of(answer) == 7 * BLOCK
    assert answer["tokens"] == own["tokens"]


def test_mla_is_cached_where_vllm_can_continue_a_prefix_and_left_alone_elsewhere(
    models: Path, daemon: Daemon, tmp_path: Path
) -> None:
    """On CPUs without AMX it cannot. With AMX a hit's tokens are not a cold prompt's, but those of vLLM's own hit."""
    model, prompt = make_model(models, "deepseek"), prompt_of("mla")
    with Engine(model, daemon.address, tmp_path / "log") as engine:
        cold = engine.run(prompt)[0]
        if "runs without cachesvc" in (tmp_path / "log").read_text():
            assert [cold["params"], engine.run(prompt)[0]["params"]] == [None, None]
            return
    with (
        Engine(model, daemon.address, tmp_path / "other") as engine,
        Engine(model, None, tmp_path / "own", enable_prefix_caching=True) as own,
    ):
        hit = engine.run(prompt)[0]
        assert hit_of(hit) == 7 * BLOCK
        assert own.run(prompt)[0]["cached"] == 0
        again = own.run(prompt)[0]
        assert again["cached"] >= 7 * BLOCK
        assert hit["tokens"] == again["tokens"]
