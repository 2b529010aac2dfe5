"""Generates the stubs of ``proto/cachesvc/v1`` into a directory: ``python -m cachesvc.rpc.generate OUT``.

Needs grpcio-tools and mypy-protobuf (the `dev` extra) and the source tree.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

PROTO_DIR = Path(__file__).resolve().parents[2] / "proto" / "cachesvc" / "v1"


def generate(out: Path) -> list[Path]:
    """Writes ``*_pb2.py``, ``*_pb2_grpc.py`` and their ``.pyi`` into `out`; returns them. Raises `RuntimeError`."""
    from grpc_tools import protoc

    # protoc finds its plugins on PATH, and a virtual environment that is not activated is not there.
    os.environ["PATH"] = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", "")))
    with tempfile.TemporaryDirectory() as scratch:
        code = protoc.main(
            [
                "protoc",
                f"-Icachesvc/rpc={PROTO_DIR}",
                f"--python_out={scratch}",
                f"--mypy_out=quiet:{scratch}",
                f"--grpc_python_out={scratch}",
                f"--mypy_grpc_out=quiet:{scratch}",
                *(f"cachesvc/rpc/{path.name}" for path in sorted(PROTO_DIR.glob("*.proto"))),
            ]
        )
        if code:
            raise RuntimeError(f"protoc ended with {code} on {PROTO_DIR}")
        out.mkdir(parents=True, exist_ok=True)
        return [
            Path(shutil.copy(path, out / path.name)) for path in sorted((Path(scratch) / "cachesvc" / "rpc").iterdir())
        ]


if __name__ == "__main__":
    for written in generate(Path(sys.argv[1])):
        print(written)
