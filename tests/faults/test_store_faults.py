"""What must survive, and what must be a miss, when files are damaged, the disk is full or the daemon is killed."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Client, Daemon, make_payloads, run_cli, wait_until

from cachesvc.keys import Namespace, chain_keys
from cachesvc.record import PAGE, TRAILER_BYTES, record_bytes
from cachesvc.rpc import cache_pb2 as pb

SIZE = 9000
STRIDE = record_bytes(SIZE)


def long(*values: object) -> list[Any]:
    """Further values, for `make test-long`."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


@pytest.fixture
def keys(namespace: Namespace) -> list[bytes]:
    return chain_keys(namespace, range(128 * 6))


@pytest.fixture
def payloads() -> list[bytes]:
    return make_payloads(6, SIZE)


def attached(daemon: Daemon, namespace: Namespace) -> Client:
    client = Client(daemon.address)
    client.attach(namespace, SIZE)
    return client


def the_segment(daemon: Daemon) -> Path:
    (path,) = daemon.store.glob("*/*/*/*.seg")
    return path


@pytest.fixture
def filled(daemon: Daemon, namespace: Namespace, keys: list[bytes], payloads: list[bytes]) -> Daemon:
    """A running daemon with six blocks, all acknowledged as durable."""
    with attached(daemon, namespace) as client:
        assert client.save(keys, payloads, durable=True) == [pb.CommitState.STORED] * 6
    return daemon


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_after_sigkill_every_durable_block_is_there(
    filled: Daemon, namespace: Namespace, keys: list[bytes], payloads: list[bytes]
) -> None:
    filled.kill()
    filled.start()
    with attached(filled, namespace) as client:
        assert client.fetch(keys) == payloads
        assert client.report().events["recovered_segments"] == 1


@pytest.mark.parametrize("how", ["clean", "killed"])
def test_a_deleted_index_is_rebuilt_from_the_files(
    filled: Daemon, namespace: Namespace, keys: list[bytes], payloads: list[bytes], how: str
) -> None:
    filled.stop() if how == "clean" else filled.kill()
    shutil.rmtree(filled.store / "index")
    filled.start()
    with attached(filled, namespace) as client:
        assert client.fetch(keys) == payloads


def test_a_damaged_index_is_rebuilt_from_the_files(
    filled: Daemon, namespace: Namespace, keys: list[bytes], payloads: list[bytes]
) -> None:
    filled.stop()
    for path in (filled.store / "index").iterdir():
        path.write_bytes(b"\xff" * 64)
    filled.start()
    with attached(filled, namespace) as client:
        assert client.fetch(keys) == payloads
        assert client.report().events["index_rebuilds"] == 1


def test_a_damaged_block_of_the_index_loses_nothing(daemon: Daemon, namespace: Namespace) -> None:
    keys = chain_keys(namespace, range(128 * 600))
    payloads = make_payloads(600, 16)
    with Client(daemon.address) as client:
        client.attach(namespace, 16)
        client.save(keys, payloads)
        assert client.lookup(keys)[0] == 600  # a use: that is what the index knows
    for _ in range(2):  # a second clean start moves what is in the log into a table file
        daemon.restart()
    daemon.stop()
    tables = sorted((daemon.store / "index").glob("*.sst"), key=lambda path: path.stat().st_size)
    with tables[-1].open("r+b") as file:
        file.seek(tables[-1].stat().st_size // 3)
        file.write(b"\xff" * 64)
    daemon.start()
    with Client(daemon.address) as client:
        client.attach(namespace, 16)
        assert client.lookup(keys)[0] == 600
        assert client.report().events["index_rebuilds"] == 1


@pytest.mark.parametrize("content", ["{", '{"epoch": null}', *long("null", '{"epoch": "x"}', "[]")])
def test_a_damaged_store_file_does_not_keep_the_store_from_opening(
    filled: Daemon, namespace: Namespace, keys: list[bytes], payloads: list[bytes], content: str
) -> None:
    filled.stop()
    (filled.store / "STORE.json").write_text(content)
    filled.start()
    with attached(filled, namespace) as client:
        assert client.fetch(keys) == payloads


def test_a_payload_size_that_changed_over_a_restart_is_stored_anew(
    filled: Daemon, namespace: Namespace, keys: list[bytes]
) -> None:
    filled.restart()
    payloads = make_payloads(6, 5000)
    with Client(filled.address) as client:
        client.attach(namespace, 5000)
        assert client.lookup(keys)[0] == 0
        assert client.save(keys, payloads) == [pb.CommitState.STORED] * 6
        assert client.fetch(keys) == payloads


def test_a_store_deleted_underneath_ends_cleanly(filled: Daemon, namespace: Namespace, keys: list[bytes]) -> None:
    shutil.rmtree(filled.store)
    with attached(filled, namespace) as client:
        wait_until(lambda: client.report().blocks == 0)  # what is gone is forgotten
    assert filled.stop() == 0
    assert "Traceback" not in filled.log.read_text()


def test_a_store_deleted_underneath_refuses_writes_and_is_begun_anew(
    filled: Daemon, namespace: Namespace, keys: list[bytes], payloads: list[bytes]
) -> None:
    shutil.rmtree(filled.store)
    with attached(filled, namespace) as client:
        more = chain_keys(namespace, range(7_000, 7_000 + 128))
        assert client.save(more, payloads[:1], durable=True) != [pb.CommitState.STORED]
        wait_until(lambda: client.report().blocks == 0 and client.report().health == "ok")
        assert client.report().events["write_refusals"] >= 1
        assert client.save(keys, payloads, durable=True) == [pb.CommitState.STORED] * 6
    filled.kill()
    filled.start()
    with attached(filled, namespace) as client:
        assert client.fetch(keys) == payloads


@pytest.mark.parametrize("cut", [1, STRIDE, *long(TRAILER_BYTES, STRIDE - 1, STRIDE + 1)])
def test_a_segment_cut_off_by_a_crash_keeps_its_whole_records(
    filled: Daemon, namespace: Namespace, keys: list[bytes], payloads: list[bytes], cut: int
) -> None:
    filled.kill()
    path = the_segment(filled)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    filled.start()
    lost = -(-cut // STRIDE)
    with attached(filled, namespace) as client:
        assert client.fetch(keys) == payloads[: 6 - lost]
        # and the store takes the lost blocks again
        assert client.save(keys, payloads)[-lost:] == [pb.CommitState.STORED] * lost
        assert client.fetch(keys) == payloads


def test_a_sealed_segment_cut_off_later_keeps_its_whole_records(
    filled: Daemon, namespace: Namespace, keys: list[bytes], payloads: list[bytes]
) -> None:
    filled.stop()
    path = the_segment(filled)
    with path.open("r+b") as file:
        file.truncate(PAGE + 3 * STRIDE + 100)
    filled.start()
    with attached(filled, namespace) as client:
        assert client.fetch(keys) == payloads[:3]


def test_a_segment_of_wrong_magic_is_left_alone(
    filled: Daemon, namespace: Namespace, keys: list[bytes], payloads: list[bytes]
) -> None:
    filled.stop()
    path = the_segment(filled)
    for copy in (0, PAGE // 2):
        flip(path, copy)
    content = path.read_bytes()
    filled.start()
    with attached(filled, namespace) as client:
        assert client.fetch(keys) == []
        assert client.report().events["foreign_files"] == 1
        assert client.save(keys, payloads) == [pb.CommitState.STORED] * 6
    assert path.read_bytes() == content


def test_foreign_files_in_the_store_are_neither_served_nor_deleted(
    filled: Daemon, namespace: Namespace, keys: list[bytes], payloads: list[bytes]
) -> None:
    filled.stop()
    directory = the_segment(filled).parent
    foreign = {
        directory / "holiday.seg": b"",
        directory / "notes.seg": b"x" * 10_000,
        directory / "README": b"hello",
        filled.store / "a" / "b" / "c" / "d.seg": b"CSVSEG\x00\x01" + b"y" * 5000,
    }
    for path, content in foreign.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    filled.start()
    with attached(filled, namespace) as client:
        assert client.fetch(keys) == payloads
        assert client.report().events["foreign_files"] == 3
    assert {path: path.read_bytes() for path in foreign} == foreign


@pytest.mark.parametrize("where", [SIZE // 2, STRIDE - TRAILER_BYTES, *long(0, SIZE - 1, STRIDE - 1)])
@pytest.mark.parametrize("state", ["running", "clean", "killed"])
def test_a_flipped_bit_makes_its_block_a_miss_and_no_other(
    filled: Daemon, namespace: Namespace, keys: list[bytes], payloads: list[bytes], where: int, state: str
) -> None:
    damaged = 2
    if state == "running":
        filled.restart()  # the arena is empty then, and blocks come from disk
    elif state == "clean":
        filled.stop()
    else:
        filled.kill()
    flip(the_segment(filled), PAGE + damaged * STRIDE + where)
    if state != "running":
        filled.start()
    with attached(filled, namespace) as client:
        assert client.fetch(keys) == payloads[:damaged]
        match = client.lookup(keys)
        assert match[0] == damaged
        if state != "killed":  # after a crash the damage is found while scanning, and the key was never seen again
            assert match[1] == pb.MissReason.CORRUPT
            assert client.report().events["corrupt_blocks"] == 1
        # the place is filled again and the blocks behind it are still there
        assert client.save(keys, payloads)[damaged] == pb.CommitState.STORED
        assert client.fetch(keys) == payloads


@pytest.mark.long
def test_random_bit_flips_never_serve_a_wrong_byte(
    make_daemon: Callable[..., Daemon], filled: Daemon, namespace: Namespace, keys: list[bytes], payloads: list[bytes]
) -> None:
    filled.stop()
    original = filled.store
    source = random.Random(7)
    for number in range(8):
        copy = original.with_name(f"copy{number}")
        shutil.copytree(original, copy)
        (path,) = copy.glob("*/*/*/*.seg")
        if number % 2:
            shutil.rmtree(copy / "index")
        for _ in range(3):
            flip(path, source.randrange(path.stat().st_size))
        daemon = make_daemon(store=copy).start()
        with attached(daemon, namespace) as client:
            got = client.fetch(keys)
            assert got == payloads[: len(got)]
        daemon.kill()


def test_a_record_in_the_place_of_another_is_a_miss(
    filled: Daemon, namespace: Namespace, keys: list[bytes], payloads: list[bytes]
) -> None:
    filled.restart()
    path = the_segment(filled)
    with path.open("r+b") as file:
        file.seek(PAGE + 4 * STRIDE)
        record = file.read(STRIDE)
        file.seek(PAGE + 1 * STRIDE)
        file.write(record)
    with attached(filled, namespace) as client:
        assert client.fetch(keys) == payloads[:1]


def test_a_segment_deleted_underneath_is_a_miss(
    filled: Daemon, namespace: Namespace, keys: list[bytes], payloads: list[bytes]
) -> None:
    filled.restart()
    the_segment(filled).unlink()
    with attached(filled, namespace) as client:
        assert client.fetch(keys) == []
        assert client.lookup(keys) == (0, pb.MissReason.CORRUPT)


def test_kill_loops_lose_no_durable_block_and_serve_no_wrong_byte(daemon: Daemon, namespace: Namespace) -> None:
    source = random.Random(11)
    known: dict[int, list[bytes]] = {}
    for loop in range(3):
        with attached(daemon, namespace) as client:
            for number, expected in known.items():
                assert client.fetch(chain_keys(namespace, range(number, number + 384))) == expected, f"prompt {number}"
            for step in range(source.randrange(1, 6)):
                number = loop * 100 + step
                expected = make_payloads(3, SIZE, seed=number)
                client.save(chain_keys(namespace, range(number, number + 384)), expected, durable=True)
                known[number] = expected
            # in the middle of a write that nobody acknowledged
            reply = client.reserve(chain_keys(namespace, range(9_000_000, 9_000_512)))
            client.put(reply.lease_id, dict(enumerate(make_payloads(4, SIZE, seed=99))))
        daemon.kill()
        daemon.start()
    with attached(daemon, namespace) as client:
        assert client.report().blocks == 3 * len(known)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here, so a full disk cannot be tested: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_refuses_writes_keeps_what_is_there_and_recovers(
    make_daemon: Callable[..., Daemon], namespace: Namespace, keys: list[bytes], payloads: list[bytes], small_disk: Path
) -> None:
    daemon = make_daemon("--store-bytes", "500MB", store=small_disk / "store").start()
    with attached(daemon, namespace) as client:
        assert client.save(keys[:2], payloads[:2], durable=True) == [pb.CommitState.STORED] * 2
        ballast = small_disk / "ballast"
        with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        assert client.save(keys[2:4], payloads[2:4], durable=True) == [pb.CommitState.WRITE_REFUSED] * 2
        report = client.report()
        assert report.health.startswith("writes refused: cannot ")
        assert report.events["write_refusals"] >= 1
        assert client.fetch(keys) == payloads[:2]
        assert client.save(keys[2:], payloads[2:]) == [-pb.ReserveState.REFUSED] * 4  # at once, without trying the disk
        ballast.unlink()
        wait_until(lambda: client.save(keys, payloads, durable=True)[-1] == -pb.ReserveState.PRESENT)
        assert client.report().health == "ok"
        assert client.fetch(keys) == payloads
    daemon.kill()
    daemon.start()
    with attached(daemon, namespace) as client:
        assert client.fetch(keys) == payloads


@pytest.mark.long
def test_blocks_that_wait_for_a_full_disk_are_served_and_stored_when_it_has_room(
    make_daemon: Callable[..., Daemon], namespace: Namespace, keys: list[bytes], payloads: list[bytes], small_disk: Path
) -> None:
    daemon = make_daemon("--store-bytes", "500MB", store=small_disk / "store").start()
    ballast = small_disk / "ballast"
    with attached(daemon, namespace) as client:
        with pytest.raises(OSError, match="No space"), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        assert client.save(keys, payloads) == [pb.CommitState.STORED] * 6
        wait_until(lambda: client.report().health.startswith("writes refused: cannot "))
        assert client.fetch(keys) == payloads
        ballast.unlink()
        wait_until(lambda: client.report().arena_dirty_bytes == 0)
        assert client.report().health == "ok"
    daemon.kill()
    daemon.start()
    with attached(daemon, namespace) as client:
        assert client.fetch(keys) == payloads


def test_a_crash_and_then_a_full_disk_lose_no_durable_block(
    make_daemon: Callable[..., Daemon], namespace: Namespace, keys: list[bytes], payloads: list[bytes], small_disk: Path
) -> None:
    daemon = make_daemon("--store-bytes", "500MB", store=small_disk / "store").start()
    with attached(daemon, namespace) as client:
        client.save(keys, payloads, durable=True)
    daemon.kill()
    with pytest.raises(OSError, match="No space"), (small_disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    daemon.start()
    with attached(daemon, namespace) as client:
        assert client.fetch(keys) == payloads


def test_a_daemon_starts_on_a_full_disk_and_serves_what_is_there(
    make_daemon: Callable[..., Daemon], namespace: Namespace, keys: list[bytes], payloads: list[bytes], small_disk: Path
) -> None:
    daemon = make_daemon("--store-bytes", "500MB", store=small_disk / "store").start()
    with attached(daemon, namespace) as client:
        client.save(keys, payloads)
    daemon.stop()
    with pytest.raises(OSError, match="No space"), (small_disk / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    daemon.start()
    with attached(daemon, namespace) as client:
        assert client.fetch(keys) == payloads


def test_a_second_daemon_on_the_store_or_the_socket_ends_with_one_line(daemon: Daemon, tmp_path: Path) -> None:
    for arguments, code, word in (
        (("--store", str(daemon.store), "--socket", str(tmp_path / "o.sock")), 3, "is in use by process"),
        (("--store", str(tmp_path / "other"), "--socket", str(daemon.socket)), 4, "is in use by another daemon"),
    ):
        result = run_cli("serve", *arguments, "--listen", "", "--metrics", "")
        assert result.returncode == code, result.stderr
        last = result.stderr.strip().splitlines()[-1]
        assert last.startswith("cachesvc: ") and word in last
        assert "Traceback" not in result.stderr


def test_a_stale_socket_of_a_killed_daemon_is_taken_over(daemon: Daemon, namespace: Namespace) -> None:
    daemon.kill()
    assert daemon.socket.exists()
    daemon.start()
    with attached(daemon, namespace) as client:
        assert client.report().health == "ok"


def test_a_clean_shutdown_ends_with_zero_and_leaves_no_socket(filled: Daemon) -> None:
    assert filled.stop() == 0
    assert not filled.socket.exists()
    assert "closed cleanly" in filled.log.read_text()


def test_sigint_is_a_clean_shutdown_too(filled: Daemon) -> None:
    assert filled.process is not None
    filled.process.send_signal(signal.SIGINT)
    assert filled.process.wait(20) == 0
