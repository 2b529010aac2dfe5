"""What the engine refuses, as one small tree.

EngineError
├── CheckpointError     a model directory that cannot be used
├── RequestError        a request that can never run (also a ValueError)
└── DemoError           the demonstration cannot go on
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose. The text says what was wrong and what to do."""


class CheckpointError(EngineError):
    """The model directory is missing, incomplete or of an architecture that is not implemented."""


class RequestError(EngineError, ValueError):
    """The request can never run on this engine: empty, longer than the context, larger than the KV pool."""


class DemoError(EngineError):
    """The demonstration cannot go on: its daemon did not start, its store is not empty."""
