"""What runs inside an engine: prefix hashing, look-ups, loads, background saves, and the ways to do without a daemon.

An engine needs `PrefixCache` (and `NullPrefixCache` for "cache off"), used as `BasePrefixCache` describes::

    cache = PrefixCache(namespace, layout.payload_bytes)     # neither waits for a daemon nor needs one
    p = cache.match(tokens)                                  # p.hit_tokens; at most 20 ms
    loaded = cache.load(p, scatter)                          # verified payloads into your pages
    ...                                                      # compute tokens[loaded:]
    cache.save(p, computed_tokens, gather)                   # copied now, stored in the background
    cache.extend(p, decoded)                                 # the next turn resends the answer: save its blocks too
    cache.finish(p)

============  =====================================================================================
base          the interface
prefix_cache  its two implementations: look up, load, save, finish
split         the same for an engine whose scheduler and workers are different processes
passes        one pass over a prompt: tokens, keys, answer, lease
link          attached or not; the only thread that connects
breaker       when to leave a daemon alone and when to try it again
arena         the daemon's shared memory, mapped, and its socket; prefault: its page tables, in the background
bulk          the TCP stream for payloads that do not go through shared memory
client        the wire, thinly; errors: what can go wrong on it; forks: what gRPC does in a process that forks
loading       slots, or what arrives, into verified blocks; loader: one load, by whichever way there is
checkpoints   the state of windows: stored at few positions, restored behind a hit
staging       the save queue and its thread; storing: a batch into the arena, pipelined
payloads      many payloads in one mapping, and their addresses; copying: by several threads, with checksums
memory        keys known as stored, blocks that failed
buffers       page-aligned payload buffers
workers       background threads with a bounded queue
options       every limit; stats: every number
device        the way to and from KV on a GPU, which imports torch: not imported here
layout        what a payload holds, byte for byte
settings      options of an adapter, checked; weights: their digest; rates: whether loading beats computing
vllm          the connector for vLLM; deepinfer, sglang: those for DeepInfer and SGLang. Each imports its engine, so
              none is imported here
conformance   what every adapter has to pass, and can be run by an engine's author
============  =====================================================================================

Importing this makes no connection, no thread and no gRPC channel.
"""

from cachesvc.connector.base import BasePrefixCache, Gather, Scatter
from cachesvc.connector.layout import BlockLayout, KVGroup
from cachesvc.connector.options import CacheOptions
from cachesvc.connector.passes import Pass
from cachesvc.connector.prefix_cache import NullPrefixCache, PrefixCache
from cachesvc.connector.stats import CacheStats

__all__ = [
    "BasePrefixCache",
    "BlockLayout",
    "CacheOptions",
    "CacheStats",
    "Gather",
    "KVGroup",
    "NullPrefixCache",
    "Pass",
    "PrefixCache",
    "Scatter",
]
