"""Everything that only watches: what was counted, how it was in time, what an infinite cache would do, the recording.

Nothing here decides what is served.
"""

from __future__ import annotations

import base64
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from prometheus_client import Histogram

from cachesvc.accounting import UNCOUNTED, Accounting, Pass, RowKey
from cachesvc.catalog import Catalog
from cachesvc.ceiling import Ceiling
from cachesvc.clock import Clock
from cachesvc.histograms import AGES, bucket
from cachesvc.index.prefix import Prefix
from cachesvc.limits import DEFAULT_RECORD_BYTES
from cachesvc.reuse import ReuseDistances
from cachesvc.rollups import Counts, Rollups
from cachesvc.rpc.cache_pb2 import MatchRequest, MissReason
from cachesvc.trace.recorder import Event, Recorder

log = logging.getLogger("cachesvc.observer")


class Observer:
    def __init__(
        self,
        path: Path,
        catalog: Catalog,
        clock: Clock,
        gauges: Callable[[], Mapping[str, int]],
        record_bytes: int = DEFAULT_RECORD_BYTES,
    ) -> None:
        """Keeps its files below `path`. `gauges` tells how full the store is, `record_bytes` bounds the recording."""
        self.accounting = Accounting(clock)
        self.events: Counter[str] = Counter()
        self.load_seconds = Histogram(
            "cachesvc_load_seconds",
            "From the match of a pass that loaded something to its release",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
            registry=None,
        )
        self._clock = clock
        self._catalog = catalog
        self._gauges = gauges
        self._ceiling = Ceiling()
        self._ceiling_file = path / "rollups" / "ceiling"
        self._ceiling.load(self._ceiling_file)
        self._reuse = ReuseDistances()
        self._rollups = Rollups(path / "rollups")
        self.recorder = Recorder(path / "trace", record_bytes, clock)
        self.recording = False
        self._switching = threading.Lock()

    def asked(self, opened: Pass, keys: bytes, found: Prefix) -> None:
        """A prompt was looked up; call it before what was found is touched."""
        if opened.number == UNCOUNTED:
            return
        opened.ages = [(bucket(AGES, age), blocks) for age, blocks in found.ages(self._clock.now())]
        self._reuse.asked(keys)
        new = self._ceiling.asked(keys)
        if new:
            self.accounting.note_new(opened, new * opened.block_tokens)

    def settle(self, opened: Pass, tiers: bytes, loaded: int, reason: MissReason.ValueType) -> None:
        """See `Accounting.settle`."""
        if self.recording and not opened.settled:
            name, tiers_text = MissReason.Name(reason).lower(), base64.b64encode(tiers).decode()
            self.recorder.note(
                {"event": "end", "pass": opened.number, "loaded": loaded, "tiers": tiers_text, "reason": name}
            )
        self.accounting.settle(opened, tiers, loaded, reason)

    def loaded(self, seconds: float, pass_id: bytes) -> None:
        """A pass gave its lease back so long after its match, and had loaded something."""
        self.load_seconds.observe(seconds, {"pass": pass_id.hex()} if pass_id else None)

    def unreachable(self, row: RowKey, tokens: int) -> None:
        """See `Accounting.unreachable`."""
        if self.recording:
            self.recorder.note({"event": "unreachable", "tokens": tokens} | _named(row))
        self.accounting.unreachable(row, tokens)

    def record_ask(
        self,
        place: Event,
        opened: Pass,
        row: RowKey,
        request: MatchRequest,
        identities: Sequence[Sequence[bytes]],
        checkpoints: int,
    ) -> None:
        """Puts a look-up into the recording, at its place."""
        if opened.number == UNCOUNTED:
            place.fill({"at": self._clock.now(), "event": "uncounted"})
            return
        event = {
            "at": self._clock.now(),
            "event": "ask",
            "pass": opened.number,
            "id": request.pass_id.hex(),
            "again": opened.again,
            "block": opened.block_tokens,
            "input": request.input_tokens,
            "local": request.local_tokens,
            "shards": len(identities),
            "checkpoints": checkpoints,
        }
        place.fill(event | _named(row), list(identities[0]))

    def record(self, *, on: bool) -> None:
        """Switches the recording. Raises `OSError`."""
        with self._switching:
            if on != self.recording:
                self._catalog.record(self.recorder if on else None)
                self.recording = on
                if not on:
                    self.recorder.stop()

    def close(self) -> None:
        self.maintain(closing=True)
        self.record(on=False)

    def stored(self, keys: bytes) -> None:
        """Blocks were written, perhaps without having been asked for."""
        self._ceiling.stored(keys)

    def counted(self, *, closed: bool = False) -> Counts:
        """All since the daemon started; or without the passes that may still change."""
        other = Counter({f"lifetime.{b}": n for b, n in self._catalog.lifetimes().items()})
        other |= Counter({f"reuse.{b}": n for b, n in self._reuse.counts().items()})
        rows = self.accounting.closed_rows() if closed else self.accounting.rows()
        return Counts(dict(rows), other, dict(self._gauges()))

    def history(self, since: float, until: float, width: int) -> dict[int, Counts]:
        """See `Rollups.history`."""
        return self._rollups.history(self.counted, self._clock.now(), since, until, width)

    def maintain(self, *, closing: bool = False) -> None:
        """Keeps what was counted once a minute."""
        self.accounting.close(all_settled=closing)
        try:
            if self._rollups.keep(partial(self.counted, closed=True), self._clock.now(), closing=closing):
                self._ceiling.save(self._ceiling_file)
        except OSError as error:
            self.events["rollup_errors"] += 1
            log.warning("the counts of this minute are not on disk yet: %s", error)


def _named(row: RowKey) -> dict[str, str]:
    return {"class": row.traffic_class, "model": row.model, "tenant": row.tenant}
