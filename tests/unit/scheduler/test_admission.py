import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.admission import Admission, DrainRate, Permit
from scheduler.errors import InvalidRequestError, OverloadedError
from scheduler.messages import QueueState


def test_permits_end_with_their_scope_whatever_happens_in_it() -> None:
    admission = Admission(max_requests=4, max_tokens=1000)
    with admission.admit(2, 100, 0.0):
        assert (admission.num_requests, admission.num_tokens) == (2, 100)
    with pytest.raises(RuntimeError), admission.admit(2, 100, 0.0):
        raise RuntimeError
    assert (admission.num_requests, admission.num_tokens) == (0, 0)
    permit = admission.admit(1, 10, 0.0)
    permit.close()
    permit.close()
    assert admission.num_requests == 0


@pytest.mark.parametrize(("num_requests", "num_tokens"), [(3, 100), (1, 600)])
def test_a_full_queue_turns_away_with_the_time_that_it_needs_to_drain(
    num_requests: int, num_tokens: int
) -> None:
    admission = Admission(max_requests=10, max_tokens=1000)
    admission.update(QueueState(num_requests=8, num_tokens=500, requests_per_s=0.25, tokens_per_s=20.0), 0.0)
    with pytest.raises(OverloadedError, match="the queue is full: 8 requests of 500 tokens wait") as raised:
        admission.admit(num_requests, num_tokens, 0.0)
    # One request too many at 0.25 a second; 100 tokens too many at 20 a second.
    assert raised.value.retry_after_s == pytest.approx(4.0 if num_requests == 3 else 5.0)
    admission.admit(2, 500, 0.0).close()


def test_the_time_to_come_back_is_bounded_and_known_even_if_nothing_ever_left() -> None:
    admission = Admission(max_requests=1, max_tokens=100)
    admission.update(QueueState(num_requests=1, num_tokens=1), 0.0)
    with pytest.raises(OverloadedError) as raised:
        admission.admit(1, 1, 0.0)
    assert raised.value.retry_after_s == 1.0
    admission.update(QueueState(num_requests=1, num_tokens=1, requests_per_s=1e-9, tokens_per_s=0.0), 0.0)
    with pytest.raises(OverloadedError) as raised:
        admission.admit(1, 100, 0.0)
    assert raised.value.retry_after_s == 60.0


def test_what_never_fits_is_refused_for_good() -> None:
    admission = Admission(max_requests=2, max_tokens=100)
    with pytest.raises(InvalidRequestError, match=r"at most 2 sequences, .*, got 3"):
        admission.admit(3, 3, 0.0)
    with pytest.raises(InvalidRequestError, match=r"at most 100 tokens together, .*, got 101"):
        admission.admit(1, 101, 0.0)


def test_what_never_fits_is_refused_for_good_before_tokenising_too() -> None:
    admission = Admission(max_requests=2, max_tokens=100)
    with admission.admit(1, 10, 0.0):  # else an empty queue would let it in, to be refused after tokenising
        with pytest.raises(InvalidRequestError, match="at most 2 sequences, the size of the queue, got 3"):
            admission.admit_text(3, 10, 0.0)
        with pytest.raises(InvalidRequestError, match="at most 100 tokens together"):
            admission.admit_text(1, 0, 0.0, num_tokens=101)


def test_characters_are_enough_to_be_turned_away_before_tokenising() -> None:
    admission = Admission(max_requests=100, max_tokens=1000)
    with admission.admit_text(1, 3600, 0.0) as permit:
        assert admission.num_tokens == 900  # 4 characters a token, to begin with
        with pytest.raises(OverloadedError):
            admission.admit_text(1, 1000, 0.0)
        permit.settle(300)
        assert admission.num_tokens == 300
        assert admission.estimated_tokens(1200) == pytest.approx(100, abs=1)  # it learned: 12 a token
    # The estimate may be wrong: an empty queue takes it, and the tokens decide.
    admission.admit_text(1, 10**6, 0.0).close()


def test_an_old_word_of_a_full_queue_turns_nobody_away() -> None:
    admission = Admission(max_requests=1, max_tokens=100)
    admission.update(QueueState(num_requests=1, num_tokens=100), 0.0)
    with pytest.raises(OverloadedError):
        admission.admit_text(1, 4, 0.05)
    admission.admit_text(1, 4, 1.0).close()


def test_drain_rate_counts_busy_time_only() -> None:
    drain = DrainRate()
    assert drain.state(0, 0, 0.0).requests_per_s is None
    for start in (0.0, 1000.0):  # idle in between
        drain.arrived(start)
        for i in range(1, 11):
            drain.left(5, 320, start + i * 0.1, is_empty=i == 10)
    state = drain.state(3, 192, 1500.0)
    assert (state.num_requests, state.num_tokens) == (3, 192)
    assert state.requests_per_s == pytest.approx(50, rel=0.05)
    assert state.tokens_per_s == pytest.approx(3200, rel=0.05)


def test_a_queue_that_stands_still_drains_ever_slower() -> None:
    drain = DrainRate()
    drain.arrived(0.0)
    drain.left(10, 10, 1.0, is_empty=False)
    rates = [drain.state(1, 1, now).requests_per_s or 0.0 for now in (1.0, 2.0, 10.0)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1.0)
    drain.left(0, 0, 10.0, is_empty=True)  # those that waited were cancelled
    later = drain.state(0, 0, 1000.0).requests_per_s
    assert later is not None
    assert 0 < later < 1.0


class AdmissionMachine(RuleBasedStateMachine):
    """Permits are taken, settled and ended in any order; the sums never drift, and the limits hold."""

    @initialize(max_requests=st.integers(1, 20), max_tokens=st.integers(1, 2000))
    def start(self, max_requests: int, max_tokens: int) -> None:
        self.admission = Admission(max_requests=max_requests, max_tokens=max_tokens)
        self.limits = (max_requests, max_tokens)
        self.state = QueueState()
        self.permits: list[Permit] = []

    @rule(num_requests=st.integers(1, 8), num_tokens=st.integers(1, 900))
    def admit(self, num_requests: int, num_tokens: int) -> None:
        before = (self.admission.num_requests, self.admission.num_tokens)
        fits = before[0] + num_requests <= self.limits[0] and before[1] + num_tokens <= self.limits[1]
        try:
            self.permits.append(self.admission.admit(num_requests, num_tokens, 0.0))
        except (OverloadedError, InvalidRequestError):
            assert not fits
            assert (self.admission.num_requests, self.admission.num_tokens) == before
        else:
            assert fits or before[0] == 0

    @rule(num_chars=st.integers(0, 5000))
    def admit_text(self, num_chars: int) -> None:
        try:
            self.permits.append(self.admission.admit_text(1, num_chars, 0.0))
        except OverloadedError:
            assert self.admission.num_requests > 0

    @precondition(lambda self: self.permits)
    @rule(which=st.integers(0, 100), num_tokens=st.integers(1, 900))
    def settle(self, which: int, num_tokens: int) -> None:
        self.permits[which % len(self.permits)].settle(num_tokens)

    @precondition(lambda self: self.permits)
    @rule(which=st.integers(0, 100), twice=st.booleans())
    def close(self, which: int, twice: bool) -> None:
        permit = self.permits.pop(which % len(self.permits))
        permit.close()
        if twice:
            permit.close()
        permit.settle(77)  # too late, and harmless

    @rule(
        num_requests=st.integers(0, 20), num_tokens=st.integers(0, 2000), rate=st.none() | st.floats(0, 100)
    )
    def hear_of_the_queue(self, num_requests: int, num_tokens: int, rate: float | None) -> None:
        self.state = QueueState(
            num_requests=num_requests, num_tokens=num_tokens, requests_per_s=rate, tokens_per_s=rate
        )
        self.admission.update(self.state, 0.0)

    @invariant()
    def sums_are_those_of_the_open_permits(self) -> None:
        if hasattr(self, "admission"):
            requests = self.state.num_requests + sum(permit.num_requests for permit in self.permits)
            tokens = self.state.num_tokens + sum(permit.num_tokens for permit in self.permits)
            assert (self.admission.num_requests, self.admission.num_tokens) == (requests, tokens)


AdmissionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAdmission = AdmissionMachine.TestCase


@pytest.mark.parametrize("name", ["max_requests", "max_tokens"])
def test_a_limit_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        Admission(**{"max_requests": 1, "max_tokens": 1, name: 0})
