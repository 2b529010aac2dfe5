"""The adapter for SGLang: a storage backend of HiCache, loaded as ``dynamic`` by module path (``docs/sglang.md``).

===========  ====================================================================================
storage      `CacheStorage`: SGLang's `HiCacheStorage`, each call handed to the pools concerned
pools        pages of one host pool, in a namespace of their own
hits         how far a prefix reaches over several pools
identity     the namespace of a pool
settings     options
===========  ====================================================================================
"""

try:
    import sglang.srt.mem_cache.hicache_storage  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"cachesvc.connector.sglang needs SGLang in this environment ({error}); see docs/sglang.md"
    ) from None

from cachesvc.connector.sglang.storage import CacheStorage

__all__ = ["CacheStorage"]
