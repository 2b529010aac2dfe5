"""The circuit breaker, driven by any sequence of events under a clock that the test moves."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachesvc.connector.breaker import Breaker, State
from cachesvc.connector.options import CacheOptions

LOADED_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
OPTIONS = CacheOptions(breaker_failures=3, breaker_first_s=1.0, breaker_max_s=16.0, probe_max_s=4.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def closed_breaker(clock: Clock, jitter: float = 0.0) -> Breaker:
    breaker = Breaker(OPTIONS, clock, lambda: jitter)
    breaker.probe_started()
    breaker.probe_succeeded()
    return breaker


def test_it_starts_open_and_due() -> None:
    breaker = Breaker(OPTIONS, Clock(), lambda: 0.0)
    assert breaker.state is State.OPEN and breaker.probe_in() == 0
    breaker.probe_started()
    assert breaker.state is State.HALF_OPEN and breaker.probe_in() is None
    breaker.probe_succeeded()
    assert breaker.closed and breaker.probe_in() is None


def test_only_failures_in_a_row_open_it() -> None:
    breaker = closed_breaker(Clock())
    for _ in range(10):
        breaker.failure()
        breaker.failure()
        breaker.success()
    assert breaker.closed and breaker.openings == 0
    for _ in range(3):
        breaker.failure()
    assert breaker.state is State.OPEN and breaker.probe_in() == 1.0 and breaker.openings == 1


def test_one_timeout_opens_it() -> None:
    breaker = closed_breaker(Clock())
    breaker.failure(timed_out=True)
    assert not breaker.closed and breaker.openings == 1


def test_a_lost_connection_is_probed_at_once_but_counts() -> None:
    clock = Clock()
    breaker = closed_breaker(clock)
    for _ in range(2):
        breaker.failure(lost=True)
        assert breaker.probe_in() == 0 and breaker.openings == 0
        breaker.probe_started()
        breaker.probe_succeeded()
        assert breaker.closed
    breaker.failure(lost=True)
    assert breaker.probe_in() == 1.0 and breaker.openings == 1


def test_a_daemon_that_answers_probes_only_is_left_alone_for_longer_and_longer() -> None:
    clock = Clock()
    breaker = closed_breaker(clock)
    pauses = []
    for _ in range(7):
        breaker.failure(timed_out=True)
        pause = breaker.probe_in()
        assert pause is not None
        pauses.append(pause)
        clock.now += pause
        breaker.probe_started()
        breaker.probe_succeeded()
        breaker.success()  # a match, say, whose load then hangs
    assert pauses == [1, 2, 4, 8, 16, 16, 16]
    clock.now += 16
    breaker.success()
    breaker.failure(timed_out=True)
    assert breaker.probe_in() == 1, "it has been well for as long as the last pause"


def test_failed_probes_are_repeated_often() -> None:
    breaker = Breaker(OPTIONS, Clock(), lambda: 0.0)
    pauses = []
    for _ in range(5):
        breaker.probe_started()
        breaker.probe_failed()
        pauses.append(breaker.probe_in())
    assert pauses == [1, 2, 4, 4, 4]
    breaker.probe_started()
    breaker.probe_failed(retry_in=60)
    assert breaker.probe_in() == 60


def test_an_opening_while_a_probe_is_out_keeps_its_pause() -> None:
    breaker = closed_breaker(Clock())
    breaker.probe_started()  # a check while all is well changes nothing
    assert breaker.closed
    breaker.failure(timed_out=True)
    breaker.probe_succeeded()
    assert breaker.state is State.OPEN and breaker.probe_in() == 1.0


@settings(LOADED_MACHINE)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 2000))
def test_no_pause_is_too_long_or_vanishes(jitter: float, probes: int) -> None:
    breaker = Breaker(OPTIONS, Clock(), lambda: jitter)
    breaker._failed_probes = probes
    breaker.probe_started()
    breaker.probe_failed()
    pause = breaker.probe_in()
    assert pause is not None and 0.75 * min(4.0, 2.0 ** min(probes, 10)) <= pause <= 4.0


class AnyOrder(RuleBasedStateMachine):
    """Against a model: calls are allowed only after a probe succeeded, and not after 3 failures or a timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = Breaker(OPTIONS, self.clock, lambda: 0.5)
        self.allowed = False
        self.in_a_row = 0
        self.probing = False

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def success(self) -> None:
        self.breaker.success()
        if self.allowed:
            self.in_a_row = 0

    @rule(timed_out=st.booleans(), lost=st.booleans())
    def failure(self, timed_out: bool, lost: bool) -> None:
        self.breaker.failure(timed_out=timed_out, lost=lost)
        if not self.allowed:
            return
        self.in_a_row += 1
        if timed_out or self.in_a_row == 3:
            self.allowed, self.in_a_row = False, 0
            pause = self.breaker.probe_in()
            assert pause is not None and 0.75 <= pause <= 16.0
        elif lost:
            self.allowed = False
            assert self.breaker.probe_in() == 0
        self.probing = self.probing and self.allowed

    @rule()
    def suspend(self) -> None:
        self.breaker.suspend()
        if self.allowed:
            self.allowed = self.probing = False

    @precondition(lambda self: self.breaker.probe_in() == 0)
    @rule()
    def probe_starts(self) -> None:
        self.breaker.probe_started()
        self.probing = True

    @precondition(lambda self: self.probing)
    @rule(ok=st.booleans())
    def probe_ends(self, ok: bool) -> None:
        self.probing = False
        if ok:
            self.breaker.probe_succeeded()
            self.allowed = True
        else:
            self.breaker.probe_failed()
            pause = self.breaker.probe_in()
            assert pause is not None and 0 < pause <= 4.0

    @invariant()
    def calls_are_made_exactly_when_the_model_says(self) -> None:
        assert self.breaker.closed == self.allowed
        assert (self.breaker.state is State.HALF_OPEN) == (self.probing and not self.allowed)

    @invariant()
    def a_probe_always_comes(self) -> None:
        wait = self.breaker.probe_in()
        assert (wait is None) == (self.breaker.state is not State.OPEN)
        assert wait is None or wait <= 16.0


AnyOrder.TestCase.settings = settings(LOADED_MACHINE, max_examples=100, stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase
