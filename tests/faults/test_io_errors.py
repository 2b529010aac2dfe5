"""A device that fails under a running daemon: errors made by a shim in C between the daemon and the system."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Client, Daemon, make_payloads, wait_until

from cachesvc.keys import Namespace, chain_keys
from cachesvc.rpc import cache_pb2 as pb

SIZE = 9_000


class Device:
    """What fails now, for the daemon that runs on it."""

    def __init__(self, control: Path) -> None:
        self._control = control
        self.works()

    def works(self) -> None:
        self._control.write_text("")

    def fails(self, operation: str, code: int) -> None:
        scratch = self._control.with_suffix(".new")
        scratch.write_text(f"{operation} {code}\n")
        scratch.replace(self._control)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler is here, so no device can be made to fail")
    library = tmp_path_factory.mktemp("shim") / "io_errors.so"
    source = Path(__file__).with_name("io_errors.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@pytest.fixture
def device(tmp_path: Path, shim: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    monkeypatch.setenv("CACHESVC_FAULT_FILE", str(tmp_path / "fault"))
    monkeypatch.setenv("CACHESVC_FAULT_MATCH", ".seg")
    return Device(tmp_path / "fault")


@pytest.mark.long
@pytest.mark.parametrize(("operation", "code"), [("write", errno.EIO), ("write", errno.EROFS), ("sync", errno.EIO)])
def test_a_device_that_fails_writes_is_left_alone_and_taken_back(
    device: Device, make_daemon: Callable[..., Daemon], namespace: Namespace, operation: str, code: int
) -> None:
    daemon = make_daemon().start()
    keys, payloads = chain_keys(namespace, range(128 * 8)), make_payloads(8, SIZE)
    with Client(daemon.address) as client:
        client.attach(namespace, SIZE)
        assert client.save(keys[:4], payloads[:4], durable=True) == [pb.CommitState.STORED] * 4
        device.fails(operation, code)
        assert client.save(keys[4:], payloads[4:], durable=True) == [pb.CommitState.WRITE_REFUSED] * 4
        report = client.report()
        assert os.strerror(code) in report.health and report.events["write_refusals"] >= 1
        assert client.fetch(keys[:4]) == payloads[:4]
        device.works()
        wait_until(lambda: client.report().health == "ok")
        client.save(keys, payloads, durable=True)
        assert client.save(keys, payloads, durable=True) == [-pb.ReserveState.PRESENT] * 8
    daemon.kill()
    daemon.start()
    with Client(daemon.address) as client:
        client.attach(namespace, SIZE)
        assert client.fetch(keys) == payloads


@pytest.mark.long
def test_a_device_that_fails_reads_makes_misses_and_loses_nothing(
    device: Device, make_daemon: Callable[..., Daemon], namespace: Namespace
) -> None:
    daemon = make_daemon().start()
    keys, payloads = chain_keys(namespace, range(128 * 4)), make_payloads(4, SIZE)
    with Client(daemon.address) as client:
        client.attach(namespace, SIZE)
        client.save(keys, payloads, durable=True)
    daemon.restart()
    with Client(daemon.address) as client:
        client.attach(namespace, SIZE)
        device.fails("read", errno.EIO)
        assert client.fetch(keys) == []
        assert client.report().events["read_errors"] >= 1
        assert client.lookup(keys)[0] == 4, "nothing was dropped for a device that may recover"
        device.works()
        assert client.fetch(keys) == payloads
