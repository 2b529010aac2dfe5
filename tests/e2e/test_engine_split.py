"""Prefill and decode in processes of their own, with a real daemon between them, and kills."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from conftest import Daemon
from engine_families import add_tokenizer, make_family

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
LONG = "all work and no play makes a dull boy. "


class Process:
    """One ``engine serve``."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "cachesvc.engine", "serve", "--port", "0", "--batch-invariant", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "http://" in line, line
        self.url = "http://" + line.split("http://")[1].strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_family(tmp_path_factory.mktemp("served"), "qwen3", vocab_size=320, eos_token_id=2)
    add_tokenizer(path)
    return path


class Cluster:
    def __init__(self, path: Path, daemon: Daemon, stack: ExitStack) -> None:
        def start(role: str, *more: str) -> Process:
            process = Process("--model", str(path), "--role", role, "--cache", daemon.address, *more)
            stack.callback(process.kill)
            return process

        self.name = path.name
        self.prefill, self.decode = [start("prefill") for _ in range(2)], [start("decode") for _ in range(2)]
        workers = [option for p in self.prefill for option in ("--prefill", p.url)]
        workers += [option for d in self.decode for option in ("--decode", d.url)]
        self.front = start("front", *workers)
        self.both = start("both", "--no-cache")

    def ask(self, url: str, prompt: str, **change: Any) -> Any:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            return client.completions.create(
                **{"model": self.name, "prompt": prompt, "seed": 5, "max_tokens": 24, **change}
            )


@pytest.fixture
def cluster(path: Path, make_daemon: Callable[..., Daemon]) -> Iterator[Cluster]:
    daemon = make_daemon("--class", "handoff=10m", "--class", "agent=3d").start()
    with ExitStack() as stack:
        yield Cluster(path, daemon, stack)


def test_twenty_prompts_give_the_tokens_of_one_process(cluster: Cluster) -> None:
    for number in range(20):
        prompt = f"{number}: " + LONG * (number % 7) * 6
        apart, together = (cluster.ask(p.url, prompt, seed=number) for p in (cluster.front, cluster.both))
        assert apart.choices == together.choices
        usage = apart.usage.model_extra
        assert usage["prompt_cache_hit_tokens"] + usage["prompt_cache_miss_tokens"] == apart.usage.prompt_tokens


@contextmanager
def asked(cluster: Cluster, count: int, prompt: str, **change: Any) -> Iterator[list[Any]]:
    """Several requests under way; their answers, or what they failed with, when they have ended."""
    answers: list[Any] = []

    def one(number: int) -> None:
        try:
            answers.append(cluster.ask(cluster.front.url, f"{number} {prompt}", **change).choices)
        except openai.OpenAIError as error:
            answers.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    yield answers
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_loses_no_request(role: str, cluster: Cluster) -> None:
    cluster.ask(cluster.front.url, "everything is warm")
    change = {"max_tokens": 60}
    expected = [cluster.ask(cluster.both.url, f"{n} {LONG * 15}", **change).choices for n in range(4)]
    with asked(cluster, 4, LONG * 15, **change) as answers:
        time.sleep(0.4)
        getattr(cluster, role)[0].kill()
    assert sorted(a[0].text for a in answers) == sorted(e[0].text for e in expected)


def test_without_any_prefill_worker_decode_computes(cluster: Cluster) -> None:
    expected = cluster.ask(cluster.both.url, LONG * 20).choices
    for worker in cluster.prefill:
        worker.kill()
    assert cluster.ask(cluster.front.url, LONG * 20).choices == expected


def test_the_daemon_gone_costs_hits_and_no_answers(path: Path, make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon("--class", "handoff=10m", "--class", "agent=3d").start()
    with ExitStack() as stack:
        cluster = Cluster(path, daemon, stack)
        expected = cluster.ask(cluster.both.url, LONG * 20).choices
        daemon.kill()
        assert cluster.ask(cluster.front.url, LONG * 20).choices == expected
        assert httpx2.get(cluster.front.url + "/health").status_code == 200
