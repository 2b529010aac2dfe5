"""cachesvc: the arena, through the connector's client."""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.benchmark.client import BenchClient
from cachesvc.benchmark.process import DaemonProcess
from cachesvc.connector.client import Match
from sides.base import Buffers, Side


class Ours(Side):
    def start(self) -> None:
        self._client: BenchClient | None = None
        self._match: Match | None = None
        self._daemon = DaemonProcess(self.memory, self.directory)
        self._daemon.__enter__()

    def allocate(self, size: int, count: int) -> tuple[Buffers, Buffers]:
        if self._client is not None:
            self._client.close()
        self._client = BenchClient(self._daemon.address, size)
        self._client.warm()
        return super().allocate(size, count)

    @property
    def client(self) -> BenchClient:
        assert self._client is not None, "allocate comes first"
        return self._client

    def put(self, keys: Sequence[bytes], source: Buffers) -> None:
        self.client.put(keys, source)

    def get(self, keys: Sequence[bytes], target: Buffers) -> None:
        self.client.get(keys, target)

    def exists(self, keys: Sequence[bytes]) -> int:
        self._match = self.client.match(keys)
        return int(self._match.blocks)

    def release(self) -> None:
        if self._match is not None:
            self.client.release(self._match)
        self._match = None

    def settle(self) -> None:
        self.client.wait_flushed()

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
        self._daemon.close()
