"""One engine: a process that saves and loads through the real connector, and tells what it was promised.

It is told by lines of standard input to begin, works until the daemon is gone, and then waits for the next line. Each
answer of the daemon becomes a line of JSON on standard output before the next call is made.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Final

from cachesvc.connector.client import Attachment, Client
from cachesvc.connector.errors import CacheError
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.prefix_cache import PrefixCache
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc.address import client_address
from faulty.model import BLOCK_TOKENS, BLOCKS, PAYLOADS, Prompt, content, namespace_of

PATIENT: Final = CacheOptions(match_budget_s=20.0, match_deadline_s=20.0, load_deadline_s=20.0, load_stall_s=20.0)
_LONGEST_SECONDS: Final = 20.0


class Reader:
    """Loads prompts and compares every byte."""

    def __init__(self, address: str) -> None:
        self._caches = {
            size: PrefixCache(namespace_of(size), payload_bytes, address=address, options=PATIENT)
            for size, payload_bytes in PAYLOADS.items()
        }

    def ready(self, timeout_s: float) -> bool:
        return all(cache.ready(timeout_s) for cache in self._caches.values())

    def read(self, prompt: Prompt) -> tuple[int, int]:
        """Blocks that were there, from the first on, and how many of them were wrong."""
        cache = self._caches[prompt.size]
        wrong = 0

        def scatter(first: int, payloads: Sequence[memoryview]) -> None:
            nonlocal wrong
            for key, payload in zip(prompt.keys[first:], payloads, strict=False):
                wrong += payload != content(key, prompt.payload_bytes)

        p = cache.match(prompt.tokens, traffic_class=prompt.traffic_class)
        try:
            return cache.load(p, scatter) // BLOCK_TOKENS, wrong
        finally:
            cache.finish(p)

    def close(self) -> None:
        for cache in self._caches.values():
            cache.close()


class Engine:
    def __init__(self, address: str, prompts: range, seed: int) -> None:
        self._address = address
        self._prompts = prompts
        self._random = random.Random(seed)

    def work(self) -> None:
        """Until the daemon is gone."""
        reader = Reader(self._address)
        writers = {
            durable: Client(client_address(self._address), CacheOptions(durable=durable, save_deadline_s=20.0))
            for durable in (True, False)
        }
        end = time.monotonic() + _LONGEST_SECONDS
        try:
            attached = {
                durable: {
                    size: client.attach(namespace_of(size).canonical_json(), [payload])
                    for size, payload in PAYLOADS.items()
                }
                for durable, client in writers.items()
            }
            while time.monotonic() < end:
                prompt = Prompt(self._random.choice(self._prompts))
                there, wrong = reader.read(prompt) if self._random.random() < 0.7 else (0, 0)
                if wrong:
                    _tell({"prompt": prompt.number, "wrong": wrong})
                durable = self._random.random() < 0.6
                self._save(writers[durable], attached[durable][prompt.size], prompt, there, durable=durable)
        except CacheError:
            pass  # it was killed
        finally:
            for client in writers.values():
                client.close()
            reader.close()

    def _save(self, client: Client, attachment: Attachment, prompt: Prompt, first: int, *, durable: bool) -> None:
        keys = prompt.keys[first : first + self._random.randrange(1, BLOCKS + 1)]
        if not keys:
            return
        _tell({"prompt": prompt.number, "first": first, "offered": len(keys)})
        payloads = [memoryview(content(key, prompt.payload_bytes)) for key in keys]
        stored = client.store(attachment, keys, payloads, prompt.traffic_class)
        blocks = [first + i for i, state in enumerate(stored.committed) if state == pb.CommitState.STORED]
        if blocks:
            _tell({"prompt": prompt.number, "stored": blocks, "durable": durable})


def _tell(fact: dict[str, object]) -> None:
    print(json.dumps(fact), flush=True)


def main() -> None:
    address, first, last, seed = sys.argv[1], *map(int, sys.argv[2:5])
    engine = Engine(address, range(first, last), seed)
    for _ in sys.stdin:
        engine.work()
        _tell({"idle": True})


if __name__ == "__main__":
    main()
