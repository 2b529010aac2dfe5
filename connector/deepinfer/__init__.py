"""The adapter for DeepInfer: one import, and prefixes outlive the engine and are shared (``docs/deepinfer.md``).

===========  ====================================================================================
llm          `LLM`, DeepInfer's entry point with this engine behind it
engine       `CachedLLMEngine`: DeepInfer's hooks, each handed to where its work is done
session      the cache of one engine, and the requests that it tracks
admission    a request until it is computed: look up, allocate, load, let go
saving       blocks that are full: pinned, copied in the background, unpinned
requests     what is known of one request
pages        what a payload holds, and copies between it and DeepInfer's pool
identity     the namespace; which requests can be cached, and under which salt
settings     options
===========  ====================================================================================
"""

try:
    import deepinfer  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"cachesvc.connector.deepinfer needs DeepInfer in this environment ({error}); see docs/deepinfer.md"
    ) from None

from cachesvc.connector.deepinfer.engine import CachedLLMEngine
from cachesvc.connector.deepinfer.llm import LLM

__all__ = ["LLM", "CachedLLMEngine"]
