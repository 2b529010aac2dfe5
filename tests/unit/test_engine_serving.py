"""The HTTP front with OpenAI's own client, in one process and with prompts and answers computed apart."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import uvicorn
from engine_families import add_tokenizer, make_ced, make_family, one_thread  # noqa: F401  (one_thread)
from engine_support import FakeCache

from cachesvc.engine.cache import block_layout
from cachesvc.engine.engine import Engine, EngineConfig
from cachesvc.engine.errors import RequestError
from cachesvc.engine.handoff import record_bytes
from cachesvc.engine.models.base import Model
from cachesvc.engine.models.loading import load_model
from cachesvc.engine.request import SamplingParams
from cachesvc.engine.serving.backend import BackendError, Job
from cachesvc.engine.serving.chat import Chat, TextStream
from cachesvc.engine.serving.openai import OpenAIServer
from cachesvc.engine.serving.router import Router
from cachesvc.engine.serving.thread import EngineThread
from cachesvc.engine.serving.worker import worker_app

# Importing transformers alone can take a minute on a busy machine.
pytestmark = pytest.mark.timeout(400)

CONFIG = EngineConfig(num_pages=400, page_size=16, batch_invariant=True, async_scheduling=True)
LONG = [{"role": "user", "content": "tell me about caches. " * 20}]
MODEL = "tiny"


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Serves `app` on a free port; gives its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_family(tmp_path_factory.mktemp("served"), "qwen3", vocab_size=320, eos_token_id=2)
    add_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> Model[Any]:
    return load_model(path)


@pytest.fixture(scope="module")
def engine(model: Model[Any]) -> Iterator[Engine]:
    yield Engine(model, FakeCache(model.config), CONFIG)


@pytest.fixture(scope="module")
def url(path: Path, engine: Engine) -> Iterator[str]:
    thread = EngineThread(engine)
    with listening(OpenAIServer(thread, Chat(path, MODEL), model=MODEL, context=2000).app) as address:
        yield address
    thread.close()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


def check(usage: Any, hit: int) -> None:
    """The fields add up, and say `hit`."""
    extra = usage.model_extra
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
    assert extra["prompt_cache_hit_tokens"] + extra["prompt_cache_miss_tokens"] == usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == extra["prompt_cache_hit_tokens"] == hit


def test_a_chat_twice_hits_the_second_time(client: openai.OpenAI) -> None:
    answers = [
        client.chat.completions.create(model=MODEL, messages=LONG, seed=3, max_completion_tokens=20) for _ in range(2)
    ]
    check(answers[0].usage, 0)
    check(answers[1].usage, (answers[1].usage.prompt_tokens - 1) // 128 * 128)
    first, second = (answer.choices[0] for answer in answers)
    assert first.message.content == second.message.content != ""
    assert first.finish_reason == "length" and answers[0].usage.completion_tokens == 20


def test_a_stream_says_what_a_whole_answer_says(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "messages": LONG, "temperature": 0.7, "seed": 4, "max_tokens": 30}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert len(chunks) > 5
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == 30
    check(chunks[-1].usage, (whole.usage.prompt_tokens - 1) // 128 * 128)


def test_completions_of_text_and_of_tokens(client: openai.OpenAI, path: Path) -> None:
    text = "once upon a time"
    kind: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    answers = [
        client.completions.create(prompt=prompt, **kind) for prompt in (text, [text], Chat(path, MODEL).encode(text))
    ]
    assert len({answer.choices[0].text for answer in answers}) == 1
    streamed = "".join(c.choices[0].text for c in client.completions.create(prompt=text, stream=True, **kind))
    assert streamed == answers[0].choices[0].text


def test_a_stop_text_ends_the_answer_and_is_not_in_it(client: openai.OpenAI) -> None:
    kind: dict[str, Any] = {"model": MODEL, "prompt": "abc", "seed": 1, "max_tokens": 40}
    whole = client.completions.create(**kind).choices[0].text
    stop = next(whole[i : i + 2] for i in range(8, len(whole)) if whole[i : i + 2].isascii())
    for answer in (
        client.completions.create(**kind, stop=[stop, "never there"]).choices[0].text,
        "".join(c.choices[0].text for c in client.completions.create(**kind, stop=stop, stream=True)),
    ):
        assert answer == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "gpt-9"}, "'gpt-9' is not served here, only 'tiny'"),
        ({"n": 2}, "n: Input should be 1"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "takes text only"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "the model's context is 2000"),
        ({"max_tokens": 5000}, "exceed the model's context"),
    ],
)
def test_what_cannot_be_served_is_said(change: dict[str, Any], message: str, client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**{"model": MODEL, "messages": LONG, **change, "stream": stream})


def test_bodies_that_are_not_requests(url: str) -> None:
    for body in (b"{", b"[]", b"null"):
        reply = httpx2.post(f"{url}/v1/chat/completions", content=body)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert httpx2.get(f"{url}/v1/models").json()["data"][0]["id"] == MODEL
    assert httpx2.get(f"{url}/health").json() == {"healthy": True}


def test_many_at_once_get_what_each_gets_alone(url: str, client: openai.OpenAI) -> None:
    def request(number: int) -> dict[str, Any]:
        return {"model": MODEL, "prompt": f"number {number}", "seed": number, "max_tokens": 15}

    async def together() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as many:
            return list(await asyncio.gather(*(many.completions.create(**request(i)) for i in range(10))))

    texts = [answer.choices[0].text for answer in asyncio.run(together())]
    assert texts == [client.completions.create(**request(i)).choices[0].text for i in range(10)]
    assert len(set(texts)) == 10


def test_a_client_that_goes_away_frees_the_engine(engine: Engine, client: openai.OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt="go on", max_tokens=1500, stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while engine.has_requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert engine.free_pages == CONFIG.num_pages


def test_text_is_held_back_while_it_may_be_a_stop_or_half_of_a_character(path: Path) -> None:
    chat = Chat(path, MODEL)
    tokens = chat.encode("aé STO STOP b")
    stream, said = TextStream(chat, ["STOP"]), []
    for token in tokens:
        said.append(stream.push(token, last=False))
        if stream.stopped:
            break
    assert "".join(said) == "aé STO "
    assert said[:3] == ["a", "", "é"]
    assert "S" not in said[4]


def test_a_checkpoint_without_a_template_speaks_as_deepseek_does(tmp_path: Path, path: Path) -> None:
    from engine_families import CED

    checkpoint = make_ced(tmp_path / "ced", CED | {"vocab_size": 320})
    add_tokenizer(checkpoint)
    (checkpoint / "tokenizer_config.json").unlink()
    chat = Chat(checkpoint, "ced")
    text = chat.decode(chat.prompt({"messages": [{"role": "user", "content": "Hello"}]}))
    assert "Hello" in text and "User" in text and "Assistant" in text
    with pytest.raises(RequestError, match="cannot be converted"):
        chat.prompt({"messages": [{"role": "nobody", "content": "Hello"}]})


def test_jobs_travel_as_json() -> None:
    job = Job([1, 2], SamplingParams(stop_token_ids=(3,), seed=4), "agent", b"\x01", "a", None)
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    for wrong in ({}, [], {**job.to_json(), "params": {}}, {**job.to_json(), "tokens": ["x"]}):
        with pytest.raises(RequestError):
            Job.from_json(wrong)


class Split:
    """Two workers of each role over one cache, and a front."""

    def __init__(self, model: Model[Any], path: Path, stack: ExitStack) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.records: dict[bytes, bytes] = {}
        self.threads = []
        urls = []
        for _ in range(4):
            cache = FakeCache(model.config, blocks=self.blocks)
            records = FakeCache(model.config, blocks=self.records)
            records.payload_bytes = record_bytes(block_layout(model.config, model.dtype))
            thread = EngineThread(Engine(model, cache, CONFIG, handoffs=records))
            stack.callback(thread.close)
            self.threads.append(thread)
            urls.append(stack.enter_context(listening(worker_app(thread, [cache, records]))))
        self.prefill, self.decode = urls[:2], urls[2:]
        self.path = path

    def front(self, prefill: list[str] | None = None, decode: list[str] | None = None) -> Any:
        router = Router(prefill or self.prefill, decode or self.decode)
        return listening(OpenAIServer(router, Chat(self.path, MODEL), model=MODEL, context=2000).app)


@pytest.fixture(scope="module")
def split(model: Model[Any], path: Path) -> Iterator[Split]:
    with ExitStack() as stack:
        yield Split(model, path, stack)


def ask(url: str, **change: Any) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        return client.chat.completions.create(
            **{"model": MODEL, "messages": LONG, "seed": 5, "max_tokens": 20, **change}
        )


def test_apart_is_as_together(split: Split, client: openai.OpenAI) -> None:
    with split.front() as url:
        for seed in range(4):
            messages = [{"role": "user", "content": f"{seed}: " + "and so on " * 30 * seed}]
            apart = ask(url, messages=messages, seed=seed)
            together = client.chat.completions.create(model=MODEL, messages=messages, seed=seed, max_tokens=20)
            assert apart.choices == together.choices
            check(apart.usage, 0)
        again = ask(url, messages=messages, seed=3)
        check(again.usage, (again.usage.prompt_tokens - 1) // 128 * 128)
        assert ask(url, max_tokens=1).usage.completion_tokens == 1
    assert len(split.records) >= 6


DEAD = "http://127.0.0.1:9"


@pytest.mark.parametrize("dead", ["one prefill", "all prefill", "one decode"])
def test_a_worker_that_is_gone_costs_no_request(dead: str, split: Split, client: openai.OpenAI) -> None:
    prefill = {"one prefill": [DEAD, split.prefill[0]], "all prefill": [DEAD]}.get(dead, split.prefill)
    decode = [DEAD, split.decode[0]] if dead == "one decode" else split.decode
    expected = client.chat.completions.create(model=MODEL, messages=LONG, seed=5, max_tokens=20)
    with split.front(prefill, decode) as url:
        for _ in range(3):
            assert ask(url).choices == expected.choices


def test_without_anyone_to_decode_it_is_an_error(split: Split) -> None:
    with split.front(decode=[DEAD]) as url:
        with pytest.raises(openai.InternalServerError, match="none of the 1 decode workers"):
            ask(url)
        assert httpx2.get(f"{url}/health").status_code == 503
    with pytest.raises(ValueError, match="at least one"):
        Router([], [DEAD])


def test_a_job_that_a_worker_refuses_is_refused(split: Split) -> None:
    with split.front() as url, pytest.raises(openai.BadRequestError, match="exceed the model's context"):
        ask(url, max_tokens=5000)


def test_an_engine_that_breaks_leaves_nobody_waiting(model: Model[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, FakeCache(model.config), replace(CONFIG, async_scheduling=False))
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def broken() -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine, "step", broken)
    thread = EngineThread(engine)

    async def one() -> None:
        async for _ in thread.generate(Job([1, 2, 3], SamplingParams())):
            pass

    with pytest.raises(BackendError, match="the engine has stopped"):
        asyncio.run(one())
    with pytest.raises(BackendError, match="the engine has stopped"):
        asyncio.run(one())
