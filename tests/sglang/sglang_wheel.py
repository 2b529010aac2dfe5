"""Makes SGLang's storage classes importable from its wheel, without what the engine around them needs.

``sglang``'s package initializers import the whole engine, and with it kernels for GPUs. The modules used here need
none of it, and are the real ones. Import this before any of them.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

_found = importlib.util.find_spec("sglang")
assert _found is not None and _found.submodule_search_locations, "run these tests by `make test-sglang`"
_root = Path(next(iter(_found.submodule_search_locations))).parent
for _name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.utils"):
    _module = types.ModuleType(_name)
    _module.__path__ = [str(_root.joinpath(*_name.split(".")))]
    sys.modules[_name] = _module
# The file backend wants one function of a module that imports the engine: "10G" as a number.
_common = types.ModuleType("sglang.srt.utils.common")
_common.human_readable_int = int  # type: ignore[attr-defined]
sys.modules[_common.__name__] = _common
