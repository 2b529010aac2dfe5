"""What a daemon counts is what its own recording gives when it is counted again, to the token."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Client, Daemon, cli_json, make_payloads, wait_until

from cachesvc.accounting import RowKey
from cachesvc.keys import Namespace, chain_keys, tenant_id
from cachesvc.rpc import cache_pb2 as pb
from cachesvc.trace.recount import Recount

PASSES = 2_000
SIZE = 4_000


def counted(client: Client) -> dict[RowKey, Counter[str]]:
    """Everything in the daemon's history, but for histograms and bytes."""
    rows: dict[RowKey, Counter[str]] = {}
    for bucket in client.stub.History(pb.HistoryRequest(), timeout=20):
        for row in bucket.rows:
            key = RowKey(row.traffic_class, row.model, row.tenant)
            rows.setdefault(key, Counter()).update(row.counts)
    return {key: essential(row) for key, row in rows.items()}


def essential(row: Counter[str]) -> Counter[str]:
    names = ("passes", "input", "local", "pending")
    return Counter({n: c for n, c in row.items() if c and (n in names or n.startswith(("hit.", "miss.", "depth.")))})


def events(store: Path) -> Iterator[dict[str, object]]:
    for path in sorted((store / "trace").glob("*.jsonl")):
        header, *lines = path.read_text().splitlines()
        assert json.loads(header) == {"cachesvc_trace": 1}
        yield from map(json.loads, lines)


class Traffic:
    """Seeded conversations of three tenants, with everything that can go wrong in between."""

    def __init__(self, namespace: Namespace, offset: Path) -> None:
        self._random = random.Random(11)
        self._namespace = namespace
        self._offset = offset
        self._now = 0.0
        self._payloads = make_payloads(64, SIZE)
        self._talks: list[tuple[bytes, str, list[int]]] = []

    def one_pass(self, client: Client) -> None:
        rng = self._random
        self._now += rng.expovariate(1 / 2) if rng.random() < 0.98 else rng.uniform(100, 600)
        self._offset.write_text(str(self._now))
        if not self._talks or rng.random() < 0.1:
            salt = rng.choice([b"", b"red", b"blue"])
            self._talks.append((salt, rng.choice(["agent", "chat"]), [rng.randrange(1000) for _ in range(700)]))
        salt, traffic_class, tokens = rng.choice(self._talks[-50:])
        tokens += [rng.randrange(1000) for _ in range(rng.randrange(1, 500))]
        keys = chain_keys(self._namespace, tokens, salt=salt)
        local = rng.choice([0, 0, 0, 300])
        fields = {
            "traffic_class": traffic_class,
            "tail": len(tokens) - 128 * len(keys),
            "tenant": tenant_id(salt),
            "local_tokens": local,
            "pass_id": rng.randbytes(16),
            "min_blocks": rng.choice([0, 0, 4]),
            "unreachable_tokens": rng.choice([0] * 19 + [777]),
        }
        match = client.match(keys, **fields)
        if rng.random() < 0.1:
            match = client.match(keys, **fields)  # asks again
        if match.lease_id and rng.random() < 0.97:  # else its lease is left to end by itself
            lost = rng.choice([0] * 9 + [1])
            reason = rng.choice([pb.MissReason.LOAD_ERROR, pb.MissReason.TIMED_OUT, pb.MissReason.BYPASSED])
            client.release(match, match.matched_blocks * (1 - lost), reason if lost else 0)
        if rng.random() < 0.9:
            wanted = [self._payloads[key[0] % 64] for key in keys]
            client.save(keys, wanted, traffic_class=traffic_class)


@pytest.mark.long
def test_counting_the_recording_again_gives_what_the_daemon_counted(
    make_daemon: Callable[..., Daemon], namespace: Namespace, tmp_path: Path
) -> None:
    offset = tmp_path / "offset"
    offset.write_text("0")
    daemon = make_daemon(
        *("--record", "--clock-offset-file", str(offset), "--class", "agent=20m", "--class", "chat=1h"),
        *("--store-bytes", "6MiB", "--segment-bytes", "256KiB", "--arena-bytes", "4MiB"),
    ).start()
    traffic = Traffic(namespace, offset)
    for part in range(2):
        with Client(daemon.address) as client:
            client.attach(namespace, SIZE)
            for _ in range(PASSES // 2):
                traffic.one_pass(client)
        if part == 0:
            daemon.restart()
    daemon.restart()
    with Client(daemon.address) as client:
        live = counted(client)
    again = Recount()
    for event in events(daemon.store):
        again.add(event)
    assert again.lost == 0
    found = {key: essential(row) for key, row in again.accounting.rows()}
    # The recording names tenants by other digests: tenants are told apart by what they counted.
    by_counts = [
        sorted((k.traffic_class, k.model, bool(k.tenant), sorted(row.items())) for k, row in rows.items())
        for rows in (live, found)
    ]
    assert by_counts[0] == by_counts[1]
    total: Counter[str] = sum(live.values(), Counter())
    assert total["passes"] == PASSES
    said = cli_json("replay", "--policy", "recorded", *map(str, (daemon.store / "trace").glob("*.jsonl")))["total"]
    assert isinstance(said, dict)
    for name in ("passes", "input"):
        assert said[name if name == "passes" else f"{name}_tokens"] == total[name]
    for kind, prefix in (("hit_tokens_by_tier", "hit."), ("miss_tokens_by_reason", "miss.")):
        assert said[kind] == {name.removeprefix(prefix): n for name, n in total.items() if name.startswith(prefix)}
    assert total["input"] == total["local"] + sum(n for name, n in total.items() if name.startswith(("hit.", "miss.")))
    for name in ("hit.dram", "hit.disk", "miss.never_seen", "miss.expired", "miss.evicted", "miss.unreachable"):
        assert total[name] > 0, f"{name} did not happen: the test proves less than it says"
    for name in ("miss.load_error", "miss.timed_out", "miss.bypassed", "miss.partial_tail"):
        assert total[name] > 0, f"{name} did not happen: the test proves less than it says"


def test_recording_is_switched_at_run_time_and_keeps_its_budget(
    make_daemon: Callable[..., Daemon], namespace: Namespace
) -> None:
    daemon = make_daemon("--record-bytes", "1MiB").start()
    with Client(daemon.address) as client:
        client.attach(namespace, SIZE)
        client.save(chain_keys(namespace, range(300)), make_payloads(2, SIZE))
        state = client.stub.Record(pb.RecordRequest(), timeout=5)
        assert (state.on, state.bytes) == (False, 0)
        assert client.stub.Record(pb.RecordRequest(change=pb.Recording.RECORDING_ON), timeout=5).on
        keys = chain_keys(namespace, range(128 * 2000))
        for _ in range(100):
            client.lookup(keys)
        wait_until(lambda: client.stub.Record(pb.RecordRequest(), timeout=5).bytes > 700_000)
        assert client.stub.Record(pb.RecordRequest(), timeout=5).bytes <= 1 << 20
        stopped = client.stub.Record(pb.RecordRequest(change=pb.Recording.RECORDING_OFF), timeout=5)
        client.lookup(keys)
        assert client.stub.Record(pb.RecordRequest(), timeout=5).bytes == stopped.bytes
    assert (daemon.store / "trace" / "salt").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("request_", [pb.HistoryRequest(bucket_seconds=61), pb.HistoryRequest(since=5, until=4)])
def test_a_malformed_history_is_refused(make_daemon: Callable[..., Daemon], request_: pb.HistoryRequest) -> None:
    import grpc

    daemon = make_daemon().start()
    with Client(daemon.address) as client, pytest.raises(grpc.RpcError) as error:
        list(client.stub.History(request_, timeout=5))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
