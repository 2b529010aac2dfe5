"""The adapter in DeepInfer's real engine, worker step and entry point, on a model of its compiled module."""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import engines
import native
import pytest
import schedules
from conftest import Client, Daemon, wait_until
from deepinfer import AttrDict
from deepinfer.entrypoints import llm as original
from deepinfer.worker import cache_engine
from engines import SimulatedEngine, add, make_engine, params, run
from simulated import LAYERS, PAYLOAD, ROW, answer_to

from cachesvc.connector.deepinfer import LLM, CachedLLMEngine
from cachesvc.connector.deepinfer.pages import Unsupported, payload_bytes_of
from cachesvc.connector.deepinfer.settings import Settings, parse_settings
from cachesvc.keys import BLOCK_TOKENS

logging.disable(logging.INFO)

SCHEDULES = int(os.environ.get("CACHESVC_SCHEDULES", "1200"))
"""Random schedules in all, in `PARTS` parts: each part is a test, so that they run side by side."""
PARTS = 8


def prompt_of(seed: int | str, tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(8, 1000) for _ in range(tokens)]


@pytest.fixture
def engine_at(request: pytest.FixtureRequest) -> Iterator[Callable[..., SimulatedEngine]]:
    """Makes engines on a daemon's address, all of one namespace that is the test's own."""
    made: list[SimulatedEngine] = []

    def make(address: str, options: dict[str, Any] | None = None, **changes: Any) -> SimulatedEngine:
        given = {"address": address, "revision": request.node.name, "failed_hit_s": 0.5, **(options or {})}
        made.append(make_engine(parse_settings(given), **changes))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def ask(engine: SimulatedEngine, name: str, prompt: list[int], max_tokens: int = 6, **more: Any) -> int:
    """Runs one request to its end, checks its answer, and returns how many of its tokens were computed in prefill."""
    before = engine.runner.computed_tokens
    add(engine, name, prompt, max_tokens, **more)
    assert run(engine)[name] == answer_to(prompt, max_tokens)
    assert engine.flush_cache(20.0)
    return engine.runner.computed_tokens - before


def test_another_engine_computes_only_the_rest_and_the_window(
    shared_daemon: Daemon, engine_at: Callable[..., SimulatedEngine]
) -> None:
    prompt = prompt_of("share 2", 700)
    first, second = engine_at(shared_daemon.address), engine_at(shared_daemon.address)
    assert ask(first, "cold", prompt, 80) == 700
    assert ask(second, "warm", prompt, 80) == 700 - 5 * BLOCK_TOKENS + 128  # of a hit the last window is replayed
    answer = answer_to(prompt, 80)
    assert len(answer) == 80  # so that it fills a block
    turn = prompt + answer + prompt_of("turn", 30)
    assert ask(second, "next turn", turn, 4) == len(turn) - 6 * BLOCK_TOKENS + 128  # the answer was saved too
    stats = second.cache_stats
    assert stats is not None and (stats.loaded_blocks, stats.hits) == (11, 2)
    line = second.build_extra_metrics_log()
    assert line is not None and "attached" in line and "input tokens" in line
    schedules.nothing_left(second)


def test_fields_that_the_kernels_read(shared_daemon: Daemon, engine_at: Callable[..., SimulatedEngine]) -> None:
    prompt = prompt_of("fields", 600)
    ask(engine_at(shared_daemon.address), "cold", prompt)
    engine = engine_at(shared_daemon.address)
    seq = add(engine, "warm", prompt)
    assert not seq.schedulable
    while not seq.schedulable:
        engine._advance()
    assert (seq.num_cached_tokens, seq.cached_hit_tokens, seq.swa_valid_start) == (384, 384, 384)
    assert len(seq.block_table) == 5 and seq.state_id > 0
    run(engine)
    exact = engine_at(shared_daemon.address, {"replay_tokens": 0})
    seq = add(exact, "no window", prompt)
    while not seq.schedulable:
        exact._advance()
    assert (seq.num_cached_tokens, seq.swa_valid_start) == (512, 0)
    run(exact)


def test_salts_hints_and_images(shared_daemon: Daemon, engine_at: Callable[..., SimulatedEngine]) -> None:
    prompt, quiet, bad = prompt_of("salt", 400), prompt_of("quiet", 400), prompt_of("bad", 400)
    engine = engine_at(shared_daemon.address)
    hint = {"cachesvc": {"salt": "tenant a", "traffic_class": "chat"}}
    assert ask(engine, "a", prompt, extra=hint) == 400
    assert ask(engine, "b", prompt, extra={"cachesvc": {"salt": "tenant b"}}) == 400
    assert ask(engine, "c", prompt) == 400
    assert ask(engine, "d", prompt, extra=hint) == 400 - 384 + 128
    assert ask(engine, "e", quiet, extra={"cachesvc": {"no_store": True}}) == 400
    assert ask(engine, "f", quiet) == 400
    for name in "gh":  # a salt that cannot be read: neither stored nor found
        assert ask(engine, name, bad, extra={"cachesvc": {"salt": 5}}) == 400
    assert engine.cache_stats is not None
    seq = engine.add_request(
        "u", "image", params(2), engines.np.array([5, 1000 + 2, 9] * 60, "int32"), multi_modal_data={}
    )
    assert seq is not None and engine._session is not None
    assert id(seq) not in engine._session._tracked
    engine.abort_request("image")
    run(engine)
    schedules.nothing_left(engine)


def test_no_daemon_a_killed_one_and_a_new_one(daemon: Daemon, engine_at: Callable[..., SimulatedEngine]) -> None:
    prompt = prompt_of("failures", 500)
    options = {"match_deadline_s": 0.3, "load_deadline_s": 0.5, "breaker_max_s": 0.2, "probe_max_s": 0.2}
    engine = engine_at(daemon.address, options)
    ask(engine, "cold", prompt)
    daemon.freeze()
    assert ask(engine, "frozen", prompt) == 500
    daemon.kill()
    assert ask(engine, "killed", prompt) == 500
    daemon.start()
    wait_until(lambda: engine._session is not None and engine._session.cache.attached)
    wait_until(lambda: ask(engine, f"again {random.random()}", prompt) == 500 - 384 + 128)
    schedules.nothing_left(engine)
    nobody = engine_at("unix:/nowhere/at.all")
    assert ask(nobody, "alone", prompt) == 500


def test_a_daemon_that_lies_is_not_believed(daemon: Daemon, engine_at: Callable[..., SimulatedEngine]) -> None:
    """Payloads in shared memory are changed behind the daemon's back after they were stored and checked."""
    prompt = prompt_of("lies", 500)
    engine = engine_at(daemon.address)
    ask(engine, "cold", prompt)
    with Client(daemon.address) as client:
        wait_until(lambda: client.report().blocks >= 3)
    daemon.stop()
    for segment in daemon.store.rglob("*.seg"):
        data = bytearray(segment.read_bytes())
        for offset in range(4096, len(data), 64):
            data[offset] ^= 1
        segment.write_bytes(data)
    daemon.start()
    wait_until(lambda: engine._session is not None and engine._session.cache.attached)
    assert ask(engine, "again", prompt) == 500
    schedules.nothing_left(engine)


def test_an_abort_frees_its_blocks_when_its_load_has_ended(
    shared_daemon: Daemon, engine_at: Callable[..., SimulatedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of("abort", 900)
    ask(engine_at(shared_daemon.address), "cold", prompt)
    engine = engine_at(shared_daemon.address)
    session = engine._session
    assert session is not None
    at_work, go_on = engines.threading.Event(), engines.threading.Event()
    scatter = session.admission._pages.scatter

    def slow(blocks: Any, payloads: Any) -> None:
        at_work.set()
        assert go_on.wait(20)
        scatter(blocks, payloads)

    monkeypatch.setattr(session.admission._pages, "scatter", slow)
    add(engine, "gone", prompt)
    wait_until(lambda: engine._advance() is None and at_work.is_set())
    free = engine.block_manager.get_num_free_blocks()
    engine.abort_request("gone")
    engine.step()
    assert engine.block_manager.get_num_free_blocks() == free  # somebody still writes into them
    go_on.set()
    wait_until(lambda: engine._advance() is None and engine.block_manager.get_num_free_blocks() == 39)
    run(engine)
    schedules.nothing_left(engine)


def test_blocks_held_for_a_hit_are_given_back_to_who_comes_first(
    shared_daemon: Daemon, engine_at: Callable[..., SimulatedEngine]
) -> None:
    """A preempted request goes to the front of the queue and needs what a loaded one behind it holds."""
    prompt = prompt_of("held", 1000)
    ask(engine_at(shared_daemon.address, blocks=40), "cold", prompt)
    engine = engine_at(shared_daemon.address, blocks=17, max_model_len=1400)
    session = engine._session
    assert session is not None
    held = add(engine, "held", prompt)
    wait_until(lambda: engine._advance() is None and held.schedulable)
    assert held.block_table
    front = prompt_of("front", 1300)  # what a preemption does to the queue
    first = add(engine, "front", front)
    wait_until(lambda: engine._advance() is None and first.schedulable)
    engine.scheduler._waiting.rotate(1)
    assert engine.scheduler.waiting[0] is first
    outputs = run(engine)
    assert session.admission.given_back == 1
    assert outputs["front"] == answer_to(front, 8) and outputs["held"] == answer_to(prompt, 8)
    schedules.nothing_left(engine)


def test_forks_save_what_they_decode_under_their_parents_salt(
    shared_daemon: Daemon, engine_at: Callable[..., SimulatedEngine]
) -> None:
    prompt = prompt_of("fork", 300)
    engine = engine_at(shared_daemon.address, prefill_every=3)
    parent = add(engine, "tree", prompt, 200)
    while parent.get_len() < 320:
        engine.step()
    twin = engine.scheduler.fork_seq(parent, None, "branch", params(150), None, 0, -1, 10_000, 0.0)
    length = twin.get_len()
    run(engine)
    whole = prompt + answer_to(prompt, 200)
    assert parent.data.get_token_ids() == whole[: parent.get_len()]
    assert twin.data.get_token_ids()[:length] == whole[:length] and twin.get_len() > length
    assert engine.flush_cache(20.0)
    assert ask(engine, "next", [*twin.data.get_token_ids(), 9, 9]) <= 128 + 128 + 2
    schedules.nothing_left(engine)


def test_prompt_engines_save_what_they_compute(
    shared_daemon: Daemon, engine_at: Callable[..., SimulatedEngine]
) -> None:
    prompt = prompt_of("role", 500)
    engine = engine_at(shared_daemon.address, role=engines.EngineType.PROMPT, asynchronous=False)
    seq = add(engine, "prompt", prompt)
    for _ in range(6):
        engine.step()
    assert seq.num_cached_tokens == 500 and engine.flush_cache(20.0)
    assert ask(engine_at(shared_daemon.address), "both", prompt) == 500 - 384 + 128


def test_an_error_of_ours_ends_the_cache_and_not_the_engine(
    shared_daemon: Daemon, engine_at: Callable[..., SimulatedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of("broken", 500)
    ask(engine_at(shared_daemon.address), "cold", prompt)
    engine = engine_at(shared_daemon.address)
    session = engine._session
    assert session is not None
    waiting = [add(engine, f"waits {number}", prompt) for number in range(3)]
    session.admission.advance = None  # type: ignore[assignment, method-assign]
    outputs = run(engine)
    assert all(outputs[seq.request_id] == answer_to(prompt, 8) for seq in waiting)
    assert engine._session is None and engine.cache_stats is None
    assert "goes on without cachesvc" in caplog.text


def test_the_released_binding_is_told_what_it_lacks(
    engine_at: Callable[..., SimulatedEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(native.Sequence, "block_table")
    engine = engine_at("unix:/nowhere")
    assert engine._session is None
    assert "DeepInfer 0.1.0 needs one more line" in caplog.text


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESVC_DEEPINFER", '{"traffic_class": "chat", "pinned_share": 0.5}')
    assert parse_settings(None) == Settings(traffic_class="chat", pinned_share=0.5)
    assert CachedLLMEngine.configured({"load_threads": 1}).cachesvc_settings == Settings(load_threads=1)
    for wrong, text in (
        ({"colour": 1}, "has no option colour"),
        ({"load_threads": 0}, "load_threads is 0"),
        ({"replay_tokens": -2}, "replay_tokens is -2"),
        ({"pinned_share": 1.5}, "pinned_share is 1.5"),
    ):
        with pytest.raises(ValueError, match=text):
            parse_settings(wrong)
    monkeypatch.setenv("CACHESVC_DEEPINFER", "{")
    with pytest.raises(ValueError, match="CACHESVC_DEEPINFER is not JSON"):
        parse_settings(None)


def test_the_entry_point_is_swapped_in_by_one_import(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """`LLM.generate` of the package, with our engine behind it; its class is what it was afterwards."""
    seen: list[Any] = []

    def from_engine_args(cls: Any, arguments: Any) -> SimulatedEngine:
        seen.append((cls, arguments))
        return make_engine(cls.cachesvc_settings)

    monkeypatch.setattr(CachedLLMEngine, "from_engine_args", classmethod(from_engine_args))
    before = original.LLMEngine
    prompt = prompt_of("llm", 400)
    options = {"address": shared_daemon.address, "revision": request.node.name}
    for _ in range(2):
        llm = LLM("simulated", cachesvc=options, decode_sequence=False, chunked_prefill=True)
        outputs = llm.generate(prompt_token_ids=[prompt], sampling_params=params(5), use_tqdm=False)
        assert [output.token_id for output in outputs[0]] == answer_to(prompt, 5)
        assert llm.llm_engine.flush_cache(20.0)
        loaded = llm.llm_engine.cache_stats.loaded_blocks
        llm.close()
    assert loaded == 3 and original.LLMEngine is before
    assert issubclass(seen[0][0], CachedLLMEngine) and seen[0][1].chunked_prefill
    with pytest.raises(ValueError, match="no option"):
        LLM("simulated", cachesvc={"nonsense": 1})


def test_payloads_are_what_the_layers_take() -> None:
    assert payload_bytes_of(LAYERS, ROW, 128) == PAYLOAD
    for layout, block, text in (
        ([(0, 0, 32), (1, 64, 32)], 128, "layer 1 begins at 64 and not at 32"),
        ([(0, 0, 8192)], 128, "whose layers take 8192"),
        ([], 128, "whose layers take 0"),
        (LAYERS, 64, "blocks of 64 tokens"),
    ):
        with pytest.raises(Unsupported, match=text):
            payload_bytes_of(layout, ROW, block)


def test_a_layout_from_the_published_sizes_of_v41_flash() -> None:
    """By DeepInfer's own `KVCacheManager`: layers that own KV, main KV of 512 FP4 values with a scale for each 16 of
    them, index KV of 128 FP4 values with a scale for each 32, at compression 1 or 2; 890 bytes of a token in all."""

    def layer(ratio: int) -> AttrDict:
        index = AttrDict(index_head_dim=128, index_n_heads=64, use_kproj=True)
        cfg = AttrDict(sink_mode="swa", kv_compress_ratio=ratio, index_topk=512 if ratio else 0)
        return AttrDict(cfg=cfg | AttrDict(attn_index=index) if ratio else cfg)

    modules = [layer(0), layer(2), layer(1), layer(1)]
    cfg = AttrDict(
        attn_module_list=modules,
        num_hidden_layers=len(modules),
        kv_lora_rank=448,
        qk_rope_head_dim=64,
        window_size=(128, 0),
        use_fp4_sparse_kv=True,
        num_key_value_heads=1,
    )
    manager = object.__new__(cache_engine.KVCacheManager)
    manager.cfg, manager.kv_tensor = cfg, None
    manager._align_to, manager._kv_offset = 128, 0
    manager._qk_topk_bytes = cache_engine._get_qk_topk_bytes(cfg)
    manager._qk_topk_head_dim = 128
    manager._compress_dim = 512
    manager._bytes_per_token = cache_engine._kv_bytes_per_token(448, 64, 16, True)
    assert (manager._qk_topk_bytes, manager._bytes_per_token) == (68, 288)
    manager._state_block = cache_engine.StateBlock(cfg=cfg, attn_module_list=modules, align_to=128)
    manager._swa_offset = manager._swa_drop_offset = manager._dropped_state_offset = 0
    manager._swa_blocks = manager._state_res = None
    layout, caches = [], []
    for number, module in enumerate(modules):
        cache, item = manager.process(number, module, BLOCK_TOKENS, caches)
        caches.append(cache)
        layout += [item] if item[2] else []
    assert payload_bytes_of(layout, 1 << 20, BLOCK_TOKENS) == 113_920 == 890 * BLOCK_TOKENS


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules(part: int, shared_daemon: Daemon) -> None:
    """Every byte of a hit block right, no block freed while it is copied, none leaked, nothing computed on what is not
    there: see `schedules` and the checks of the simulated device."""
    counts: Counter[str] = Counter()
    prompts = schedules.Prompts(part)
    for number in range(SCHEDULES // PARTS):
        if number % 10 == 0:
            source = random.Random(f"{part} {number}")
            settings = parse_settings(
                {"address": shared_daemon.address, "revision": f"schedules {part}", "failed_hit_s": 0.5}
            )
            engine = schedules.random_engine(source, settings, number)
            watch = schedules.Watch(engine, source)
        try:
            schedules.one_schedule(engine, watch, source, prompts, counts)
            schedules.nothing_left(engine)
        except AssertionError as error:
            error.add_note(f"part {part}, schedule {number}")
            raise
        if number % 10 == 9:
            stats = engine.cache_stats
            assert stats is not None
            counts.update(hits=stats.hits, loaded=stats.loaded_blocks, stored=stats.stored_blocks)
            engine.close()
    assert counts["hits"] > counts["requests"] // 5 and counts["loaded"] and counts["answered"], counts
