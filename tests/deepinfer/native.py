"""A model of DeepInfer's compiled module ``deepinfer._C.engine``: allocation, scheduling and sequences, in Python.

Written from the package's stubs (``_C/*.pyi``), its Python callers and the behaviour that its C++ headers describe, as
far as a cache can see it:

* Blocks are counted by reference and handed out first in, first out; block 0 is never used.
* A request in the queue is served in its order; an unschedulable one stops all behind it. A request that has blocks
  already is not checked against the prompt limit.
* Prefill chunks end at checkpoints. A chunk that does not end its prompt puts the request back to the front.
* Above 90 % of blocks in use no prompt begins, where one engine does both prompts and decoding.
* Aborting only marks a request. What is in the queue is dropped without freeing its blocks; what runs is handed to
  ``finished_seqs`` by the next decoding step, and freed by whoever finalizes it.
* Preempting frees at once and puts the request to the front, or ends it. A step that was under way for it is void.
* A fork pins its parent's blocks; its last block and its state are copied in the step that admits it.

With the one line that ``docs/deepinfer.md`` asks for: ``Sequence.block_table``. The module for images, structured
output, engram and varying draft lengths is left out.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

PLACEHOLDER_REQUEST_ID = "placeholder"
WATERMARK = 0.9


def check(condition: bool, text: str = "") -> None:
    """What the C++ code calls TORCH_CHECK."""
    if not condition:
        raise RuntimeError(text or "a check of the compiled module failed")


class SequenceStatus(enum.Enum):
    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_IGNORED = 6
    FINISHED_PREEMPTED = 7
    FINISHED_SO_FAILED = 8
    FINISHED_VE_FAILED = 9


def _ended(seq: Sequence) -> bool:
    return seq.status.value >= SequenceStatus.FINISHED_STOPPED.value


class SequenceData:
    def __init__(self, prompt_token_ids: Any) -> None:
        self.tokens = [int(token) for token in prompt_token_ids]
        self.prompt_len = len(self.tokens)

    def get_token_ids(self) -> list[int]:
        return list(self.tokens)

    def get_len(self) -> int:
        return len(self.tokens)

    def get_last_token_id(self) -> int:
        return self.tokens[-1]


class Sequence:
    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: Any,
        compressed_prompt_token_ids: Any,
        multi_modal_data: Any,
        block_size: int,
        request_id: str,
        user_id: str,
        sampling_params: Any,
        arrival_time: float,
        golden_token_ids: Any,
    ) -> None:
        self.seq_id = seq_id
        self.data = SequenceData(prompt_token_ids)
        self.compressed_data = SequenceData(compressed_prompt_token_ids)
        self.multi_modal_data = multi_modal_data
        self.block_size = block_size
        self.request_id = request_id
        self.user_id = user_id
        self.sampling_params = sampling_params
        self.arrival_time = arrival_time
        self.schedulable = multi_modal_data is None
        self.status = SequenceStatus.WAITING
        self.cached_hit_tokens = 0
        self.swa_valid_start = 0
        self.state_id = -1
        self.last_copy_state_token_idx = 0
        self.branch_id = "default"
        self.so_status, self.so_matcher = 0, None
        self.chunked_rest_len = 0
        self.last_output_token = self.data.tokens[-1] if self.data.tokens else -1
        self.last_accepted_token: list[int] = []
        self.last_next_n_token: list[int] = []
        self._tokens_ready = 0
        self._base = 0
        self._checkpoints: deque[int] = deque()
        self._table: list[int] = []
        self._inflight = self._last_inflight = 0

    def get_len(self) -> int:
        return self.data.get_len()

    def get_prompt_len(self) -> int:
        return self.data.prompt_len

    @property
    def num_cached_tokens(self) -> int:
        return self._tokens_ready

    @num_cached_tokens.setter
    def num_cached_tokens(self, value: int) -> None:
        self._tokens_ready = self._base = int(value)

    @property
    def old_cached_tokens(self) -> int:
        return self._base

    @property
    def chunk_checkpoints(self) -> list[int]:
        return list(self._checkpoints)

    @chunk_checkpoints.setter
    def chunk_checkpoints(self, value: Any) -> None:
        self._checkpoints = deque(int(position) for position in value)

    @property
    def block_table(self) -> list[int]:
        return list(self._table)

    # For the scheduler

    def num_blocks(self) -> int:
        return -(-(self.get_len() + self._inflight + len(self.last_next_n_token)) // self.block_size)

    def output_len(self) -> int:
        return self.get_len() - self.data.prompt_len

    def append(self, token: int) -> None:
        self.data.tokens.append(token)
        self.compressed_data.tokens.append(token)

    def begin_step(self, tokens: int) -> None:
        self._inflight += tokens
        self._last_inflight = tokens

    def end_step(self) -> None:
        if self._inflight == self._last_inflight:
            self._inflight = self._last_inflight = 0
        else:
            self._inflight = self._last_inflight

    def forget_progress(self) -> None:
        self._base = self._tokens_ready = self.swa_valid_start = 0
        self._inflight = self._last_inflight = 0
        self.last_next_n_token = []


class BlockManager:
    """`on_free` and `on_allocate` are for tests: they see a block when its last pin goes, and when it is handed out."""

    def __init__(self, num_blocks: int) -> None:
        check(num_blocks > 1, "too few blocks")
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks))
        self.references = [0] * num_blocks
        self._mutex = threading.RLock()
        self.on_free: Callable[[int], None] = lambda block: None
        self.on_allocate: Callable[[int], None] = lambda block: None

    def lock(self) -> None:
        self._mutex.acquire()

    def unlock(self) -> None:
        self._mutex.release()

    def reset(self) -> None:
        with self._mutex:
            check(len(self._free) == self.num_blocks - 1, "blocks are in use")

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def allocate_nolock(self, num_blocks: int) -> list[int]:
        blocks = []
        for _ in range(num_blocks):
            check(bool(self._free), "no free block")
            block = self._free.popleft()
            self.references[block] += 1
            self.on_allocate(block)
            blocks.append(block)
        return blocks

    def pin_blocks(self, block_ids: Any) -> None:
        with self._mutex:
            for block in map(int, block_ids):
                check(0 < block < self.num_blocks and self.references[block] > 0, "a free block is pinned")
                self.references[block] += 1

    def unpin_blocks(self, block_ids: Any) -> None:
        with self._mutex:
            for block in reversed([int(block) for block in block_ids]):
                check(0 < block < self.num_blocks, f"block {block}")
                self.references[block] -= 1
                check(self.references[block] >= 0, "a block was freed twice")
                if not self.references[block]:
                    self.on_free(block)
                    self._free.append(block)


class SchedulerOutputs:
    def __init__(self, scheduled: list[Sequence], prompt_run: bool, seqlens_q: list[int], **lists: Any) -> None:
        self.scheduled_seqs = scheduled
        self.prompt_run = prompt_run
        self.seqlens_q = seqlens_q
        self.num_batched_tokens = sum(seqlens_q)
        self.finished_seqs: list[Sequence] = lists.get("finished", [])
        self.ignored_seqs: list[Sequence] = lists.get("ignored", [])
        self.clone_states = np.array(lists.get("clone_states", []), np.int32).reshape(-1, 2)
        self.clone_blocks = np.array(lists.get("clone_blocks", []), np.int32).reshape(-1, 2)
        self.zero_states = np.zeros(0, np.int32)
        self.sum_seqlen_qxk = self.max_seqlen_k = self.min_seqlen_k = self.num_cached_tokens_gpu = 0
        self.attn_tflops = self.total_tflops = 0.0

    def is_empty(self) -> bool:
        return not self.scheduled_seqs


class SequenceMetadata:
    """What a step of the device gets of a sequence; `block_table` as it was when the step was scheduled."""

    def __init__(self, seq: Sequence, is_prompt: bool, seqlen_q: int, seqlen_k: int) -> None:
        self.seq = seq
        self.request_id, self.seq_id = seq.request_id, seq.seq_id
        self.is_placeholder = False
        self.is_prompt, self.seqlen_q, self.seqlen_k = is_prompt, seqlen_q, seqlen_k
        self.block_table = seq.block_table
        self.sampling_params = seq.sampling_params
        self.swa_valid_start = seq.swa_valid_start if is_prompt else 0
        self.state_id = seq.state_id
        self.so_status, self.so_matcher = seq.so_status, seq.so_matcher
        self.multi_modal_data = seq.multi_modal_data
        self.is_last_prompt_chunk = is_prompt and seqlen_k >= seq.get_len()


class SequenceMetadataPool:
    def release(self, unused_sequence_metadatas: Any) -> None:
        pass


class Scheduler:
    def __init__(
        self,
        block_size: int,
        block_manager: BlockManager,
        state_manager: BlockManager | None,
        eos_token_id: int,
        dp_group: Any,
        scheduler_config: Any,
        truncate_len: int,
        lookahead_tokens: int,
        prefill_max_sum_seqlen_k: int,
        flops_estimator: Any,
        engram_lookup_table: Any,
        cp_size: int,
        vocab_size: int,
        log_stats: bool,
    ) -> None:
        from deepinfer import envs

        config = scheduler_config
        nextn = max(0, envs.DEEPINFER_USE_NEXTN_DECODE)
        self._block_size, self._blocks, self._states = block_size, block_manager, state_manager
        self._eos, self._lookahead, self._nextn = eos_token_id, lookahead_tokens, nextn
        self._max_len, self._max_tokens, self._max_seqs = (
            config.max_model_len,
            config.max_num_batched_tokens,
            config.max_num_seqs,
        )
        self._end_preempted, self._chunked = config.stop_preempted_request, config.chunked_prefill
        self._role = config.engine_type  # 0 both, 1 prompts, 2 completions
        check(self._role != 2 or self._end_preempted, "this role cannot compute a preempted request again")
        self._every, self._any_every = config.prefill_attempt_interval, config.prefill_any_attempt_interval
        self._limit = self._max_len if self._chunked else min(self._max_len, self._max_tokens)
        self._max_sum = prefill_max_sum_seqlen_k
        self._waiting: deque[Sequence] = deque()
        self._prompted: deque[tuple[Sequence, bool]] = deque()
        self.running: list[Sequence] = []
        self.decode_step = 0
        self.decode_perf_curve: list[Any] = []
        self._preempted = self._aborted = 0
        self._cloned_states: list[tuple[int, int]] = []
        self._cloned_blocks: list[tuple[int, int]] = []

    @property
    def waiting(self) -> list[Sequence]:
        return list(self._waiting)

    def add_sequence(self, seq: Sequence) -> None:
        self._waiting.append(seq)

    def set_schedulable(self, request_id: str) -> None:
        for seq in self._waiting:
            if seq.request_id == request_id:
                seq.schedulable = True

    def abort_sequence(self, request_ids: list[str]) -> list[Sequence]:
        found = [
            seq
            for name in request_ids
            for seq in (*self.running, *self._waiting)
            if seq.request_id == name and not _ended(seq)
        ]
        for seq in found:
            seq.status = SequenceStatus.FINISHED_ABORTED
        self._aborted += len(found)
        return found

    def get_num_unfinished_seqs(self) -> int:
        return len(self._waiting) + len(self.running) + len(self._prompted)

    def has_unfinished_seqs(self) -> bool:
        return self.get_num_unfinished_seqs() > 0

    def get_num_preempted_seqs(self) -> int:
        return self._preempted

    def get_num_aborted_seqs(self) -> int:
        return self._aborted

    def get_num_free_gpu_blocks(self) -> int:
        return self._blocks.get_num_free_blocks()

    def get_sum_prompt_len_waiting(self) -> tuple[int, int]:
        return len(self._waiting) + len(self._prompted), sum(seq.get_prompt_len() for seq in self._waiting)

    def get_sum_prompt_len_running(self) -> tuple[int, int]:
        return len(self.running), sum(seq.get_prompt_len() for seq in self.running)

    def get_sum_prompt_len_chunked(self) -> tuple[int, int]:
        chunked = [seq for seq in self._waiting if seq.chunked_rest_len > 0]
        return len(chunked), sum(seq.get_prompt_len() for seq in chunked)

    def update_mtp_runtime(self, *args: Any) -> None:
        pass

    # Allocation

    def try_allocate_seq(self, seq: Sequence) -> bool:
        check(seq.status is SequenceStatus.WAITING, "a sequence that does not wait")
        check(not seq._table, "it has blocks already")
        check(self._states is None or seq.state_id == -1, "it has a state already")
        with self._blocks._mutex:
            needed = seq.num_blocks()
            check(needed < self._blocks.num_blocks, f"{needed} blocks will never be free")
            if not self._has(needed):
                return False
            self._allocate(seq)
        return True

    def _has(self, blocks: int) -> bool:
        return self._blocks.get_num_free_blocks() >= blocks and (
            self._states is None or self._states.get_num_free_blocks() >= 1
        )

    def _allocate(self, seq: Sequence) -> None:
        seq._table = self._blocks.allocate_nolock(seq.num_blocks())
        if self._states is not None:
            seq.state_id = self._states.allocate_nolock(1)[0]

    def free_seq(self, seq: Sequence) -> None:
        if seq.state_id != -1 and self._states is not None:
            self._states.unpin_blocks([seq.state_id])
        self._blocks.unpin_blocks(seq._table)
        seq._table = []

    # Scheduling

    def schedule(self, sequence_metadata_pool: SequenceMetadataPool) -> tuple[list[SequenceMetadata], SchedulerOutputs]:
        with self._blocks._mutex:
            self._cloned_states, self._cloned_blocks = [], []
            outputs = self._schedule()
        check(outputs.num_batched_tokens <= self._max_tokens, "more tokens than a step may have")
        if outputs.prompt_run:
            self.decode_step = 0
        else:
            self.running = list(outputs.scheduled_seqs)
            self.decode_step += 1
        metadata = []
        for seq, tokens in zip(outputs.scheduled_seqs, outputs.seqlens_q, strict=True):
            end = seq._tokens_ready + seq._inflight + tokens
            metadata.append(SequenceMetadata(seq, outputs.prompt_run, tokens, end))
            seq.begin_step(self._nextn + 1)
        return metadata, outputs

    def _schedule(self) -> SchedulerOutputs:
        if self._role == 1:
            return self._prefill() or SchedulerOutputs([], True, [])
        if self._role == 0:
            due = self.decode_step % self._every == 0 or (self.decode_step and self.decode_step % self._any_every == 0)
            used = self._blocks.num_blocks - self._blocks.get_num_free_blocks()
            if due and used <= WATERMARK * self._blocks.num_blocks and self._waiting and self._waiting[0].schedulable:
                outputs = self._prefill()
                if outputs is not None:
                    return outputs
        return self._decode()

    def _prefill(self) -> SchedulerOutputs | None:
        scheduled: list[Sequence] = []
        ignored: list[Sequence] = []
        lengths: list[int] = []
        total, taken, left = 0, len(self.running), self._max_sum
        while self._waiting:
            seq = self._waiting[0]
            if _ended(seq):
                ignored.append(self._waiting.popleft())
                continue
            if not seq.schedulable:
                break
            rest = seq.get_len() - seq._tokens_ready
            fresh = not seq._table
            if fresh:
                if seq.get_len() > self._limit or seq.num_blocks() >= self._blocks.num_blocks:
                    seq.status = SequenceStatus.FINISHED_IGNORED
                    ignored.append(self._waiting.popleft())
                    continue
                if not self._has(seq.num_blocks()):
                    break
            elif seq.branch_id.startswith("_"):
                fresh = True
                kept = seq._tokens_ready // self._block_size
                needed = seq.num_blocks() - kept
                if not self._has(needed):
                    break
                seq.branch_id = seq.branch_id[1:]
                self._clone_state(seq)
                mine = self._blocks.allocate_nolock(needed)
                tail = seq._tokens_ready % self._block_size > 0
                if tail:
                    self._cloned_blocks.append((seq._table[kept], mine[0]))
                self._cloned_blocks += [(block, 0) for block in seq._table[kept + tail :]]
                seq._table = seq._table[:kept] + mine
            if taken + 1 > self._max_seqs or left < seq.get_len():
                break
            left -= seq.get_len()
            if not fresh:
                check(seq._tokens_ready == 0 or seq._tokens_ready >= self._lookahead, "too few cached tokens")
            check(rest >= self._lookahead and rest > 0, f"{rest} tokens are left to compute")
            tokens = min(rest, self._max_tokens - total)
            while seq._checkpoints and seq._checkpoints[0] <= seq._tokens_ready:
                seq._checkpoints.popleft()
            if seq._checkpoints and seq._tokens_ready + tokens >= seq._checkpoints[0]:
                tokens = seq._checkpoints.popleft() - seq._tokens_ready
            if not tokens:
                check(bool(scheduled), "a request cannot be scheduled")
                break
            cut = tokens < rest
            if (cut and not self._chunked) or tokens < max(self._lookahead, 1):
                break
            total += tokens
            check(seq.status is SequenceStatus.WAITING, f"a request to be computed is {seq.status}")
            if not seq._table:
                self._allocate(seq)
            if not cut:
                taken += 1
                seq.status = SequenceStatus.RUNNING
            scheduled.append(seq)
            lengths.append(tokens)
            seq.chunked_rest_len = rest - tokens
            self._waiting.popleft()
            if cut and self._role == 0:
                break
        if self._role == 0 and not scheduled and not ignored:
            return None
        return SchedulerOutputs(scheduled, True, lengths, ignored=ignored, **self._clones())

    def _decode(self) -> SchedulerOutputs:
        finished = [seq for seq in self.running if _ended(seq)]
        running = [seq for seq in self.running if not _ended(seq)]
        ignored = [seq for seq in self._waiting if _ended(seq)]
        self._waiting = deque(seq for seq in self._waiting if not _ended(seq))
        while self._prompted and len(running) < self._max_seqs:
            seq, forked = self._prompted[0]
            if seq.status is SequenceStatus.FINISHED_ABORTED:
                finished.append(self._prompted.popleft()[0])
                continue
            if forked:
                if not self._has(1):
                    break
                self._clone_state(seq)
                block = self._blocks.allocate_nolock(1)[0]
                used = -(-seq._tokens_ready // self._block_size)
                self._cloned_blocks.append((seq._table[used - 1], block))
                self._cloned_blocks += [(other, 0) for other in seq._table[used:]]
                seq._table = [*seq._table[: used - 1], block]
            self._prompted.popleft()
            if seq.status is SequenceStatus.WAITING:
                seq.status = SequenceStatus.RUNNING
                running.append(seq)
            else:
                finished.append(seq)
        running.sort(key=lambda seq: -seq.output_len())
        scheduled: list[Sequence] = []
        low, high = 0, len(running)
        while low < high and len(scheduled) < self._max_seqs:
            seq = running[high - 1]
            while not self._blocks.get_num_free_blocks() and high - low > 1:
                self._preempt(running[low], ignored)
                low += 1
            if self._blocks.get_num_free_blocks():
                self._grow(seq)
                scheduled.append(seq)
            else:
                self._preempt(seq, ignored)
            high -= 1
        scheduled.sort(key=lambda seq: -seq.get_len())
        lengths = [1 + len(seq.last_next_n_token) for seq in scheduled]
        return SchedulerOutputs(scheduled, False, lengths, finished=finished, ignored=ignored, **self._clones())

    def _grow(self, seq: Sequence) -> None:
        needed = seq.num_blocks()
        if len(seq._table) < needed:
            seq._table += self._blocks.allocate_nolock(1)
        elif len(seq._table) > needed:
            self._blocks.unpin_blocks(seq._table[needed:])
            del seq._table[needed:]
        check(len(seq._table) == needed, f"{len(seq._table)} blocks where {needed} are needed")

    def _preempt(self, seq: Sequence, ignored: list[Sequence]) -> None:
        check(seq.status is SequenceStatus.RUNNING, f"a preempted request is {seq.status}")
        if self._end_preempted:
            seq.status = SequenceStatus.FINISHED_PREEMPTED
            self.free_seq(seq)
            ignored.append(seq)
        else:
            seq.forget_progress()
            self._waiting.appendleft(seq)
            seq.status = SequenceStatus.WAITING
            self.free_seq(seq)
        self._preempted += 1

    def _clone_state(self, seq: Sequence) -> None:
        if self._states is not None:
            new = self._states.allocate_nolock(1)[0]
            self._cloned_states.append((seq.state_id, new))
            seq.state_id = new

    def _clones(self) -> dict[str, Any]:
        return {"clone_states": self._cloned_states, "clone_blocks": self._cloned_blocks}

    # After a step

    def process_outputs(
        self, scheduler_outputs: SchedulerOutputs, accepted_token_ids: Any, output_token_ids: Any, so_status: Any
    ) -> tuple[Any, Any]:
        latencies, pushed = [], []
        flat = 0
        for index, seq in enumerate(scheduler_outputs.scheduled_seqs):
            length = scheduler_outputs.seqlens_q[index]
            drafts = accepted_token_ids[flat : flat + length - 1].tolist() if len(accepted_token_ids) else []
            flat += length
            seq.end_step()
            if _ended(seq):
                pushed.append(0)
                if scheduler_outputs.prompt_run:
                    self.running.append(seq)
                continue
            if not scheduler_outputs.prompt_run and seq.status is SequenceStatus.WAITING:
                pushed.append(0)  # preempted while the step was under way
                continue
            seq._base = seq._tokens_ready
            seq._tokens_ready += length
            if seq._tokens_ready < seq.get_len():
                check(scheduler_outputs.prompt_run and seq.status is SequenceStatus.WAITING, "an odd chunk")
                pushed.append(0)
                self._waiting.appendleft(seq)
                continue
            if scheduler_outputs.prompt_run:
                self.running.append(seq)
            good: list[int] = []
            for token in drafts:
                if token == -1:
                    break
                good.append(token)
            seq.last_accepted_token = good
            seq.last_output_token = int(output_token_ids[index])
            count = 0
            for token in [*good, seq.last_output_token]:
                seq.append(token)
                count += 1
                self._check_stop(seq)
                if _ended(seq):
                    break
            pushed.append(count)
            if not scheduler_outputs.prompt_run:
                seq._tokens_ready = seq._base + count
            if seq.output_len() == 1:
                latencies.append(0.0)
        return np.array(latencies), np.array(pushed, np.int32)

    def _check_stop(self, seq: Sequence) -> None:
        if not seq.sampling_params.ignore_eos and seq.data.tokens[-1] == self._eos:
            seq.status = SequenceStatus.FINISHED_STOPPED
        elif seq.get_len() > self._max_len or seq.output_len() == seq.sampling_params.max_tokens:
            seq.status = SequenceStatus.FINISHED_LENGTH_CAPPED

    def fork_seq(
        self,
        seq: Sequence,
        blocks: Any,
        target_branch_id: str,
        sampling_params: Any,
        so_matcher: Any,
        sp_token: int,
        replace_last_token_id: int,
        seq_id: int,
        arrival_time: float,
    ) -> Sequence:
        check(seq._tokens_ready > 0, "nothing of it is computed")
        incomplete = seq._tokens_ready < seq.get_len() - 1
        tokens = list(seq.data.tokens)
        if replace_last_token_id >= 0:
            tokens[-1] = replace_last_token_id
        twin = Sequence(
            seq_id,
            tokens,
            tokens,
            None,
            self._block_size,
            seq.request_id,
            seq.user_id,
            sampling_params,
            arrival_time,
            None,
        )
        twin.multi_modal_data = seq.multi_modal_data
        twin.cached_hit_tokens = seq.cached_hit_tokens
        twin._table = list(seq._table) if blocks is None else [int(block) for block in blocks]
        check(bool(twin._table), "no blocks")
        twin.branch_id = target_branch_id
        twin.num_cached_tokens = min(seq._tokens_ready, len(tokens) - 1)
        if len(tokens) > self._max_len:
            twin.status = SequenceStatus.FINISHED_LENGTH_CAPPED
        self._blocks.pin_blocks(twin._table)
        if self._states is not None:
            twin.state_id = seq.state_id
            self._states.pin_blocks([seq.state_id])
        if incomplete:
            self._waiting.appendleft(twin)
        else:
            self._prompted.append((twin, True))
        return twin


def process_MTPInfo(outputs: SchedulerOutputs, use_nextn: bool, next_n_token_ids: Any, rates: Any) -> None:
    for index, seq in enumerate(outputs.scheduled_seqs):
        if (not outputs.prompt_run and seq.status is SequenceStatus.WAITING) or _ended(seq):
            continue
        drafts = len(seq.last_next_n_token)
        if seq._tokens_ready + outputs.seqlens_q[index] == seq.get_len() + drafts or drafts:
            seq.last_next_n_token = [int(token) for token in next_n_token_ids[index]] if use_nextn else []


def get_finished_seqs_info(outputs: SchedulerOutputs) -> tuple[int, int, int, int]:
    prompts = [seq.get_prompt_len() for seq in outputs.finished_seqs]
    answers = [seq.output_len() for seq in outputs.finished_seqs]
    return len(prompts), sum(answers), sum(prompts), 0


class RequestOutput:
    """Kept by number, as the compiled module hands out pointers."""

    made: ClassVar[dict[int, RequestOutput]] = {}

    def __init__(self, request_id: str, token_id: int, finished: bool, finish_reason: str) -> None:
        self.request_id, self.token_id = request_id, token_id
        self.finished, self.finish_reason = finished, finish_reason

    @staticmethod
    def clone(ptr: Any) -> RequestOutput:
        return RequestOutput.made[int(ptr)]


class RequestOutputPool:
    def release(self, unused_request_outputs: Any) -> None:
        for pointer in unused_request_outputs:
            RequestOutput.made.pop(int(pointer), None)


_numbers = iter(range(1, 1 << 62))


def build_request_outputs(outputs: SchedulerOutputs, *args: Any, **kwargs: Any) -> Any:
    pushed = args[12]
    made = []
    for seq, count in zip(outputs.scheduled_seqs, pushed, strict=True):
        tokens = seq.data.tokens[len(seq.data.tokens) - int(count) :] if count else []
        made += [
            RequestOutput(seq.request_id, token, _ended(seq) and number == len(tokens) - 1, seq.status.name)
            for number, token in enumerate(tokens)
        ]
    made += [RequestOutput(seq.request_id, -1, True, seq.status.name) for seq in outputs.ignored_seqs]
    pointers = []
    for output in made:
        pointers.append(next(_numbers))
        RequestOutput.made[pointers[-1]] = output
    return np.array(pointers, np.uint64)


class FlopsEstimator:
    def __init__(self, model_metadata: Any, *, yoco_mode: str = "off", keep_tokens: int = 0) -> None:
        pass
