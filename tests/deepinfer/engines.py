"""DeepInfer's real engine and worker classes on the simulated device, with our adapter on top."""

from __future__ import annotations

import os
import random
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import simulated
import stubs  # noqa: F401  # before DeepInfer
import torch
from deepinfer import environ, envs
from deepinfer.config import CacheConfig, ParallelConfig, SchedulerConfig
from deepinfer.engine import llm_engine
from deepinfer.engine.engine_type import EngineType
from deepinfer.sampling_params import SamplingParams
from deepinfer.sequence import MTPPredictInfo, SampledInfo, SamplerOutput
from deepinfer.worker.worker import EngineCallbacks, Worker
from simulated import QUEUE, REPLAYED, TOKENS, Computing, Pool, chained, digests, next_token

from cachesvc.connector.deepinfer import CachedLLMEngine
from cachesvc.connector.deepinfer import pages as adapter_pages
from cachesvc.connector.deepinfer.settings import Settings

REPLAY = 128


class Runner:
    """The model: launches what a step computes, and what it samples."""

    use_cuda_graph = False

    def __init__(self, pool: Pool, seed: int) -> None:
        self.pool = pool
        self.random = random.Random(seed)
        self.known: dict[int, Computing] = {}
        self.computed_tokens = 0

    def execute_main_model(self, metadata: list[Any], cache: Any, metadata_zos: Any = None, total_q: Any = None) -> Any:
        real = [m for m in metadata if not m.is_placeholder]
        results: dict[int, list[int]] = {}
        for m in real:
            tokens = list(m.seq.data.tokens)
            QUEUE.launch(lambda m=m, tokens=tokens: results.__setitem__(id(m), self._compute(m, tokens)))
        return SimpleNamespace(graph_size=0, input_metadata=None, model_output=results)

    def _compute(self, m: Any, tokens: list[int]) -> list[int]:
        """One sequence's part of a step; returns the new tokens: accepted drafts, then the sampled one."""
        if m.is_prompt:
            return self._prefill(m, tokens)
        known = self.known.get(id(m.seq))
        if known is None:  # a fork, or handed over
            known = self.known[id(m.seq)] = Computing(tokens, digests(tokens))
            known.replay_start = m.seq.cached_hit_tokens
            known.replay_end = known.replay_start + REPLAY if known.replay_start else 0
        return self._decode(m, known)

    def _check(self, m: Any, known: Computing, end: int) -> None:
        expected = known.values[:end].copy()
        expected[known.replay_start : known.replay_end] ^= REPLAYED if known.replay_end else np.uint64(0)
        for found, wanted in zip(self.pool.read(m.block_table, end), simulated.layer_bytes(expected), strict=True):
            if not np.array_equal(found, wanted):
                where = int(np.nonzero((found != wanted).any(axis=1))[0][0])
                raise AssertionError(
                    f"{m.request_id} computes from {end}, but the KV of token {where} is not there; replayed "
                    f"{known.replay_start} to {known.replay_end}, blocks {m.block_table}"
                )

    def _prefill(self, m: Any, tokens: list[int]) -> list[int]:
        start, end = m.seqlen_k - m.seqlen_q, m.seqlen_k
        known = self.known.get(id(m.seq))
        if known is None or known.tokens[: len(tokens)] != tokens or start in (0, m.swa_valid_start):
            known = self.known[id(m.seq)] = Computing(tokens, digests(tokens))
            known.replay_start, known.replay_end = m.swa_valid_start, m.swa_valid_start + REPLAY
            if not m.swa_valid_start:
                known.replay_end = 0
        self._check(m, known, start)
        values = known.values[start:end].copy()
        if known.replay_end > start:
            values[: known.replay_end - start] ^= REPLAYED
        self.pool.write(m.block_table, start, values)
        self.computed_tokens += end - start
        if end < len(tokens):
            return []
        new = next_token(int(known.values[-1]))
        self._append(known, [new])
        return [new]

    def _decode(self, m: Any, known: Computing) -> list[int]:
        start = len(known.tokens) - 1
        self._check(m, known, start)
        self.pool.write(m.block_table, start, known.values[start : start + 1])
        value = int(known.values[-1])
        new, drafts = [next_token(value)], known.drafts[: m.seqlen_q - 1]
        for draft in drafts:
            if draft != new[-1]:
                break
            value = chained(value, [draft])[0]
            new.append(next_token(value))
        speculated = chained(int(known.values[-1]), drafts)
        if speculated:
            self.pool.write(m.block_table, start + 1, np.array(speculated, np.uint64))  # some of it may be rubbish
        self._append(known, new)
        return new

    def _append(self, known: Computing, new: list[int]) -> None:
        values = chained(int(known.values[-1]), new)
        known.tokens = [*known.tokens, *new]
        known.values = np.concatenate([known.values, np.array(values, np.uint64)])
        known.drafts = []
        value = values[-1]
        for _ in range(envs.DEEPINFER_USE_NEXTN_DECODE):
            right = next_token(value)
            known.drafts.append(right if self.random.random() < 0.7 else self.random.randrange(8, 900))
            value = chained(value, known.drafts[-1:])[0]

    def execute_sample(self, metadata: list[Any], input_metadata: Any, output: Any, cache: Any) -> SamplerOutput:
        results = output.move()
        real = [m for m in metadata if not m.is_placeholder]
        nextn = envs.DEEPINFER_USE_NEXTN_DECODE
        made = SamplerOutput(sampled_token=SampledInfo(token_ids=torch.zeros(len(real), dtype=torch.int32)))
        decoding = bool(real) and not real[0].is_prompt
        if decoding and nextn:
            lengths = [m.seqlen_q for m in real]
            made.verified_tokens = SampledInfo(token_ids=torch.full((sum(lengths),), -1, dtype=torch.int32))
            made.predict_tokens = MTPPredictInfo(token_ids=torch.zeros((len(real), nextn), dtype=torch.int32))
            made.first_token_positions = torch.tensor(np.cumsum([0, *lengths[:-1]]), dtype=torch.int32)

        def fill() -> None:
            flat = 0
            for index, m in enumerate(real):
                new = results.get(id(m)) or [0]
                made.sampled_token.token_ids[index] = new[-1]
                if decoding and nextn:
                    for number, token in enumerate(new[:-1]):
                        made.verified_tokens.token_ids[flat + number] = token
                    drafts = self.known[id(m.seq)].drafts
                    made.predict_tokens.token_ids[index] = torch.tensor(drafts, dtype=torch.int32)
                flat += m.seqlen_q

        QUEUE.launch(fill)
        return made

    def post_process(self, *args: Any) -> None:
        pass

    def _placeholder_seq_metadata(self, is_prompt: bool) -> Any:
        return SimpleNamespace(is_placeholder=True, seqlen_q=1, is_prompt=is_prompt)


class SimulatedWorker(Worker):
    """The real step of a worker, on the simulated device."""

    def __init__(self, engine: Any, blocks: int, seed: int) -> None:
        self.engine_callbacks = EngineCallbacks(engine.post_process, engine.pre_sampler_sync)
        self.prev_step_state = None
        self.nextn = envs.DEEPINFER_USE_NEXTN_DECODE
        self.is_driver_worker = True
        self.global_rank = 0
        self.decode_perf_curve: list[Any] = []
        self.cache_config = engine.cache_config
        self.gpu_cache = None
        self.step, self.gc_interval_step = 0, 1 << 30
        self.pool = Pool(blocks)
        self.model_runner = Runner(self.pool, seed)
        self.cache_engine = SimpleNamespace(
            gpu_blocks=self.pool.tensor, gpu_states=torch.zeros((1, 0)), kvcache_layout=list(simulated.LAYERS)
        )

    def run_workers(self, method: str, driver_kwargs: Any = None, **kwargs: Any) -> Any:
        return getattr(self, method)(**(driver_kwargs or {}), **kwargs)

    def _correct_seqlens_qk(self, *args: Any) -> None:
        return None  # the device knows how far each sequence is

    def load_model(self, skip_load: bool) -> None:
        pass

    warm_up_model = stop = lambda self, **kwargs: None

    def profile_num_available_blocks(self) -> None:
        self.cache_config.num_gpu_blocks = len(self.pool.tensor)

    def init_cache_engine(self) -> None:
        self.cache_config.bytes_per_block = simulated.ROW
        self.cache_config.bytes_of_state_per_seqs = 64
        self.cache_config.num_state_seqs = 64

    def clone_and_zero_states_and_blocks_on_default_stream(
        self, clone_states: Any, clone_blocks: Any, zero_states: Any
    ) -> Any:
        pairs = [(int(source), int(target)) for source, target in clone_blocks]

        def copy() -> None:
            for source, target in pairs:
                if target:
                    self.pool.bytes[target] = self.pool.bytes[source]

        QUEUE.launch(copy)
        return clone_states[:, 0].copy(), clone_blocks[:, 0].copy()


class _Group:
    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class _ModelConfig:
    """A model of no size: `digest` stands for its weights."""

    def __init__(self, max_model_len: int, max_num_seqs: int) -> None:
        self.model = self.tokenizer = "simulated"
        self.revision = self.tokenizer_revision = None
        self.trust_remote_code = self.use_compressed_tokenizer = False
        self.dtype, self.load_format, self.seed = torch.bfloat16, "auto", 0
        self.max_model_len = max_model_len
        self.runtime_max_model_len = max_model_len + 20
        self.max_num_seqs = max_num_seqs
        self.architecture = "Simulated"
        self.model_cfg = SimulatedConfig(architecture="Simulated", gpt={"vocab_size": simulated.VOCABULARY})

    def get_vocab_size(self) -> int:
        return simulated.VOCABULARY


class SimulatedConfig(dict):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        return SimulatedConfig(self[name]) if isinstance(self[name], dict) else self[name]


llm_engine.get_hf_tokenizer = lambda *args, **kwargs: SimpleNamespace(eos_token_id=simulated.EOS)
llm_engine._get_model_architecture = lambda config: object
llm_engine.ModelMetadata = lambda config: SimpleNamespace(window_size=REPLAY)
llm_engine.PG = SimpleNamespace(
    data_parallel_group=_Group, cpu_data_parallel_group=_Group, context_parallel_group=_Group
)
llm_engine.StatsLogger = lambda *args, **kwargs: SimpleNamespace(close=lambda: None, log_nccl_memory=lambda: None)
llm_engine.get_bf16_tflops_limit = lambda: 1
llm_engine.CompressedTokenizer = SimpleNamespace(lookup_table=[])
llm_engine.dist.get_rank = lambda *args: 0
adapter_pages.Fence = simulated.Event


class SimulatedEngine(CachedLLMEngine):
    """`CachedLLMEngine` whose worker is the simulated one."""

    seed = 0
    blocks = 40

    def _init_workers(self) -> None:
        self.driver_worker = SimulatedWorker(self, self.blocks, self.seed)

    @property
    def runner(self) -> Runner:
        return self.driver_worker.model_runner


_making = threading.Lock()


def make_engine(
    settings: Settings,
    *,
    blocks: int = 40,
    seed: int = 0,
    role: EngineType = EngineType.NORMAL,
    max_num_seqs: int = 8,
    max_batched_tokens: int = 512,
    max_model_len: int = 2048,
    chunked: bool = True,
    asynchronous: bool = True,
    drafts: int = 0,
    end_preempted: bool = False,
    prefill_every: int = 1,
    engine_class: type[SimulatedEngine] = SimulatedEngine,
) -> SimulatedEngine:
    """An engine as ``LLMEngine.from_engine_args`` would make it, with `settings` of the cache."""
    os.environ["DEEPINFER_ZERO_OVERHEAD_SCHEDULING"] = "1" if asynchronous else "0"
    os.environ["DEEPINFER_USE_NEXTN_DECODE"] = str(drafts)
    environ.rearm_all()
    scheduler = SchedulerConfig(
        max_batched_tokens, max_num_seqs, max_model_len, end_preempted, chunked, prefill_every, 100
    )
    made = type("Engine", (engine_class,), {"cachesvc_settings": settings, "seed": seed, "blocks": blocks})
    engine: SimulatedEngine = made(
        _ModelConfig(max_model_len, max_num_seqs),
        CacheConfig(TOKENS, 0.9),
        ParallelConfig(1, 1, 1, 1, 0, 0, role),
        scheduler,
        log_stats=False,
        engine_type=role,
    )
    return engine


def params(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def add(engine: SimulatedEngine, name: str, prompt: list[int], max_tokens: int = 8, **more: Any) -> Any:
    return engine.add_request("user", name, params(max_tokens), np.asarray(prompt, dtype=np.int32), **more)


def run(
    engine: SimulatedEngine, outputs: dict[str, list[int]] | None = None, steps: int = 100_000
) -> dict[str, list[int]]:
    """Until nothing is left, as ``LLM._run_engine`` does."""
    from native import RequestOutput

    outputs = outputs if outputs is not None else {}
    for _ in range(steps):
        unfinished = engine.has_unfinished_requests()
        made = engine.step() if unfinished else engine.flush_inflight_reqs()
        for pointer in made:
            output = RequestOutput.clone(pointer)
            tokens = outputs.setdefault(output.request_id, [])
            if output.token_id >= 0:
                tokens.append(output.token_id)
        if not unfinished:
            assert not QUEUE.failures, QUEUE.failures
            return outputs
    raise AssertionError(f"the engine did not come to an end within {steps} steps")
