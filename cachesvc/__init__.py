"""cachesvc: a persistent KV/prefix-cache service for LLM inference."""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"
