"""Makes SGLang's storage classes importable from its wheel, without what the engine around them needs.

``sglang``'s own package initializers import the whole engine, and with it kernels for GPUs. The three modules used here
need none of it, and are the real ones.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

WHEEL = Path(os.environ.get("CACHESVC_SGLANG", ""))

if (WHEEL / "sglang").is_dir():
    for _name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.utils"):
        _module = types.ModuleType(_name)
        _module.__path__ = [str(WHEEL.joinpath(*_name.split(".")))]
        sys.modules[_name] = _module
    # The file backend wants one function of a module that imports the engine: "10G" as a number.
    _common = types.ModuleType("sglang.srt.utils.common")
    _common.human_readable_int = int  # type: ignore[attr-defined]
    sys.modules[_common.__name__] = _common
