"""LMCache's multiprocess server in its shared-memory mode (lmcache_driven).

The server copies between its own memory and the engine's paged KV, which it maps. Driven as ``lmcache bench server``
does it; one chunk is one of our blocks.

The KV has one layer, so that a chunk is contiguous in it: no time goes into gathering or scattering pages.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sides.base import CALL_SECONDS, START_SECONDS, Buffers, Side, free_port

_CHUNK = 128
_POLL_SECONDS = 0.0002


class LMCacheMP(Side):
    def start(self) -> None:
        os.environ["LMCACHE_TRACK_USAGE"] = "false"
        self._port = free_port()
        self._http = free_port()
        lmcache = str(Path(sys.executable).parent / "lmcache")
        self.serve(
            [
                *(lmcache, "server", "--host", "127.0.0.1", "--port", str(self._port), "--chunk-size", str(_CHUNK)),
                *("--l1-size-gb", f"{self.memory / (1 << 30):g}", "--no-l1-use-lazy", "--eviction-policy", "LRU"),
                *("--supported-transfer-mode", "lmcache_driven", "--max-workers", "2", "--l1-read-ttl-seconds", "30"),
                *("--http-host", "127.0.0.1", "--http-port", str(self._http), "--disable-observability"),
            ]
        )
        self._client: Any = None
        self._count = 0

    def allocate(self, size: int, count: int) -> tuple[Buffers, Buffers]:
        """Pages of the KV that the server maps: the first half to put from, the second to get into."""
        from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
        from lmcache.cli.commands.bench.server_bench.config import BenchConfig

        if size % _CHUNK:
            raise RuntimeError(f"blocks of {size} bytes are not {_CHUNK} tokens")
        self._close_client()
        pages = 1 + 2 * count  # page 0 stands for "no data"
        self._client = ServerBenchClient(
            BenchConfig(
                rpc_url=f"tcp://127.0.0.1:{self._port}",
                http_url=f"http://127.0.0.1:{self._http}",
                mode="cpu",
                transfer_mode="lmcache_driven",
                tp_size=1,
                use_mla=True,
                num_tokens=_CHUNK * count,
                kvcache_shape_spec=f"(1,{pages},{_CHUNK},1,{size // _CHUNK}):uint8:1",
                num_blocks=pages,
                block_size=_CHUNK,
            ),
            log=lambda text: None,
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._client.start()
                break
            except (RuntimeError, TimeoutError) as error:
                if time.monotonic() > deadline or any(server.poll() is not None for server in self._servers):
                    raise RuntimeError(f"its server does not come up: {error}; {self.last_words()}") from error
                time.sleep(0.5)
        self._count = count
        (tensor,) = self._client._workers[0].kv_caches.values()
        memory = (ctypes.c_char * (pages * size)).from_address(tensor.data_ptr())
        views = [memoryview(memory).cast("B")[i * size : (i + 1) * size] for i in range(1, pages)]
        return views[:count], views[count:]

    def put(self, keys: Sequence[bytes], source: Buffers) -> None:
        request = self._request(keys, first_page=1)
        result = self._client.store(request, 0, request.num_full_tokens)
        if not result.succeeded:
            raise RuntimeError("STORE fails")

    def get(self, keys: Sequence[bytes], target: Buffers) -> None:
        request = self._request(keys, first_page=1 + self._count)
        if (found := self._look_up(request)) != len(keys):  # it takes the locks that RETRIEVE gives back
            raise RuntimeError(f"LOOKUP finds {found} chunks of {len(keys)}")
        result = self._client.retrieve(request, 0, request.num_full_tokens)
        if not result.succeeded:
            raise RuntimeError("RETRIEVE fails")

    def exists(self, keys: Sequence[bytes]) -> int:
        return self._look_up(self._request(keys, first_page=1))

    def forget(self, keys: Sequence[bytes]) -> None:
        """All of them, with the locks that look-ups have left: it evicts too late to be left to itself."""
        self._client._req_client.clear(True).result(timeout=CALL_SECONDS)

    def stop(self) -> None:
        self._close_client()
        super().stop()

    def _request(self, keys: Sequence[bytes], first_page: int) -> Any:
        """A prompt that no other set of keys has: its first token names it, and each chunk's hash depends on it."""
        from lmcache.cli.commands.bench.server_bench.client import RequestContext

        name = int.from_bytes(keys[0][:4], "little") >> 1
        tokens = _CHUNK * len(keys)
        return RequestContext(
            sequence_id=name,
            request_id=os.urandom(8).hex(),
            request_kind="bench",
            token_ids=(name,) + (1,) * (tokens - 1),
            num_full_tokens=tokens,
            total_chunks=len(keys),
            chunk_size=_CHUNK,
            block_offset=first_page,
            num_blocks=len(keys),
        )

    def _look_up(self, request: Any) -> int:
        """LOOKUP, then its outcome: asked for more often than the original does, which sleeps 50 ms in between."""
        from lmcache.cli.commands.bench.server_bench import helpers

        key = helpers._make_key(request.token_ids, request.request_id, start=0, end=request.num_full_tokens)
        client = self._client._req_client
        client.lookup(key, 1).result(timeout=CALL_SECONDS)
        deadline = time.monotonic() + CALL_SECONDS
        while (found := client.query_prefetch_status(request.request_id).result(timeout=CALL_SECONDS)) is None:
            if time.monotonic() > deadline:
                raise RuntimeError("LOOKUP is not answered")
            time.sleep(_POLL_SECONDS)
        return int(found)

    def _close_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
