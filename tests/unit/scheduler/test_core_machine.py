"""Random lives of the scheduler's core between scripted workers: whatever the order of arrivals, cancels,
failures and deaths, every request ends exactly once and every page comes back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.actions import Action, SendDecodeCancel, SendDecodeStarts, SendEvents, SendPrefill
from scheduler.batching.cost_model import CostModel
from scheduler.batching.former import BatchFormer, FormedBatch
from scheduler.batching.policies import FixedPolicy
from scheduler.core import QueueLimits, SchedulerCore
from scheduler.messages import (
    AbortReply,
    DecodeStart,
    DecodeWorkerInfo,
    FinishReason,
    Lease,
    ModelInfo,
    PoolHandle,
    PrefillBatch,
    PrefillOutcome,
    PrefillResult,
    PrefillWorkerInfo,
    Request,
    SamplingParams,
    SequenceRef,
    StepReport,
    TokenEvent,
)

PAGE_SIZE = 4
POOL_PAGES = {"decode-0": 12, "decode-1": 6}
"""Pages that can be leased. Unequal, as pools are that take a share of the free memory one after the other."""
MAX_NUM_SEQS = 3
LIMITS = QueueLimits(max_requests=8, max_tokens=120)
TIMEOUT_S = 0.02
MODEL = ModelInfo(
    name="m", max_model_len=64, vocab_size=9, eos_token_ids=(0,), dtype="float32", num_parameters=1
)


def make_core(observer: Ends) -> SchedulerCore:
    cost_model = CostModel.proportional([16, 64])
    policy = FixedPolicy(max_requests=4, timeout_s=TIMEOUT_S, cost_model=cost_model)
    return SchedulerCore(BatchFormer(policy, cost_model), LIMITS, observer)


def prefill_info(name: str) -> PrefillWorkerInfo:
    return PrefillWorkerInfo(
        name=name,
        model=MODEL,
        buckets=("16x4", "64x4"),
        graph_bytes=0,
        uses_cuda_graphs=False,
        bucket_seconds={"16x4": 0.01, "64x4": 0.02},
        device="cpu",
        load_seconds=0.0,
        warmup_seconds=0.0,
    )


def decode_info(name: str) -> DecodeWorkerInfo:
    pool = PoolHandle(
        decode_worker=name,
        transport="shm",
        address="",
        incarnation=1,
        num_pages=POOL_PAGES[name] + 1,
        page_size=PAGE_SIZE,
        size_bytes=0,
    )
    return DecodeWorkerInfo(
        name=name,
        model=MODEL,
        pool=pool,
        max_num_seqs=MAX_NUM_SEQS,
        device="cpu",
        load_seconds=0.0,
        weights_bytes=0,
    )


@dataclass
class Ends:
    """An observer that remembers how often each request ended, and how."""

    outcomes: dict[str, list[str]] = field(default_factory=dict)

    def rejected(self, label: str) -> None: ...
    def batch_formed(self, batch_id: int, worker: str, formed: FormedBatch, now: float) -> None: ...
    def prefilled(self, result: PrefillResult) -> None: ...
    def first_token(self, waited_s: float) -> None: ...
    def stepped(self, report: StepReport) -> None: ...

    def ended(self, request: Request, outcome: str, num_outputs: int, seconds: float) -> None:
        self.outcomes.setdefault(request.request_id, []).append(outcome)


@dataclass
class ScriptedDecode:
    """A decode worker: calls reach it in any order, its reports reach the scheduler in theirs."""

    name: str
    calls: list[DecodeStart | SequenceRef] = field(default_factory=list)
    running: dict[SequenceRef, tuple[Request, int]] = field(default_factory=dict)
    cancelled_early: set[SequenceRef] = field(default_factory=set)
    released: list[SequenceRef] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)

    def take_call(self, index: int) -> None:
        call = self.calls.pop(index % len(self.calls))
        if isinstance(call, SequenceRef):
            if self.running.pop(call, None) is None:
                self.cancelled_early.add(call)
            else:
                self.released.append(call)
            return
        ref = SequenceRef(request_id=call.request.request_id, epoch=call.lease.epoch)
        if ref in self.cancelled_early:
            self.released.append(ref)
        else:
            self.running[ref] = (call.request, 1)

    def step(self, stopping: int) -> list[str]:
        """Make a token for each sequence; number `stopping` stops. Returns the ids of those that ended."""
        events: list[TokenEvent] = []
        ended: list[str] = []
        for place, (ref, (request, index)) in enumerate(list(self.running.items())):
            reason: FinishReason | None = "length" if index + 1 >= request.sampling.max_tokens else None
            reason = "stop" if place == stopping else reason
            events.append(
                TokenEvent(request_id=request.request_id, index=index, token_id=1, finish_reason=reason)
            )
            self.running[ref] = (request, index + 1)
            if reason is not None:
                del self.running[ref]
                self.released.append(ref)
                ended.append(request.request_id)
        report = StepReport(
            worker=self.name, seconds=0.0, events=tuple(events), released=tuple(self.released)
        )
        self.released = []
        self.reports.append(report)
        return ended


class CoreMachine(RuleBasedStateMachine):
    """Drives a core through its public methods, as the Scheduler actor does."""

    @initialize(num_prefill=st.integers(1, 2), num_decode=st.integers(1, 2))
    def start(self, num_prefill: int, num_decode: int) -> None:
        self.now = 100.0
        self.ends = Ends()
        self.core = make_core(self.ends)
        self.accepted: dict[str, Request] = {}
        self.cancelled: set[str] = set()
        self.answered: Counter[str] = Counter()  # final events that were sent to the ApiServer
        self.leases: dict[SequenceRef, Lease] = {}
        self.batches: dict[str, PrefillBatch | None] = {}
        self.decode: dict[str, ScriptedDecode] = {}
        self.waiting: dict[str, Request] = {}
        self.num_made = 0
        for name in [f"prefill-{i}" for i in range(num_prefill)]:
            self.core.add_prefill_worker(prefill_info(name))
            self.batches[name] = None
        for name in list(POOL_PAGES)[:num_decode]:
            self.core.add_decode_worker(decode_info(name))
            self.decode[name] = ScriptedDecode(name=name)

    def pump(self) -> None:
        """Carry out what the core wants."""
        for action in self.core.tick(self.now):
            self.perform(action)

    def perform(self, action: Action) -> None:
        match action:
            case SendPrefill(worker=worker, batch=batch):
                assert worker in self.batches, "a batch for a dead worker"
                assert self.batches[worker] is None, "a batch for a busy worker"
                assert batch.decode_worker in self.decode, "pages of a dead worker"
                self.batches[worker] = batch
                for item in batch.items:
                    self.take_lease(item.request, item.lease)
            case SendDecodeStarts(worker=worker, starts=starts):
                if worker in self.decode:
                    self.decode[worker].calls += starts
            case SendDecodeCancel(worker=worker, refs=refs):
                if worker in self.decode:
                    self.decode[worker].calls += refs
            case SendEvents(events=events):
                for event in events.events:
                    assert event.error_label is not None
                    self.answered[event.request_id] += 1

    def take_lease(self, request: Request, lease: Lease) -> None:
        assert self.waiting.pop(request.request_id) == request, "prefilled though it does not wait"
        assert len(lease.page_ids) * PAGE_SIZE >= request.max_total_tokens
        assert 0 not in lease.page_ids, "the scratch page was leased"
        held = {
            page
            for other in self.leases.values()
            if other.decode_worker == lease.decode_worker
            for page in other.page_ids
        }
        assert not held & set(lease.page_ids), "a page was leased twice"
        assert all(lease.epoch > other.epoch for other in self.leases.values())
        self.leases[SequenceRef(request_id=request.request_id, epoch=lease.epoch)] = lease

    def notice_ends_in_the_queue(self) -> None:
        for request_id in [i for i in self.waiting if i in self.ends.outcomes]:
            del self.waiting[request_id]

    # What happens to it.

    @rule(
        lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=5),
        twice=st.integers(0, 9),
    )
    def submit(self, lengths: list[tuple[int, int]], twice: int) -> None:
        group = []
        for num_prompt, max_tokens in lengths:
            self.num_made += 1
            group.append(
                Request(
                    request_id=f"r{self.num_made}",
                    api_server="api-0",
                    prompt_token_ids=(1,) * num_prompt,
                    sampling=SamplingParams(max_tokens=max_tokens),
                )
            )
        if twice == 0:
            group.append(group[0])
        before = (self.core.num_live, self.core.num_waiting, self.core.num_waiting_tokens)
        rejection = self.core.submit(group, self.now)
        if rejection is None:
            assert twice, "one id was accepted twice"
            self.accepted |= {request.request_id: request for request in group}
            self.waiting |= {request.request_id: request for request in group}
        else:
            after = (self.core.num_live, self.core.num_waiting, self.core.num_waiting_tokens)
            assert after == before, "a group was accepted in part"
        self.pump()

    @rule(number=st.integers(0, 60))
    def cancel(self, number: int) -> None:
        """Cancel any request: unknown, waiting, prefilling, decoding, ended, or cancelled before."""
        request_id = f"r{number}"
        if request_id in self.accepted and request_id not in self.ends.outcomes:
            self.cancelled.add(request_id)
        self.core.cancel(request_id, self.now)
        self.notice_ends_in_the_queue()
        self.pump()

    @rule(seconds=st.sampled_from([0.001, TIMEOUT_S, 1.0]))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds
        self.pump()

    @precondition(lambda self: any(self.batches.values()))
    @rule(which=st.integers(0, 1), finishing=st.integers(0, 15), failing=st.integers(0, 63))
    def prefill_comes_back(self, which: int, finishing: int, failing: int) -> None:
        """Bits of `finishing` and, where both high bits are set, of `failing` say which items end here."""
        worker = self.busy(which)
        batch = self.batches[worker]
        assert batch is not None
        self.batches[worker] = None
        outcomes: list[PrefillOutcome] = []
        for place, item in enumerate(batch.items):
            request_id = item.request.request_id
            if failing >= 48 and failing >> place & 1:
                outcome = PrefillOutcome(request_id=request_id, error_label="stale_lease", error_message="no")
            else:
                last = item.request.sampling.max_tokens == 1
                reason: FinishReason | None = "length" if last else "stop" if finishing >> place & 1 else None
                outcome = PrefillOutcome(request_id=request_id, token_id=1, finish_reason=reason)
                self.answered[request_id] += reason is not None
            outcomes.append(outcome)
            goes_on = outcome.token_id is not None and outcome.finish_reason is None
            if not goes_on or request_id in self.cancelled or batch.decode_worker not in self.decode:
                self.leases.pop(SequenceRef(request_id=request_id, epoch=item.lease.epoch), None)
        result = PrefillResult(
            batch_id=batch.batch_id,
            worker=worker,
            outcomes=tuple(outcomes),
            num_tokens=1,
            padding_tokens=0,
            replays={},
            seconds=0.01,
        )
        self.core.prefill_done(result, self.now)
        self.pump()

    @precondition(lambda self: any(self.batches.values()))
    @rule(which=st.integers(0, 1))
    def prefill_raises(self, which: int) -> None:
        worker = self.busy(which)
        self.drop_batch(worker)
        self.core.prefill_failed(worker, "out of luck", self.now)
        self.pump()

    @precondition(lambda self: any(decode.calls for decode in self.decode.values()))
    @rule(which=st.integers(0, 1), index=st.integers(0, 7))
    def a_call_reaches_a_decode_worker(self, which: int, index: int) -> None:
        busy = [decode for decode in self.decode.values() if decode.calls]
        busy[which % len(busy)].take_call(index)

    @precondition(lambda self: self.decode)
    @rule(which=st.integers(0, 1), stopping=st.integers(0, 9))
    def decode_steps(self, which: int, stopping: int) -> None:
        decode = list(self.decode.values())[which % len(self.decode)]
        self.answered.update(decode.step(stopping))

    @precondition(lambda self: any(decode.reports for decode in self.decode.values()))
    @rule(which=st.integers(0, 1))
    def a_report_arrives(self, which: int) -> None:
        reporting = [decode for decode in self.decode.values() if decode.reports]
        report = reporting[which % len(reporting)].reports.pop(0)
        for ref in report.released:
            del self.leases[ref]
        self.core.step_done(report, self.now)
        self.pump()

    @precondition(lambda self: self.now > 103 and self.batches)
    @rule(which=st.integers(0, 1))
    def a_prefill_worker_dies(self, which: int) -> None:
        worker = list(self.batches)[which % len(self.batches)]
        self.drop_batch(worker)
        del self.batches[worker]
        self.core.worker_lost(worker, self.now)
        self.notice_ends_in_the_queue()
        self.pump()

    @precondition(lambda self: self.now > 103 and self.decode)
    @rule(which=st.integers(0, 1))
    def a_decode_worker_dies(self, which: int) -> None:
        worker = list(self.decode)[which % len(self.decode)]
        del self.decode[worker]
        self.leases = {r: lease for r, lease in self.leases.items() if lease.decode_worker != worker}
        self.core.worker_lost(worker, self.now)
        self.notice_ends_in_the_queue()
        self.pump()

    def busy(self, which: int) -> str:
        workers = [worker for worker, batch in self.batches.items() if batch is not None]
        return workers[which % len(workers)]

    def drop_batch(self, worker: str) -> None:
        batch = self.batches[worker]
        for item in batch.items if batch is not None else ():
            ref = SequenceRef(request_id=item.request.request_id, epoch=item.lease.epoch)
            self.leases.pop(ref, None)
        self.batches[worker] = None

    # What must hold.

    @invariant()
    def counters_equal_the_queue(self) -> None:
        assert self.core.num_waiting == len(self.waiting)
        assert self.core.num_waiting_tokens == sum(r.num_prefill_tokens for r in self.waiting.values())
        assert self.core.num_live == len(self.accepted) - len(self.ends.outcomes)

    @invariant()
    def every_request_ends_once_at_most(self) -> None:
        assert self.ends.outcomes.keys() <= self.accepted.keys()
        assert all(len(outcomes) == 1 for outcomes in self.ends.outcomes.values())

    @invariant()
    def pages_are_leased_or_free(self) -> None:
        assert {ledger.worker for ledger in self.core.ledgers} == self.decode.keys()
        for ledger in self.core.ledgers:
            mine = [lease for lease in self.leases.values() if lease.decode_worker == ledger.worker]
            assert ledger.num_leases == len(mine)
            assert ledger.free_sequences == MAX_NUM_SEQS - len(mine) >= 0
            assert ledger.free_pages == POOL_PAGES[ledger.worker] - sum(len(x.page_ids) for x in mine)

    def teardown(self) -> None:
        """Let everything run to its end: nothing is left, and everybody got an answer."""
        if not hasattr(self, "core"):
            return
        for _ in range(2000):
            if not self.core.num_live and not self.leases:
                break
            self.time_goes_on(1.0)
            if any(self.batches.values()):
                self.prefill_comes_back(0, 0, 0)
            for decode in self.decode.values():
                while decode.calls:
                    decode.take_call(0)
            for i in range(len(self.decode)):
                self.decode_steps(i, 99)
            while any(decode.reports for decode in self.decode.values()):
                self.a_report_arrives(0)
        self.counters_equal_the_queue()
        self.pages_are_leased_or_free()
        assert self.core.num_live == self.core.num_waiting == 0
        assert not self.leases
        assert self.ends.outcomes.keys() == self.accepted.keys()
        silent = [i for i in self.accepted if i not in self.cancelled and not self.answered[i]]
        assert not silent, f"no answer for {silent}"


TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_what_fits_no_pool_that_is_left_fails_when_its_pool_dies() -> None:
    """It would wait for ever otherwise, and everything behind it too."""
    ends = Ends()
    core = make_core(ends)
    core.add_prefill_worker(prefill_info("prefill-0"))
    for name in POOL_PAGES:
        core.add_decode_worker(decode_info(name))
    small = POOL_PAGES["decode-1"] * PAGE_SIZE
    for request_id, num_tokens in (("large", small + 1), ("small", small)):
        request = Request(
            request_id=request_id,
            api_server="api-0",
            prompt_token_ids=(1,) * (num_tokens - 1),
            sampling=SamplingParams(max_tokens=1),
        )
        assert core.submit([request], 0.0) is None
    core.worker_lost("decode-0", 0.0)
    (failed,) = core.tick(0.0)
    assert isinstance(failed, SendEvents)
    assert [(event.request_id, event.error_label) for event in failed.events.events] == [
        ("large", "unavailable")
    ]
    (sent,) = core.tick(1.0)
    assert isinstance(sent, SendPrefill)
    assert [item.request.request_id for item in sent.batch.items] == ["small"]


def test_a_completion_is_aborted_with_its_own_key_only() -> None:
    core = make_core(Ends())
    core.add_prefill_worker(prefill_info("prefill-0"))
    core.add_decode_worker(decode_info("decode-1"))
    for request_id, key in (("a0", "key-a"), ("a1", "key-a"), ("b0", "key-b")):
        request = Request(
            request_id=request_id,
            api_server="api-0",
            prompt_token_ids=(1,),
            sampling=SamplingParams(max_tokens=1),
            tenant=f"{key}/ann",
            completion_id="mine",
        )
        assert core.submit([request], 0.0) is None
    assert core.abort("mine", "key", 0.0) == AbortReply(num_sequences=0, num_foreign=3)
    assert core.abort("mine", "key-a", 0.0) == AbortReply(num_sequences=2, num_foreign=1)
    (told,) = core.tick(0.0)
    assert isinstance(told, SendEvents)
    assert [event.request_id for event in told.events.events] == ["a0", "a1"]
    assert core.num_live == 1
