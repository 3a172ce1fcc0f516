"""Random lives of a batch former, checked against a plain model of its queue."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.batching.adaptive import AdaptivePolicy
from scheduler.batching.former import BatchFormer
from scheduler.batching.policies import FixedPolicy, Workers
from scheduler.batching.requests import FormedBatch, QueuedRequest
from tests.unit.scheduler.batching.helpers import h200_model, queued

PATIENCE_S = 1.0
MAX_SKIP_S = 0.25
POOL_PAGES = 40
POOL_SEQUENCES = 10


@dataclass
class Waiting:
    """What the model knows of a waiting request."""

    request: QueuedRequest
    seq: int
    returned: bool = False
    passed_at: float | None = None

    @property
    def place(self) -> tuple[float, int]:
        deadline = self.request.deadline
        return (self.request.arrival_time + PATIENCE_S if deadline is None else deadline), self.seq

    def is_before(self, other: Waiting) -> bool:
        """Whether this one must be served first, as far as shares between tenants do not matter."""
        if self.returned or other.returned:
            mine = (self.request.arrival_time, self.seq)
            return self.returned and (not other.returned or mine < (other.request.arrival_time, other.seq))
        if self.request.priority != other.request.priority:
            return self.request.priority < other.request.priority
        return self.request.tenant == other.request.tenant and self.place < other.place


class FormerMachine(RuleBasedStateMachine):
    """Requests arrive, are cancelled, prefilled, decoded; workers die; pages run short; time goes on."""

    @initialize(
        policy=st.sampled_from(["fixed", "adaptive"]),
        max_requests=st.integers(1, 10),
        max_tokens=st.sampled_from([None, None, 16, 100, 300, 700, 1500]),
        timeout_s=st.sampled_from([0.0, 0.005, 0.05]),
        num_workers=st.integers(1, 3),
    )
    def start(
        self, policy: str, max_requests: int, max_tokens: int | None, timeout_s: float, num_workers: int
    ) -> None:
        self.cost = h200_model()
        policy_class = FixedPolicy if policy == "fixed" else AdaptivePolicy
        self.policy = policy_class(
            max_requests=max_requests, max_tokens=max_tokens, timeout_s=timeout_s, cost_model=self.cost
        )
        self.former = BatchFormer(
            self.policy,
            self.cost,
            patience_s=PATIENCE_S,
            size_patience=0.0,
            max_skip_s=MAX_SKIP_S,
            quantum_tokens=256,
        )
        self.timeout_s = timeout_s
        self.max_tokens = max_tokens
        self.now = 100.0
        self.num_made = 0
        self.waiting: dict[str, Waiting] = {}
        self.ended: set[str] = set()
        self.num_idle = num_workers
        self.in_flight: list[FormedBatch] = []
        self.decoding: dict[str, QueuedRequest] = {}
        self.withheld_pages = 0

    # What the pool has.

    @property
    def held(self) -> list[QueuedRequest]:
        return [*(r for batch in self.in_flight for r in batch.requests), *self.decoding.values()]

    @property
    def free_pages(self) -> int:
        return max(0, POOL_PAGES - self.withheld_pages - sum(r.num_pages for r in self.held))

    @property
    def free_sequences(self) -> int:
        return POOL_SEQUENCES - len(self.held)

    # What happens.

    @rule(
        sizes=st.lists(
            st.sampled_from([1, 16, 17, 40, 64, 100, 300, 700, 2000, 5000]), min_size=1, max_size=12
        ),
        pages=st.integers(1, 12),
        priority=st.sampled_from([0, 0, 0, 1, 5]),
        tenant=st.sampled_from(["", "a", "b"]),
        slo_s=st.sampled_from([None, None, 0.0, 0.01, 0.1, 3.0]),
    )
    def arrive(self, sizes: list[int], pages: int, priority: int, tenant: str, slo_s: float | None) -> None:
        for size in sizes:
            self.num_made += 1
            request = queued(
                f"r{self.num_made}",
                size,
                at=self.now,
                pages=pages,
                priority=priority,
                deadline=None if slo_s is None else self.now + slo_s,
                tenant=tenant,
            )
            self.former.add(request)
            self.waiting[request.request_id] = Waiting(request, self.num_made)
        self.pump()

    @rule(seconds=st.sampled_from([0.0001, 0.001, 0.004, 0.02, 0.3]))
    def wait(self, seconds: float) -> None:
        """Time goes on; a timer that is due on the way rings."""
        end = self.now + seconds
        while self.num_idle and (wake_at := self.former.wake_at()) is not None and wake_at <= end:
            assert wake_at > self.now
            self.now = wake_at
            self.pump()
        self.now = end
        self.pump()

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 10_000))
    def cancel_waiting(self, which: int) -> None:
        request_id = list(self.waiting)[which % len(self.waiting)]
        assert self.former.remove(request_id)
        assert not self.former.remove(request_id)
        del self.waiting[request_id]
        self.ended.add(request_id)
        self.pump()

    @rule(which=st.integers(0, 10_000))
    def cancel_one_that_does_not_wait(self, which: int) -> None:
        gone = f"r{which + self.num_made + 1}"
        assert not self.former.remove(gone)
        if self.held:
            assert not self.former.remove(self.held[which % len(self.held)].request_id)

    @precondition(lambda self: self.in_flight)
    @rule(slower=st.sampled_from([0.5, 1.0, 1.0, 3.0]))
    def finish_prefill(self, slower: float) -> None:
        batch = self.in_flight.pop(0)
        self.num_idle += 1
        self.former.observe(batch.num_tokens, slower * self.cost.seconds(batch.num_tokens))
        self.decoding.update((request.request_id, request) for request in batch.requests)
        self.pump()

    @precondition(lambda self: self.in_flight)
    @rule()
    def prefill_worker_dies_and_another_starts(self) -> None:
        for request in self.in_flight.pop().requests:
            self.former.add(request, front=True)
            self.num_made += 1
            self.waiting[request.request_id] = Waiting(request, self.num_made, returned=True)
        self.num_idle += 1
        self.pump()

    @precondition(lambda self: self.decoding)
    @rule(num=st.integers(1, 10))
    def finish_decode(self, num: int) -> None:
        for request_id in list(self.decoding)[:num]:
            del self.decoding[request_id]
            self.ended.add(request_id)
        self.pump()

    @rule(pages=st.sampled_from([0, 0, 30, 40]))
    def pages_run_short_or_come_back(self, pages: int) -> None:
        self.withheld_pages = pages
        self.pump()

    # What must hold.

    def pump(self) -> None:
        """Ask for batches as the scheduler does, and check each."""
        while self.num_idle:
            free_pages, free_sequences = self.free_pages, self.free_sequences
            formed = self.former.form(
                self.now,
                free_pages=free_pages,
                free_sequences=free_sequences,
                workers=Workers(
                    num_idle=self.num_idle,
                    num_busy=len(self.in_flight),
                    next_idle_at=self.now + 0.01 if self.in_flight else None,
                ),
            )
            if formed is None:
                self.check_hold()
                return
            self.num_idle -= 1
            self.in_flight.append(formed)
            leaving = [self.waiting.pop(request.request_id, None) for request in formed.requests]
            assert None not in leaving, "dispatched twice, or after its end"
            self.check_batch(formed, [gone for gone in leaving if gone], free_pages, free_sequences)

    def check_batch(
        self, formed: FormedBatch, leaving: list[Waiting], free_pages: int, free_sequences: int
    ) -> None:
        assert 1 <= len(formed.requests) <= min(self.policy.max_requests, free_sequences)
        assert sum(request.num_pages for request in formed.requests) <= free_pages
        if self.max_tokens is not None:
            largest = max(request.num_tokens for request in formed.requests)
            limit = self.max_tokens if largest <= self.max_tokens else self.cost.padded(largest)
            assert formed.num_tokens <= limit
        late = [r for r in formed.requests if r.deadline is not None and r.deadline < self.now]
        assert formed.num_past_deadline == len(late)
        for left in self.waiting.values():
            if any(left.is_before(gone) for gone in leaving):
                if left.passed_at is None:
                    left.passed_at = self.now
                assert self.now < left.passed_at + MAX_SKIP_S, "passed over for too long"

    def check_hold(self) -> None:
        """A worker is idle and no batch left: there must be a good reason, and an end to it."""
        wake_at = self.former.wake_at()
        if not self.waiting:
            assert wake_at is None
            return
        requests = [entry.request for entry in self.waiting.values()]
        fits = [
            entry
            for entry in self.waiting.values()
            if entry.request.num_pages <= self.free_pages and self.free_sequences
        ]
        firsts = [
            entry
            for entry in self.waiting.values()
            if not any(o.is_before(entry) for o in self.waiting.values())
        ]
        if wake_at is None:
            # Nothing is held: pages or sequences lack, for those first in order at least.
            assert not all(first in fits for first in firsts)
            return
        assert len(fits) == len(requests), "held although some that wait cannot join"
        assert self.now < wake_at <= min(request.arrival_time for request in requests) + self.timeout_s
        num_tokens = sum(request.num_tokens for request in requests)
        for request in requests:
            if request.deadline is not None:
                assert self.now < request.deadline - self.cost.seconds(num_tokens)

    @invariant()
    def counters_equal_the_queue(self) -> None:
        if not hasattr(self, "former"):
            return
        assert len(self.former) == len(self.waiting)
        assert self.former.num_tokens == sum(w.request.num_tokens for w in self.waiting.values())
        by_class: dict[int, int] = {}
        tokens: dict[int, int] = {}
        for entry in self.waiting.values():
            if not entry.returned:
                priority = entry.request.priority
                by_class[priority] = by_class.get(priority, 0) + 1
                tokens[priority] = tokens.get(priority, 0) + entry.request.num_tokens
        assert self.former.counts_by_class == by_class
        assert self.former.tokens_by_class == tokens
        assert all(request_id in self.former for request_id in self.waiting)

    def teardown(self) -> None:
        """With pages and workers enough, everything that waits is served, and each once."""
        if not hasattr(self, "former"):
            return
        self.withheld_pages = 0
        for _ in range(5 * self.num_made + 10):
            while self.in_flight:
                self.finish_prefill(slower=1.0)
            self.decoding.clear()
            self.wait(0.3)
            if not self.waiting and not self.in_flight:
                break
        assert not self.waiting
        assert len(self.former) == 0


FormerMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestFormer = FormerMachine.TestCase
