"""What stands in for the packages that DeepInfer needs and a machine without its accelerators cannot have.

Its own Python modules are the real ones. Import this before any of them.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any

import native
import simulated
import torch

ABSENT = (
    *("deep_ep", "deep_gemm", "deep_select", "flash_mla", "tile_kernels", "tilelang", "tvm", "einops", "zmq"),
    *("posix_ipc", "orjson", "scipy", "xgrammar", "flash_attn", "torch_npu", "tabulate", "cutlass", "pynvml"),
    *("PIL", "requests", "psutil", "fastapi", "uvicorn", "sympy_", "numba"),
)
"""Kernels, and what serves images, structured output and the network: imported, and never called by these tests."""


class Anything:
    """Whatever a module does with it when it is imported."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__name__ = str(args[0]) if args else "anything"

    def __call__(self, *args: Any, **kwargs: Any) -> Anything:
        return Anything()

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __getitem__(self, key: Any) -> Anything:
        return Anything()

    def __iter__(self) -> Any:
        return iter(())


for _operation in [
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
    "lt",
    "le",
    "gt",
    "ge",
    "neg",
    "invert",
    "matmul",
]:
    for _prefix in ("", "r"):
        setattr(Anything, f"__{_prefix}{_operation}__", lambda self, *args: Anything())


class _Absent(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the absent packages, and the compiled module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in ABSENT or name == "deepinfer._C" or name.startswith("deepinfer._C."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Absent(spec.name)
        if spec.name == "deepinfer._C.engine":
            for key, value in vars(native).items():
                if not key.startswith("__"):
                    setattr(module, key, value)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def install() -> None:
    """Idempotent."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    os.environ.setdefault("DEEPINFER_ACCELERATOR", "nvidia")
    torch.cuda.Event = simulated.Event  # type: ignore[misc]
    # A profiler would take a third of the time of these tests.
    torch.profiler.record_function = lambda name: contextlib.nullcontext()  # type: ignore[assignment, misc]
    torch.cuda.Stream = Anything  # type: ignore[assignment, misc]


install()
