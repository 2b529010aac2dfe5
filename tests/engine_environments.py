"""Makes the environments of `make test-deepinfer` and `make test-sglang`: the engine's own package beside ours.

usage: engine_environments.py (deepinfer | sglang) DIRECTORY

The environment sees everything that is installed in the one that runs this, and the Python files of one engine, fetched
with pip and unpacked, not installed: what they need to compute is not to be had on a machine without accelerators, and
not needed to test an adapter. Exit code 75 when the package cannot be downloaded: there is then nothing to test.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

PACKAGES = {"deepinfer": "deepinfer==0.1.0", "sglang": "sglang==0.5.23"}
CANNOT_DOWNLOAD = 75

# pip asks a source distribution for its metadata even when it is only to be downloaded, and the build script of this
# one
# imports torch's build helpers. These stand in for them; nothing is built.
BUILD_HELPERS = {
    "torch/__init__.py": "class _C:\n    _GLIBCXX_USE_CXX11_ABI = True\n",
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": (
        "from setuptools import Extension\nfrom setuptools.command.build_ext import build_ext as BuildExtension\n"
        "CUDA_HOME = '/'\ndef CUDAExtension(name, sources, **options):\n    return Extension(name, sources)\n"
    ),
}

# DeepInfer is written for Python 3.12. Two classes use its new syntax for generics; where this Python is older they are
# written the old way. Nothing else needs it.
OLDER_SYNTAX = {
    "deepinfer/environ.py": ("class EnvVar[T]:", "from typing import Generic\nclass EnvVar(Generic[T]):"),
    "deepinfer/model_executor/utils.py": (
        "class Movable[T]:",
        "from typing import Generic\nclass Movable(Generic[T]):",
    ),
}


def main(engine: str, directory: Path) -> int:
    if (directory / ".installed").exists() and (directory / ".installed").read_text() == PACKAGES[engine]:
        return 0
    shutil.rmtree(directory, ignore_errors=True)
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    packages = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    )
    with tempfile.TemporaryDirectory() as work:
        archive = download(python, engine, Path(work))
        if archive is None:
            print(f"{PACKAGES[engine]} cannot be downloaded: its tests are skipped")
            return CANNOT_DOWNLOAD
        source = directory / "source"
        unpack(archive, source)
    root = next(source.glob("deepinfer-*")) if engine == "deepinfer" else source
    if engine == "deepinfer" and sys.version_info < (3, 12):
        write_older_syntax(root)
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "base.pth").write_text("\n".join([str(root), *lines]) + "\n")
    (directory / ".installed").write_text(PACKAGES[engine])
    return 0


def download(python: Path, engine: str, work: Path) -> Path | None:
    command = [python, "-m", "pip", "download", "-q", "--no-deps", "--python-version", "3.12", "-d", str(work)]
    environment = dict(os.environ)
    if engine == "deepinfer":
        helpers = work / "helpers"
        for name, text in BUILD_HELPERS.items():
            (helpers / name).parent.mkdir(parents=True, exist_ok=True)
            (helpers / name).write_text(text)
        needed = subprocess.run([python, "-m", "pip", "install", "-q", "setuptools>=77,<90"], check=False)
        if needed.returncode:
            return None
        command += ["--no-binary", ":all:", "--no-build-isolation"]
        environment |= {"PYTHONPATH": str(helpers), "VIRTUAL_ENV": sys.prefix, "DEEPINFER_ACCELERATOR": "nvidia"}
    else:
        command += ["--only-binary", ":all:"]
    done = subprocess.run([*command, PACKAGES[engine]], env=environment, check=False, capture_output=True, text=True)
    found = [*work.glob(f"{engine}-*.tar.gz"), *work.glob(f"{engine}-*.whl")]
    if done.returncode or not found:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return found[0]


def unpack(archive: Path, target: Path) -> None:
    target.mkdir(parents=True)
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(target)
        return
    with tarfile.open(archive) as source:
        source.extractall(target, filter="data")


def write_older_syntax(root: Path) -> None:
    for name, (new, old) in OLDER_SYNTAX.items():
        text = (root / name).read_text()
        if text.count(new) != 1:
            raise SystemExit(f"{name} no longer holds {new!r}; use Python 3.12")
        if "T = TypeVar" not in text:
            old = "from typing import TypeVar\nT = TypeVar('T')\n" + old
        (root / name).write_text(text.replace(new, old))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]).absolute()))
