"""Plays a workload against a live daemon: match, store what is missing with small payloads, release."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cachesvc.benchmark.process import BenchError
from cachesvc.connector.client import Client
from cachesvc.connector.errors import CacheError
from cachesvc.connector.options import CacheOptions
from cachesvc.keys import KEY_BYTES, Namespace
from cachesvc.limits import MAX_KEYS
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.address import parse_address
from cachesvc.trace.formats import Request

_DEADLINE_SECONDS: Final = 60.0
_OPTIONS: Final = CacheOptions(save_deadline_s=_DEADLINE_SECONDS, control_deadline_s=10.0)
_STORED_AT_ONCE: Final = 1_024


def _key(key: int) -> bytes:
    """Spread evenly, like the keys of real prompts: the daemon samples by them."""
    return hashlib.blake2b(key.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()


@dataclass
class Played:
    """In tokens, unless the name says otherwise."""

    requests: int = 0
    input: int = 0
    hits: int = 0
    stored_blocks: int = 0
    refused_blocks: int = 0
    seconds: float = 0.0


class Pace:
    """When each request is sent: as the trace says (`real`), or at `rate` a second, 0 for as fast as it goes.

    With a virtual clock and `offset_file`, the daemon that reads it (``clock_offset_file``) lives in the trace's time.
    """

    def __init__(self, *, real: bool, rate: float, offset_file: Path | None) -> None:
        self._real, self._rate, self._file = real, rate, offset_file
        self._began = time.monotonic()
        self._first: float | None = None

    def wait(self, number: int, at: float) -> None:
        self._first = at if self._first is None else self._first
        due = at - self._first if self._real else number / self._rate if self._rate else 0.0
        passed = time.monotonic() - self._began
        if due > passed:
            time.sleep(due - passed)
        if self._file is not None:
            draft = self._file.with_suffix(".part")
            draft.write_text(f"{at - self._first - (time.monotonic() - self._began):.6f}")
            draft.replace(self._file)


def play(
    requests: Iterable[Request],
    address: str,
    pace: Pace,
    seed: int,
    block_tokens: int,
    payload_bytes: int,
    tell: Callable[[Played], None],
) -> Played:
    """The first numbers make the namespace. Raises `BenchError` when the daemon does not do its part."""
    played, began = Played(), time.monotonic()
    client = Client(parse_address(address), _OPTIONS)
    payload = memoryview(bytearray(payload_bytes))
    try:
        namespace = Namespace(model="workload", revision=str(seed), dtype="uint8", block_tokens=block_tokens)
        attachment = client.attach(namespace.canonical_json(), [payload_bytes])
        for number, request in enumerate(requests):
            pace.wait(number, request.at)
            keys = [_key(key) for key in request.keys[:MAX_KEYS]]
            match = client.match(
                attachment,
                keys,
                traffic_class=request.traffic_class,
                input_tokens=request.input_tokens,
                local_tokens=request.local_tokens,
                min_blocks=1,
                pass_id=os.urandom(16),
                unreachable_tokens=0,
                deadline_s=_DEADLINE_SECONDS,
            )
            played.requests += 1
            played.input += request.input_tokens
            played.hits += match.blocks * namespace.block_tokens
            if match.blocks:
                client.release(attachment, match, match.blocks, pb.MissReason.MISS_REASON_UNSPECIFIED)
            missing = keys[match.blocks :]
            for first in range(0, len(missing), _STORED_AT_ONCE):
                part = missing[first : first + _STORED_AT_ONCE]
                stored = client.store(attachment, part, [payload] * len(part), request.traffic_class, checksums=True)
                count = stored.committed.count(pb.CommitState.STORED)
                played.stored_blocks += count
                played.refused_blocks += len(part) - count
            played.seconds = time.monotonic() - began
            tell(played)
    except OSError as error:
        raise BenchError(f"cannot write {error.filename}: {error.strerror}") from error
    except CacheError as error:
        raise BenchError(f"the daemon at {address} failed a call: {error}") from error
    finally:
        client.close()
    return played
