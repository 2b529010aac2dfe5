"""A device that computes late: what is launched is carried out when somebody waits for an event behind it.

The KV of a token is a digest of all tokens up to it, so that every byte of a block can be checked, and the next token
follows from it, so that every answer is known beforehand. Before it computes, the device checks what it is about to
read: the KV of all earlier tokens must be there, whoever has brought it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

TOKENS = 128
LAYERS = ((0, 0, 16 * TOKENS), (2, 16 * TOKENS, 8 * TOKENS))
"""(layer, offset, bytes): 16 and 8 bytes of a token."""
PAYLOAD = 24 * TOKENS
ROW = PAYLOAD + 128
"""Of the pool: at the end of a block there are bytes that nobody uses."""
VOCABULARY = 1000
EOS = 7
REPLAYED = np.uint64(0xA5A5A5A5A5A5A5A5)
"""What replay behind a hit computes is not exactly what was computed at first: it differs by this."""


class Queue:
    """Of launched work. One for all engines of a test."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.launched = 0
        self.done = 0
        self._work: list[Callable[[], None]] = []
        self.failures: list[str] = []

    def launch(self, work: Callable[[], None]) -> None:
        with self.lock:
            self._work.append(work)
            self.launched += 1

    def run_until(self, number: int) -> None:
        with self.lock:
            while self.done < number:
                work = self._work.pop(0)
                self.done += 1
                try:
                    with torch.inference_mode():
                        work()
                except Exception as error:  # noqa: BLE001  # shown by the test, not to the engine
                    self.failures.append(f"{type(error).__name__}: {error}")


QUEUE = Queue()


class Event:
    """In place of ``torch.cuda.Event``, and of the adapter's fence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._mark = QUEUE.launched

    def record(self, *args: Any) -> None:
        self._mark = QUEUE.launched

    def synchronize(self) -> None:
        QUEUE.run_until(self._mark)

    wait = synchronize

    def elapsed_time(self, other: Any) -> float:
        return 1.0


_MIX = np.uint64(0x9E3779B97F4A7C15)


SEED = 0x1234_5678_9ABC_DEF1
_known: dict[bytes, np.ndarray[Any, np.dtype[np.uint64]]] = {}


def chained(value: int, tokens: list[int]) -> list[int]:
    """Digests of prefixes, from that of the tokens before."""
    out = []
    for token in tokens:
        value = ((value ^ token) * 0x9E3779B97F4A7C15 + (value >> 29)) & 0xFFFF_FFFF_FFFF_FFFF
        out.append(value)
    return out


def digests(tokens: list[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Of each prefix: uint64 [tokens]."""
    name = np.array(tokens, np.int32).tobytes()
    if name not in _known:
        if len(_known) > 2000:
            _known.clear()
        _known[name] = np.array(chained(SEED, tokens), np.uint64)
    return _known[name].copy()


def layer_bytes(values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """KV of tokens in both layers: uint8 [tokens, 16] and [tokens, 8]."""
    first = np.stack([values, ~values], axis=1).view(np.uint8).reshape(len(values), 16)
    second = (values * _MIX).view(np.uint8).reshape(len(values), 8)
    return first, second


def payloads_of(tokens: list[int]) -> list[bytes]:
    """What every full block must hold."""
    first, second = layer_bytes(digests(tokens))
    return [
        first[start : start + TOKENS].tobytes() + second[start : start + TOKENS].tobytes()
        for start in range(0, len(tokens) - TOKENS + 1, TOKENS)
    ]


def next_token(digest: int) -> int:
    """Rarely the end."""
    digest = (digest >> 17) & 0xFFFF_FFFF
    return EOS if digest % 97 == 0 else 8 + digest % (VOCABULARY - 8)


def answer_to(prompt: list[int], max_tokens: int) -> list[int]:
    """What any engine must say."""
    value, answer = int(digests(prompt)[-1]), list[int]()
    while len(answer) < max_tokens:
        answer.append(next_token(value))
        if answer[-1] == EOS:
            break
        value = chained(value, answer[-1:])[0]
    return answer


@dataclass
class Computing:
    """What the device knows of one sequence: all tokens, also those that the scheduler has not heard of yet."""

    tokens: list[int]
    values: np.ndarray[Any, Any]
    replay_start: int = 0
    replay_end: int = 0
    drafts: list[int] = field(default_factory=list)
    replayed: set[int] = field(default_factory=set)


class Pool:
    """KV blocks in host memory, written and checked by token."""

    def __init__(self, blocks: int) -> None:
        self.tensor = torch.zeros((blocks, ROW), dtype=torch.uint8)
        self.bytes = self.tensor.numpy()
        self.bytes[:] = 0xEE

    def _rows(self, table: list[int], start: int, end: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        positions = np.arange(start, end)
        return np.array(table)[positions // TOKENS], positions % TOKENS

    def write(self, table: list[int], start: int, values: np.ndarray[Any, Any]) -> None:
        blocks, within = self._rows(table, start, start + len(values))
        for (_, offset, length), data in zip(LAYERS, layer_bytes(values), strict=True):
            size = length // TOKENS
            columns = offset + within[:, None] * size + np.arange(size)
            self.bytes[blocks[:, None], columns] = data

    def read(self, table: list[int], end: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        blocks, within = self._rows(table, 0, end)
        found = []
        for _, offset, length in LAYERS:
            size = length // TOKENS
            columns = offset + within[:, None] * size + np.arange(size)
            found.append(self.bytes[blocks[:, None], columns])
        return found[0], found[1]
