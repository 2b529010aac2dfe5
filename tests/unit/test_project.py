"""Rules of the repository itself: imports, layers, generated stubs, what the base install needs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cachesvc.rpc.generate import generate

ROOT = Path(__file__).parents[2]
FOLDERS = {"cachesvc": ROOT / "cachesvc", "cachesvc.connector": ROOT / "connector", "cachesvc.engine": ROOT / "engine"}
FOLDERS["cachesvc.kernels"] = ROOT / "kernels"

# Who may import whom. The daemon is everything in cachesvc/ but the two leaves.
LEAVES = ("cachesvc.rpc", "cachesvc.keys")
ALLOWED = {
    "cachesvc.connector": (*LEAVES, "cachesvc.connector", "cachesvc.kernels"),
    "cachesvc.engine": ("cachesvc.keys", "cachesvc.engine", "cachesvc.connector", "cachesvc.kernels"),
    "cachesvc.kernels": ("cachesvc.keys", "cachesvc.kernels"),
}
OUTSIDE_THE_DAEMON = ("cachesvc.connector", "cachesvc.engine", "cachesvc.kernels")
CLIENTS = ("cachesvc/cli/bench.py", "cachesvc/cli/workload.py", "cachesvc/benchmark/")
"""In the daemon's folder, but clients of it."""


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                f"{node.module}.{alias.name}" if node.module == "cachesvc" else node.module for alias in node.names
            }
    return {name for name in found if name.split(".")[0] == "cachesvc"}


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_engine_side_packages_import_only_what_they_may(package: str) -> None:
    wrong = {
        f"{path.name}: {name}"
        for path in FOLDERS[package].rglob("*.py")
        for name in imports_of(path)
        if not within(name, ALLOWED[package])
    }
    assert wrong == set()


def test_the_daemon_imports_neither_connector_nor_engine() -> None:
    wrong = {
        f"{path.name}: {name}"
        for path in FOLDERS["cachesvc"].rglob("*.py")
        if not path.relative_to(ROOT).as_posix().startswith(CLIENTS)
        for name in imports_of(path)
        if within(name, (*OUTSIDE_THE_DAEMON, "cachesvc.benchmark"))
    }
    assert wrong == set()


def test_the_command_line_loads_no_client_before_it_is_one() -> None:
    code = (
        "import sys, cachesvc.cli.main, cachesvc.daemon\n"
        "loaded = [name for name in sys.modules if name.startswith(('cachesvc.connector', 'cachesvc.benchmark'))]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_leaves_import_only_themselves() -> None:
    for path in (ROOT / "cachesvc" / "keys.py", *(ROOT / "cachesvc" / "rpc").glob("*.py")):
        assert all(within(name, LEAVES) for name in imports_of(path)), path


def test_the_service_knows_no_grpc() -> None:
    for name in ("service.py", "store.py", "leases.py", "accounting.py"):
        assert not re.search(r"^\s*(import|from) grpc", (ROOT / "cachesvc" / name).read_text(), re.MULTILINE)


def test_the_checked_in_stubs_are_those_of_the_proto(tmp_path: Path) -> None:
    for path in generate(tmp_path):
        assert path.read_text() == (ROOT / "cachesvc" / "rpc" / path.name).read_text(), f"run `make proto`: {path.name}"


def test_the_names_of_other_projects_still_import_beside_ours() -> None:
    code = (
        "import kernels, proto, cachesvc.kernels, cachesvc.connector, cachesvc.engine, cachesvc.rpc\n"
        "assert 'site-packages' in kernels.__file__ and 'site-packages' in proto.__file__\n"
        "assert cachesvc.kernels.__file__ != kernels.__file__"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/", timeout=60)


def test_every_package_is_declared() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join((package, *path.parent.relative_to(folder).parts))
        for package, folder in FOLDERS.items()
        for path in folder.rglob("__init__.py")
    }
    assert found == set(settings["packages"])


def test_the_base_install_pulls_in_no_torch() -> None:
    """Everything that the base dependencies need, by the metadata of what is installed here."""
    todo = [
        Requirement(line) for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ]
    needed: set[str] = set()
    while todo:
        requirement = todo.pop()
        extras = requirement.extras or {""}
        if canonicalize_name(requirement.name) in needed:
            continue
        needed.add(canonicalize_name(requirement.name))
        for line in metadata.requires(requirement.name) or []:
            child = Requirement(line)
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(child)
    assert {"grpcio", "protobuf", "pydantic", "rocksdict"} <= needed
    assert needed.isdisjoint({"torch", "safetensors", "transformers", "tokenizers"})


def test_daemon_cli_and_client_run_where_torch_cannot_be_imported() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'safetensors', 'transformers', 'tokenizers'): sys.modules[name] = None\n"
        "import cachesvc.daemon, cachesvc.cli.main, cachesvc.connector.prefix_cache\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_nothing_unpickles() -> None:
    for path in (p for folder in FOLDERS.values() for p in folder.rglob("*.py")):
        assert not re.search(r"\b(pickle|marshal|shelve)\b|except:\s*$", path.read_text(), re.MULTILINE), path


def test_the_demonstration_without_torch_is_one_line() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from cachesvc.engine.__main__ import main; sys.exit(main(['demo']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, len(result.stderr.strip().splitlines())) == (2, 1), result.stderr
    assert "cachesvc[demo]" in result.stderr
