"""A real daemon process and a bare client of the wire contract, for all tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from cachesvc.cli.main import main
from cachesvc.keys import KEY_SCHEME_VERSION, Namespace, pack_keys, self_test_vector
from cachesvc.record import checksum
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.rpc import cache_pb2_grpc as pb_grpc

TIMEOUT = 20.0

Typed = Callable[..., tuple[int, str, str]]


@dataclass
class Daemon:
    """One ``cachesvc serve`` process on its own socket. `arguments` are added to those that name socket and store."""

    store: Path
    socket: Path
    log: Path
    arguments: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    def start(self, *, wait: bool = True) -> Daemon:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "cachesvc", "serve", "--store", str(self.store)),
                    *("--socket", str(self.socket), "--listen", "", "--metrics", "", "--arena-bytes", "128MiB"),
                    *self.arguments,
                ],
                stdout=log,
                stderr=log,
                cwd=self.log.parent,
            )
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            assert self.process is not None and self.process.poll() is None, self.log.read_text()
            try:
                with Client(self.address) as client:
                    client.stub.Report(pb.ReportRequest(), timeout=1.0)
                return
            except grpc.RpcError:
                time.sleep(0.05)
        raise AssertionError(f"the daemon did not answer within {TIMEOUT} s:\n{self.log.read_text()}")

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(TIMEOUT)

    def freeze(self) -> None:
        """SIGSTOP; returns once no thread of it runs any more."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        wait_until(
            lambda: all(t.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "T" for t in tasks.iterdir())
        )

    def restart(self) -> Daemon:
        assert self.stop() == 0
        return self.start()


class Client:
    """The wire contract, called by hand: what a connector does, without its safety nets."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", 8 << 20)])
        self.stub = pb_grpc.CacheStub(self._channel)
        self.attachment = 0
        self.payload_bytes: tuple[int, ...] = ()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def attach(self, namespace: Namespace, *payload_bytes: int, **changes: object) -> pb.AttachReply:
        fields: dict[str, object] = {
            "namespace_json": namespace.canonical_json(),
            "self_test_vector": self_test_vector(),
            "key_scheme": KEY_SCHEME_VERSION,
            "payload_bytes": payload_bytes,
        }
        reply = self.stub.Attach(pb.AttachRequest(**(fields | changes)), timeout=TIMEOUT)  # type: ignore[arg-type]
        self.attachment, self.payload_bytes = reply.attachment, payload_bytes
        return reply

    def match(
        self, keys: Sequence[bytes], *, tail: int = 1, traffic_class: str = "agent", **fields: object
    ) -> pb.MatchReply:
        request = pb.MatchRequest(
            attachment=self.attachment,
            keys=pack_keys(keys),
            traffic_class=traffic_class,
            input_tokens=128 * len(keys) + tail,
            **fields,  # type: ignore[arg-type]
        )
        return self.stub.Match(request, timeout=TIMEOUT)

    def reserve(self, keys: Sequence[bytes], *, traffic_class: str = "agent", **fields: object) -> pb.ReserveReply:
        request = pb.ReserveRequest(
            attachment=self.attachment,
            keys=pack_keys(keys),
            traffic_class=traffic_class,
            **fields,  # type: ignore[arg-type]
        )
        return self.stub.Reserve(request, timeout=TIMEOUT)

    def put(self, lease_id: bytes, payloads: dict[int, bytes], *, chunk: int = 1 << 20) -> pb.PutReply:
        messages = (
            pb.PutRequest(lease_id=lease_id, index=index, offset=offset, data=payload[offset : offset + chunk])
            for index, payload in payloads.items()
            for offset in range(0, len(payload), chunk)
        )
        return self.stub.Put(messages, timeout=TIMEOUT)

    def commit(self, lease_id: bytes, checksums: dict[int, int], *, durable: bool = False) -> list[int]:
        request = pb.CommitRequest(
            lease_id=lease_id, indices=list(checksums), checksums=list(checksums.values()), durable=durable
        )
        return list(self.stub.Commit(request, timeout=TIMEOUT).states)

    def save(
        self, keys: Sequence[bytes], payloads: Sequence[bytes], *, durable: bool = False, traffic_class: str = "agent"
    ) -> list[int]:
        """Reserve, Put and Commit of what is granted. By key: the commit state, or the reserve state negated."""
        reply = self.reserve(keys, traffic_class=traffic_class)
        granted = [i for i, state in enumerate(reply.states) if state == pb.ReserveState.GRANTED]
        states = [-state for state in reply.states]
        if granted:
            self.put(reply.lease_id, {i: payloads[i] for i in granted})
            committed = self.commit(reply.lease_id, {i: checksum(payloads[i]) for i in granted}, durable=durable)
            for index, state in zip(granted, committed, strict=True):
                states[index] = state
        return states

    def load(self, match: pb.MatchReply, *, first: int = 0, shard: int = 0) -> list[bytes]:
        """Payloads of a match until the stream ends, each checked against the checksum that came with it."""
        request = pb.GetRequest(lease_id=match.lease_id, first=first, count=match.matched_blocks - first, shard=shard)
        payloads: list[bytes] = []
        parts: list[bytes] = []
        for reply in self.stub.Get(request, timeout=TIMEOUT):
            if reply.miss:
                break
            assert reply.index == first + len(payloads)
            assert reply.offset == sum(map(len, parts))
            parts.append(reply.data)
            if reply.last:
                payloads.append(b"".join(parts))
                assert checksum(payloads[-1]) == reply.checksum
                parts = []
        return payloads

    def release(self, match: pb.MatchReply, loaded: int, reason: int = 0) -> None:
        request = pb.ReleaseRequest(lease_id=match.lease_id, loaded_blocks=loaded, not_loaded=reason)  # type: ignore[arg-type]
        self.stub.Release(request, timeout=TIMEOUT)

    def lookup(self, keys: Sequence[bytes], **fields: object) -> tuple[int, int]:
        """Matched blocks and first miss, with the lease given back."""
        match = self.match(keys, **fields)
        if match.lease_id:
            self.release(match, 0, pb.MissReason.BYPASSED)
        return match.matched_blocks, match.first_miss

    def fetch(self, keys: Sequence[bytes], **fields: object) -> list[bytes]:
        """One whole pass: match, load, release."""
        match = self.match(keys, **fields)
        if not match.lease_id:
            return []
        payloads = self.load(match)
        self.release(match, len(payloads), pb.MissReason.CORRUPT)
        return payloads

    def report(self) -> pb.ReportReply:
        return self.stub.Report(pb.ReportRequest(), timeout=TIMEOUT)


def wait_until(condition: Callable[[], bool], timeout: float = TIMEOUT) -> None:
    """Polls until `condition` holds; fails the test when it does not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.05)


def make_payloads(count: int, size: int, seed: int = 0) -> list[bytes]:
    """Distinct payloads that look nothing alike."""
    import random

    source = random.Random(seed)
    return [source.randbytes(size) for _ in range(count)]


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Namespace:
    """One of its own for each test, so that tests can share a daemon."""
    return Namespace(model="test-model", revision=request.node.nodeid, dtype="float32", layout={"test": True})


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A running daemon for tests that neither stop it nor look at totals."""
    directory = tmp_path_factory.mktemp("shared")
    daemon = Daemon(directory / "store", tmp_path_factory.mktemp("s") / "s", directory / "daemon.log").start()
    yield daemon
    daemon.kill()


@pytest.fixture
def make_daemon(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Daemon]]:
    """Makes daemons (not started) over the test's store; all that still run are killed at the end."""
    made: list[Daemon] = []
    sockets = tmp_path_factory.mktemp("s")  # short: a Unix socket's path has a limit

    def make(*arguments: str, store: Path | None = None) -> Daemon:
        daemon = Daemon(
            store or tmp_path / "store",
            sockets / f"{len(made)}.sock",
            tmp_path / f"daemon{len(made)}.log",
            list(arguments),
        )
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        if daemon.process is not None and daemon.process.poll() is None:
            os.kill(daemon.process.pid, signal.SIGCONT)
            daemon.kill()


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    return make_daemon().start()


@pytest.fixture
def client(daemon: Daemon, namespace: Namespace) -> Iterator[Client]:
    with Client(daemon.address) as made:
        made.attach(namespace, 1000)
        yield made


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Runs the command line within this process: exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cachesvc", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def run_cli(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cachesvc", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **(environment or {})},
        check=False,
    )


def cli_json(*arguments: str) -> dict[str, object]:
    result = run_cli(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    loaded: dict[str, object] = json.loads(result.stdout)
    return loaded


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says what was covered: tests passed by area, and what each area is."""
    areas = {
        "unit": "pure logic: keys, configuration, accounting, connector, engine, kernels",
        "property": "codecs, hashing, slabs and slots against models, by hypothesis",
        "e2e": "real processes: the wire contract, the demonstration, the README's example",
        "faults": "kills, frozen and restarted daemons, flipped bits, cut files, full disks",
    }
    passed = Counter(Path(report.nodeid).parts[1] for report in terminalreporter.stats.get("passed", []))
    terminalreporter.section("covered")
    for area, text in areas.items():
        terminalreporter.write_line(f"{passed[area]:5d} {area:9s} {text}")
