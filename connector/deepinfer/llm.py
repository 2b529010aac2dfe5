"""DeepInfer's entry point for offline inference, with prefixes from the cache: swap it in by one import."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

from deepinfer.entrypoints import llm as original

from cachesvc.connector.deepinfer.engine import CachedLLMEngine

_making: Final = threading.Lock()


class LLM(original.LLM):
    """``deepinfer.entrypoints.llm.LLM``, and `cachesvc`: options of the cache, see `Settings`."""

    def __init__(self, *args: Any, cachesvc: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Raises `ValueError` for options that make no sense."""
        engine = CachedLLMEngine.configured(cachesvc)
        with _making:  # DeepInfer's constructor names its engine class as a global of its module
            kept, original.LLMEngine = original.LLMEngine, engine
            try:
                super().__init__(*args, **kwargs)
            finally:
                original.LLMEngine = kept
