"""Random lives of the scheduler's core between scripted workers: whatever the order of arrivals, cancels,
failures, deaths, joins and leaves, every request ends exactly once, with each of its tokens once, and every page
comes back. A page that is shared holds what it should, and nobody writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from hypothesis import HealthCheck, settings
from hypothesis import event as note_event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.actions import (
    Action,
    ReleaseWorker,
    RequeueReason,
    SendDecodeCancel,
    SendDecodeGrow,
    SendDecodeStarts,
    SendEvents,
    SendPrefill,
)
from scheduler.batching.cost_model import CostModel
from scheduler.batching.former import BatchFormer, FormedBatch
from scheduler.batching.policies import FixedPolicy
from scheduler.core import QueueLimits, SchedulerCore
from scheduler.messages import (
    AbortReply,
    DecodeStart,
    DecodeWorkerInfo,
    FinishReason,
    HandoffFailure,
    HandoffResult,
    ModelInfo,
    PageGrant,
    PoolHandle,
    PrefillBatch,
    PrefillItem,
    PrefillOutcome,
    PrefillResult,
    PrefillWorkerInfo,
    Request,
    SamplingParams,
    SequenceRef,
    StepReport,
    TokenEvent,
)
from scheduler.prefix.hashing import DIGEST_BYTES, chain_digests

PAGE_SIZE = 4
BLOCK_TOKENS = 4
POOL_PAGES = {"decode-0": 12, "decode-1": 6, "decode-2": 8, "decode-3": 12}
"""Pages that can be leased. Unequal, as pools are that take a share of the free memory one after the other."""
MAX_NUM_SEQS = 3
LIMITS = QueueLimits(max_requests=8, max_tokens=120)
TIMEOUT_S = 0.02
MODEL = ModelInfo(
    name="m", max_model_len=64, vocab_size=9, eos_token_ids=(0,), dtype="float32", num_parameters=1
)


def make_core(observer: Ends, *, first_epoch: int = 1, max_requests: int = 4) -> SchedulerCore:
    cost_model = CostModel.proportional([16, 64])
    policy = FixedPolicy(max_requests=max_requests, timeout_s=TIMEOUT_S, cost_model=cost_model)
    return SchedulerCore(
        BatchFormer(policy, cost_model),
        LIMITS,
        observer,
        first_epoch=first_epoch,
        block_tokens=BLOCK_TOKENS,
        min_shared_tokens=4 * BLOCK_TOKENS,
    )


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


def token(index: int) -> int:
    """Return the token that every request has at a place of its output."""
    return 1 + index % 7


def prefix_of(prompt: Sequence[int], salt: int) -> bytes:
    """Return the digests of a prompt's blocks, as an ApiServer sends them."""
    root = bytes([salt]) * DIGEST_BYTES
    return root + b"".join(chain_digests(root, prompt, BLOCK_TOKENS))


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


@dataclass
class Ends:
    """An observer that remembers how often each request ended, and how."""

    outcomes: dict[str, list[str]] = field(default_factory=dict)
    requeues: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def joined(self, info: PrefillWorkerInfo | DecodeWorkerInfo) -> None: ...
    def batch_formed(self, batch: PrefillBatch, worker: str, formed: FormedBatch) -> None: ...
    def prefilled(self, result: PrefillResult) -> None: ...
    def handed_off(self, handoff: HandoffResult) -> None: ...
    def stepped(self, report: StepReport) -> None: ...

    def requeued(self, reason: RequeueReason) -> None:
        self.requeues[reason] += 1

    def refused(self, what: str) -> None:
        self.refusals[what] += 1

    def ended(self, request: Request, outcome: str, num_outputs: int, seconds: float) -> None:
        self.outcomes.setdefault(request.request_id, []).append(outcome)


@dataclass
class Running:
    """A sequence at a scripted decode worker."""

    request: Request
    index: int
    num_pages: int


@dataclass
class ScriptedDecode:
    """A decode worker: calls reach it in any order, and so do its reports the scheduler."""

    name: str
    calls: list[DecodeStart | PageGrant | SequenceRef] = field(default_factory=list)
    running: dict[SequenceRef, Running] = field(default_factory=dict)
    cancelled_early: set[SequenceRef] = field(default_factory=set)
    grants: dict[tuple[SequenceRef, int], int] = field(default_factory=dict)
    released: list[SequenceRef] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    num_reports: int = 0
    next_report: int = 1  # all before this one have reached the scheduler
    arrived: dict[int, StepReport] = field(default_factory=dict)

    def take_call(self, index: int, *, refuse: bool = False) -> None:
        """Carry out any of the calls; `refuse` says that a lease is stale, if it is a start."""
        call = self.calls.pop(index % len(self.calls))
        if isinstance(call, SequenceRef):
            if self.running.pop(call, None) is None:
                self.cancelled_early.add(call)
            else:
                self.released.append(call)
        elif isinstance(call, PageGrant):
            self.grants[call.ref, call.first_page] = len(call.page_ids)
            self.take_grants(call.ref)
        else:
            ref = SequenceRef(request_id=call.request.request_id, epoch=call.lease.epoch)
            assert call.first_token_id == token(len(call.request.output_token_ids))
            if ref in self.cancelled_early or refuse:
                self.cancelled_early.discard(ref)
                self.released.append(ref)
                return
            self.running[ref] = Running(
                call.request, len(call.request.output_token_ids) + 1, len(call.lease.page_ids)
            )
            self.take_grants(ref)

    def take_grants(self, ref: SequenceRef) -> None:
        sequence = self.running.get(ref)
        while sequence is not None and (more := self.grants.pop((ref, sequence.num_pages), 0)):
            sequence.num_pages += more

    def step(self, stopping: int) -> list[TokenEvent]:
        """Make a token for each sequence that has room; number `stopping` stops."""
        events: list[TokenEvent] = []
        for place, (ref, sequence) in enumerate(list(self.running.items())):
            request, index = sequence.request, sequence.index
            if len(request.prompt_token_ids) + index > sequence.num_pages * PAGE_SIZE:
                continue
            reason: FinishReason | None = "length" if index + 1 >= request.sampling.max_tokens else None
            reason = "stop" if place == stopping else reason
            events.append(
                TokenEvent(
                    request_id=request.request_id,
                    index=index,
                    epoch=ref.epoch,
                    token_id=token(index),
                    finish_reason=reason,
                )
            )
            sequence.index += 1
            if reason is not None:
                del self.running[ref]
                self.released.append(ref)
        self.num_reports += 1
        self.reports.append(
            StepReport(
                worker=self.name,
                seconds=0.0,
                events=tuple(events),
                released=tuple(self.released),
                number=self.num_reports,
            )
        )
        self.released = []
        return events


class CoreMachine(RuleBasedStateMachine):
    """Drives a core through its public methods, as the Scheduler actor does."""

    @initialize(
        num_prefill=st.integers(1, 2),
        num_decode=st.integers(1, 2),
        max_requests=st.sampled_from([1, 2, 4]),
        sees_cached=st.booleans(),
    )
    def start(self, num_prefill: int, num_decode: int, max_requests: int, sees_cached: bool) -> None:
        self.now = 100.0
        self.ends = Ends()
        self.max_requests = max_requests
        self.sees_cached = sees_cached  # whether prefill workers need not compute what is cached
        self.core = make_core(self.ends, max_requests=max_requests)
        self.accepted: dict[str, Request] = {}
        self.cancelled: set[str] = set()
        self.disturbed: set[str] = set()  # at a worker when it died: tokens of theirs may come twice
        self.tokens: dict[str, int] = {}  # how many were made
        self.got: dict[str, dict[int, bool]] = {}  # those that the ApiServer has, and whether it is the last
        self.on_the_way: dict[str, list[TokenEvent]] = {}  # to the ApiServer, by worker
        self.ages: dict[str, int] = {}
        self.num_ages = 0
        self.restarted: set[str] = set()  # may leave their pages for another reason than want of them
        self.away: set[str] = set()  # died, and expected back
        self.num_unseen_deaths = 0
        self.answered: Counter[str] = Counter()  # final events that were sent to the ApiServer
        self.leases: dict[SequenceRef, tuple[str, list[int]]] = {}
        self.page_epochs: dict[tuple[str, int], int] = {}
        self.contents: dict[
            tuple[str, int], tuple[object, ...]
        ] = {}  # salt and tokens, to the last one written
        self.num_shared_pages = 0
        self.batches: dict[
            str, list[PrefillBatch]
        ] = {}  # at each prefill worker, the one being computed first
        self.sending: list[tuple[PrefillResult, PrefillBatch]] = []  # computed, their pages on the way
        self.decode: dict[str, ScriptedDecode] = {}
        self.draining: set[str] = set()
        self.num_made = 0
        self.num_joined = 0
        for _ in range(num_prefill):
            self.a_prefill_worker_joins()
        for name in list(POOL_PAGES)[:num_decode]:
            self.core.add_decode_worker(decode_info(name))
            self.decode[name] = ScriptedDecode(name=name)

    def pump(self, returned: PrefillBatch | None = None) -> None:
        """Carry out what the core wants; `returned` is the batch that it was just given back."""
        actions = self.core.tick(self.now)
        starts = {
            SequenceRef(request_id=start.request.request_id, epoch=start.lease.epoch)
            for action in actions
            if isinstance(action, SendDecodeStarts)
            for start in action.starts
        }
        # Those that do not go on to decode have given their pages back.
        for item in returned.items if returned is not None else ():
            ref = SequenceRef(request_id=item.request.request_id, epoch=item.lease.epoch)
            if ref not in starts:
                self.leases.pop(ref, None)
        for action in actions:
            self.perform(action)

    def perform(self, action: Action) -> None:
        match action:
            case SendPrefill(worker=worker, batch=batch):
                assert worker in self.batches, "a batch for a dead worker"
                self.check_sent_ahead(worker, batch)
                assert batch.decode_worker in self.decode, "pages of a dead worker"
                assert not {worker, batch.decode_worker} & self.draining, "work for one that leaves"
                self.batches[worker].append(batch)
                for item in batch.items:
                    self.take_lease(item)
            case SendDecodeStarts(worker=worker, starts=starts):
                self.decode[worker].calls += starts
            case SendDecodeGrow(worker=worker, grants=grants):
                for grant in grants:
                    self.take_grant(worker, grant)
                self.decode[worker].calls += grants
            case SendDecodeCancel(worker=worker, refs=refs):
                for ref in refs:
                    self.check_preemption(worker, ref)
                self.decode[worker].calls += refs
            case SendEvents(events=events):
                for event in events.events:
                    self.deliver(event)
            case ReleaseWorker(worker=worker):
                assert worker in self.draining
                assert not self.batches.pop(worker, None), "released with a batch"
                assert all(result.worker != worker for result, _ in self.sending), "released while it sends"
                assert all(name != worker for name, _ in self.leases.values()), "released with leases"
                self.decode.pop(worker, None)

    def check_sent_ahead(self, worker: str, batch: PrefillBatch) -> None:
        """A busy worker gets one batch more, if no other is idle."""
        if not self.batches[worker]:
            return
        assert len(self.batches[worker]) == 1, "a third batch"
        idle = [name for name, batches in self.batches.items() if not batches]
        assert set(idle) <= self.draining, "sent ahead though a worker is idle"
        note_event("a batch was sent ahead")

    def take_lease(self, item: PrefillItem) -> None:
        request, lease = item.request, item.lease
        begun = self.accepted[request.request_id]
        assert request.request_id in self.waiting(), "prefilled though it does not wait"
        assert request == replace(begun, output_token_ids=request.output_token_ids)
        num_outputs = len(request.output_token_ids)
        assert request.output_token_ids == tuple(map(token, range(num_outputs)))
        known = self.tokens.get(request.request_id, 0)
        assert num_outputs == known or (num_outputs < known and request.request_id in self.disturbed)
        assert len(lease.page_ids) >= pages_for(min(request.num_prefill_tokens + 1, request.max_total_tokens))
        ref = SequenceRef(request_id=request.request_id, epoch=lease.epoch)
        self.take_shared(item, ref)
        self.take_pages(lease.decode_worker, ref, lease.own_page_ids, lease.epoch)

    def take_shared(self, item: PrefillItem, ref: SequenceRef) -> None:
        """The pages that it need not compute hold the KV of its own tokens, under the epochs that are named."""
        request, lease = item.request, item.lease
        num_shared = len(lease.shared_epochs)
        assert num_shared * PAGE_SIZE < request.num_prefill_tokens, "one token at least must be computed"
        assert not num_shared or (request.prefix and not request.reports_prompt)
        for i, (page, epoch) in enumerate(zip(lease.page_ids, lease.shared_epochs, strict=False), start=1):
            where = (lease.decode_worker, page)
            assert self.page_epochs[where] == epoch
            assert self.contents[where] == self.tokens_of(request, i * PAGE_SIZE)
        self.leases[ref] = (lease.decode_worker, list(lease.page_ids[:num_shared]))
        self.num_shared_pages += num_shared

    @staticmethod
    def tokens_of(request: Request, num_tokens: int) -> tuple[object, ...]:
        """Return what the KV of a request's first tokens is computed from."""
        outputs = map(token, range(num_tokens - len(request.prompt_token_ids)))
        return (request.prefix[:1], *request.prompt_token_ids[:num_tokens], *outputs)

    def write(self, worker: str, ref: SequenceRef, start: int, end: int) -> None:
        """A worker writes the KV of these tokens of a sequence into its pages, which nobody else has."""
        request, pages = self.accepted[ref.request_id], self.leases[ref][1]
        written = set(pages[start // PAGE_SIZE : pages_for(end)])
        for other, (name, theirs) in self.leases.items():
            assert other == ref or name != worker or not written & set(theirs), "a shared page is written"
        for i in range(start // PAGE_SIZE, pages_for(end)):
            num_tokens = min((i + 1) * PAGE_SIZE, end)
            self.contents[worker, pages[i]] = self.tokens_of(request, num_tokens)

    def write_prefilled(self, batch: PrefillBatch, failed: Collection[str]) -> None:
        """The pages of a batch arrive, but for those of some requests."""
        for item in batch.items:
            ref = SequenceRef(request_id=item.request.request_id, epoch=item.lease.epoch)
            if ref in self.leases and ref.request_id not in failed:
                start = len(item.lease.shared_epochs) * PAGE_SIZE
                self.write(batch.decode_worker, ref, start, item.request.num_prefill_tokens)

    def take_grant(self, worker: str, grant: PageGrant) -> None:
        assert len(self.leases[grant.ref][1]) == grant.first_page
        self.take_pages(worker, grant.ref, grant.page_ids, grant.epoch)
        request = self.accepted[grant.ref.request_id]
        assert len(self.leases[grant.ref][1]) <= pages_for(request.max_total_tokens)

    def take_pages(self, worker: str, ref: SequenceRef, page_ids: Sequence[int], epoch: int) -> None:
        assert 0 not in page_ids, "the scratch page was leased"
        held = {page for name, pages in self.leases.values() if name == worker for page in pages}
        assert not held & set(page_ids), "a page was leased twice"
        for page in page_ids:
            assert epoch > self.page_epochs.get((worker, page), 0), "the worker would refuse it"
            self.page_epochs[worker, page] = epoch
            self.contents.pop((worker, page), None)
        self.leases.setdefault(ref, (worker, []))[1].extend(page_ids)

    def check_preemption(self, worker: str, ref: SequenceRef) -> None:
        """The oldest sequence of a worker never leaves for want of pages, unless it has all of them."""
        if ref.request_id in self.cancelled | self.restarted or worker in self.draining:
            return
        ages = {
            other: self.ages[other.request_id] for other, (name, _) in self.leases.items() if name == worker
        }
        is_oldest = all(ages[ref] <= age for other, age in ages.items() if other.request_id in self.live())
        assert not is_oldest or len(self.leases[ref][1]) == POOL_PAGES[worker]

    def live(self) -> set[str]:
        return self.accepted.keys() - self.ends.outcomes.keys()

    def waiting(self) -> set[str]:
        """Return what has not ended and has no pages: whatever happened, that waits."""
        return self.live() - {ref.request_id for ref in self.leases}

    def in_limbo(self) -> set[str]:
        """Return what is being prefilled into the pages of a decode worker that died."""
        batches = [batch for of_worker in self.batches.values() for batch in of_worker]
        batches += [batch for _, batch in self.sending]
        refs = {
            SequenceRef(request_id=item.request.request_id, epoch=item.lease.epoch)
            for batch in batches
            for item in batch.items
        }
        return {ref.request_id for ref in refs - self.leases.keys()}

    def make(self, worker: str, event: TokenEvent) -> None:
        """A worker has a token, and sends it to the ApiServer."""
        request_id, index = event.request_id, event.index
        known = self.tokens.get(request_id, 0)
        assert index == known or (index < known and request_id in self.disturbed), (request_id, index, known)
        self.tokens[request_id] = max(known, index + 1)
        self.on_the_way.setdefault(worker, []).append(event)

    def deliver(self, event: TokenEvent) -> None:
        """A message reaches the ApiServer, perhaps before those that were sent before it."""
        if event.error_label is not None:
            self.answered[event.request_id] += 1
            return
        assert event.token_id == token(event.index)
        got = self.got.setdefault(event.request_id, {})
        got[event.index] = got.get(event.index, False) or event.finish_reason is not None
        self.answered[event.request_id] += any(got[i] for i in range(self.num_got(event.request_id)))

    def num_got(self, request_id: str) -> int:
        """Return how many tokens the ApiServer has without a gap."""
        got = self.got.get(request_id, {})
        return next(i for i in count() if i not in got)

    # What happens to it.

    @rule(
        lengths=st.lists(
            st.tuples(st.integers(1, 24), st.integers(1, 36), st.integers(0, 5)), min_size=1, max_size=5
        ),
        twice=st.integers(0, 9),
    )
    def submit(self, lengths: list[tuple[int, int, int]], twice: int) -> None:
        """Prompts begin alike, and some end so. Of the kinds, one has a salt of its own, and one caches nothing."""
        group = []
        for num_prompt, max_tokens, kind in lengths:
            self.num_made += 1
            prompt = ((1,) * 9 + (1 + kind % 2,) * num_prompt)[:num_prompt]
            group.append(
                Request(
                    request_id=f"r{self.num_made}",
                    api_server="api-0",
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(
                        max_tokens=max_tokens,
                        num_logprobs=1 if self.num_made % 3 == 0 else None,
                        prompt_logprobs=self.num_made % 7 == 0,
                    ),
                    prefix=b"" if kind == 4 else prefix_of(prompt, salt=7 if kind == 5 else 0),
                )
            )
        if twice == 0:
            group.append(group[0])
        before = (self.core.num_live, self.core.num_waiting, self.core.num_waiting_tokens)
        rejection = self.core.submit(group, self.now)
        if rejection is None:
            assert twice, "one id was accepted twice"
            self.accepted |= {request.request_id: request for request in group}
            for request in group:
                self.num_ages += 1
                self.ages[request.request_id] = self.num_ages
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
        self.pump()

    @precondition(lambda self: self.num_made > 9)
    @rule(luck=st.integers(0, 3))
    def the_api_server_dies(self, luck: int) -> None:
        """Nobody waits for what it had asked for. What is asked for after that is the next one's."""
        if luck:
            return
        live = self.live()
        self.cancelled |= live
        assert self.core.cancel_all_of("api-0", self.now) == len(live)
        assert self.core.cancel_all_of("api-1", self.now) == 0
        self.pump()

    @rule(seconds=st.sampled_from([0.001, TIMEOUT_S, 1.0]))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds
        self.pump()

    @precondition(lambda self: any(self.batches.values()))
    @rule(
        which=st.integers(0, 1),
        finishing=st.integers(0, 15),
        failing=st.integers(0, 63),
        pending=st.booleans(),
        overtaking=st.integers(0, 5),
    )
    def prefill_comes_back(
        self, which: int, finishing: int, failing: int, pending: bool, overtaking: int = 1
    ) -> None:
        """Bits of `finishing` and, where both high bits are set, of `failing` say which items end here.

        Results of two batches may come by different ways, so that the second overtakes the first.
        """
        worker = self.busy(which)
        batch = self.batches[worker].pop(-1 if overtaking == 0 else 0)
        outcomes: list[PrefillOutcome] = []
        for place, item in enumerate(batch.items):
            request = item.request
            request_id, index = request.request_id, len(request.output_token_ids)
            if failing >= 48 and failing >> place & 1:
                label = "stale_lease" if failing >> 3 & 1 else "worker_failed"
                outcome = PrefillOutcome(request_id=request_id, error_label=label, error_message="no")
            else:
                last = request.sampling.max_tokens == index + 1
                reason: FinishReason | None = "length" if last else "stop" if finishing >> place & 1 else None
                outcome = PrefillOutcome(
                    request_id=request_id,
                    token_id=token(index),
                    finish_reason=reason,
                    num_cached_tokens=len(item.lease.shared_epochs) * PAGE_SIZE if self.sees_cached else 0,
                )
                self.make(
                    worker,
                    TokenEvent(
                        request_id=request_id, index=index, token_id=token(index), finish_reason=reason
                    ),
                )
            outcomes.append(outcome)
        result = PrefillResult(
            batch_id=batch.batch_id,
            worker=worker,
            outcomes=tuple(outcomes),
            num_tokens=1,
            padding_tokens=0,
            replays={},
            seconds=0.01,
            handoff_pending=pending,
        )
        if pending:
            self.sending.append((result, batch))
        else:
            self.write_prefilled(batch, {o.request_id for o in outcomes if o.error_label is not None})
        self.core.prefill_done(result, self.now)
        self.pump(None if pending else batch)

    @precondition(lambda self: self.sending)
    @rule(which=st.integers(0, 3), failing=st.integers(0, 63))
    def a_handoff_is_done(self, which: int, failing: int) -> None:
        result, batch = self.sending.pop(which % len(self.sending))
        failures = tuple(
            HandoffFailure(
                request_id=item.request.request_id,
                error_label="stale_lease" if failing >> 3 & 1 else "handoff_failed",
                error_message="no",
            )
            for place, item in enumerate(batch.items)
            if failing >= 48 and failing >> place & 1
        )
        failed = {outcome.request_id for outcome in result.outcomes if outcome.error_label is not None}
        self.write_prefilled(batch, failed.union(failure.request_id for failure in failures))
        handoff = HandoffResult(
            batch_id=batch.batch_id,
            worker=result.worker,
            transport="gloo",
            failures=failures,
            num_bytes=1,
            seconds=0.0,
        )
        self.core.handoff_done(handoff, self.now)
        self.pump(batch)

    @precondition(lambda self: any(decode.calls for decode in self.decode.values()))
    @rule(which=st.integers(0, 3), index=st.integers(0, 7), refuse=st.integers(0, 9))
    def a_call_reaches_a_decode_worker(self, which: int, index: int, refuse: int) -> None:
        busy = [decode for decode in self.decode.values() if decode.calls]
        busy[which % len(busy)].take_call(index, refuse=refuse == 9)

    @precondition(lambda self: self.decode)
    @rule(which=st.integers(0, 3), stopping=st.integers(0, 40), num_steps=st.integers(1, 6))
    def decode_steps(self, which: int, stopping: int, num_steps: int) -> None:
        """A decode worker makes a few steps; all reports but a few arrive, in any order, before the next one."""
        decode = list(self.decode.values())[which % len(self.decode)]
        for _ in range(num_steps):
            for event in decode.step(stopping):
                self.make(decode.name, event)
                ref = SequenceRef(request_id=event.request_id, epoch=event.epoch)
                newest = len(self.accepted[event.request_id].prompt_token_ids) + event.index - 1
                self.write(decode.name, ref, newest, newest + 1)
            while len(decode.reports) > 3:
                self.take_report(decode, stopping)
            while decode.calls and num_steps > 3:
                decode.take_call(0)

    @precondition(lambda self: any(decode.reports for decode in self.decode.values()))
    @rule(which=st.integers(0, 3), index=st.integers(0, 3))
    def a_report_arrives(self, which: int, index: int) -> None:
        reporting = [decode for decode in self.decode.values() if decode.reports]
        self.take_report(reporting[which % len(reporting)], index)

    def take_report(self, decode: ScriptedDecode, index: int = 0) -> None:
        report = decode.reports.pop(index % len(decode.reports))
        decode.arrived[report.number] = report
        while (following := decode.arrived.pop(decode.next_report, None)) is not None:
            decode.next_report += 1
            for ref in following.released:
                del self.leases[ref]
        self.core.step_done(report, self.now)
        self.pump()

    @precondition(lambda self: self.num_made > 5 and self.batches)
    @rule(which=st.integers(0, 1), luck=st.integers(0, 1), returns=st.booleans())
    def a_prefill_worker_dies(self, which: int, luck: int, returns: bool) -> None:
        if luck:
            return
        worker = list(self.batches)[which % len(self.batches)]
        self.drop_batch(worker, *(batch for result, batch in self.sending if result.worker == worker))
        self.sending = [sent for sent in self.sending if sent[0].worker != worker]
        del self.batches[worker]
        self.it_died(worker, returns)

    @precondition(lambda self: self.num_made > 5 and self.decode)
    @rule(which=st.integers(0, 3), luck=st.integers(0, 1), returns=st.booleans())
    def a_decode_worker_dies(self, which: int, luck: int, returns: bool) -> None:
        if luck:
            return
        worker = list(self.decode)[which % len(self.decode)]
        del self.decode[worker]
        self.disturbed |= {ref.request_id for ref, (name, _) in self.leases.items() if name == worker}
        self.leases = {ref: lease for ref, lease in self.leases.items() if lease[0] != worker}
        self.it_died(worker, returns)

    def it_died(self, worker: str, returns: bool) -> None:
        """What it had told the ApiServer may be lost, whatever the scheduler has heard of it."""
        self.on_the_way.pop(worker, None)
        self.draining.discard(worker)
        self.num_unseen_deaths += 1
        if returns:
            self.away.add(worker)
        self.core.worker_lost(worker, self.now, returns=returns)
        self.pump()

    @precondition(lambda self: self.away)
    @rule(which=st.integers(0, 3), comes=st.booleans())
    def it_comes_back_or_never_will(self, which: int, comes: bool) -> None:
        worker = sorted(self.away)[which % len(self.away)]
        self.away.discard(worker)
        if not comes:
            self.core.worker_gone(worker, self.now)
            self.pump()
        elif worker.startswith("prefill"):
            self.join_prefill(worker)
        else:
            self.join_decode(worker)

    @precondition(lambda self: self.num_made > 9)
    @rule(luck=st.integers(0, 2))
    def the_scheduler_dies(self, luck: int) -> None:
        """Its workers drop what they do for it; what they have told the ApiServer arrives."""
        if luck:
            return
        self.forget_what_nobody_asks_for()
        self.disturbed |= self.accepted.keys()
        self.core = make_core(
            self.ends,
            first_epoch=1 + max(self.page_epochs.values(), default=0),
            max_requests=self.max_requests,
        )
        self.leases.clear()
        self.sending.clear()
        self.draining.clear()
        self.away.clear()
        prefill, decode = list(self.batches) or ["prefill-x"], list(self.decode) or ["decode-0"]
        self.batches.clear()
        self.decode.clear()
        for name in decode:
            self.join_decode(name)
        for name in prefill:
            self.join_prefill(name)
        self.num_unseen_deaths += 1
        self.the_api_server_resumes()

    def forget_what_nobody_asks_for(self) -> None:
        """The next scheduler does not hear of what was cancelled, or whose answer is complete."""
        for request_id in self.live():
            if request_id in self.cancelled or self.answered[request_id]:
                self.ends.outcomes[request_id] = ["forgotten"]

    @precondition(lambda self: self.num_unseen_deaths)
    @rule()
    def the_api_server_resumes(self) -> None:
        """It learns that somebody died, and says what it still serves."""
        self.num_unseen_deaths = 0
        open_ids = [i for i in self.accepted if i not in self.cancelled and not self.answered[i]]
        for request_id in open_ids:
            # What it had may be computed again, from the tokens that the ApiServer has.
            self.disturbed.add(request_id)
            if self.ends.outcomes.pop(request_id, None) is not None or request_id not in self.ages:
                self.num_ages += 1
                self.ages[request_id] = self.num_ages
        samplings = {i: self.accepted[i].sampling for i in open_ids}
        self.restarted |= {i for i, s in samplings.items() if s.num_logprobs is not None or s.prompt_logprobs}
        requests = [
            replace(self.accepted[i], output_token_ids=tuple(map(token, range(self.num_got(i)))))
            for i in open_ids
        ]
        self.core.resume(requests, self.now)
        self.pump()

    @precondition(lambda self: any(self.on_the_way.values()))
    @rule(which=st.integers(0, 5), index=st.integers(0, 3))
    def a_message_reaches_the_api_server(self, which: int, index: int) -> None:
        senders = [sender for sender, messages in self.on_the_way.items() if messages]
        messages = self.on_the_way[senders[which % len(senders)]]
        self.deliver(messages.pop(index % len(messages)))

    @precondition(lambda self: len(self.batches) < 3)
    @rule()
    def a_prefill_worker_joins(self) -> None:
        name = f"prefill-{self.num_joined}"
        self.num_joined += 1
        self.join_prefill(name)

    def join_prefill(self, name: str) -> None:
        self.core.add_prefill_worker(prefill_info(name))
        self.batches[name] = []
        self.pump()

    @precondition(lambda self: len(self.decode) < len(POOL_PAGES))
    @rule(which=st.integers(0, 3))
    def a_decode_worker_joins(self, which: int) -> None:
        names = [name for name in POOL_PAGES if name not in self.decode]
        self.join_decode(names[which % len(names)])

    def join_decode(self, name: str) -> None:
        self.draining.discard(name)
        self.away.discard(name)
        self.core.add_decode_worker(decode_info(name))
        self.decode[name] = ScriptedDecode(name=name)
        self.pump()

    @precondition(lambda self: self.now > 102)
    @rule(which=st.integers(0, 5), luck=st.integers(0, 3))
    def a_worker_is_to_leave(self, which: int, luck: int) -> None:
        if luck:
            return
        names = [*self.batches, *self.decode, "nobody"]
        name = names[which % len(names)]
        self.draining |= {name}
        self.core.drain_worker(name)
        self.pump()

    @precondition(lambda self: self.draining)
    @rule(which=st.integers(0, 3))
    def its_sequences_are_moved(self, which: int) -> None:
        self.core.evict_sequences(sorted(self.draining)[which % len(self.draining)])
        self.pump()

    def busy(self, which: int) -> str:
        workers = [worker for worker, batches in self.batches.items() if batches]
        return workers[which % len(workers)]

    def drop_batch(self, worker: str, *more: PrefillBatch) -> None:
        for batch in (*self.batches[worker], *more):
            for item in batch.items:
                ref = SequenceRef(request_id=item.request.request_id, epoch=item.lease.epoch)
                self.leases.pop(ref, None)
        self.batches[worker] = []

    # What must hold.

    @invariant()
    def counters_equal_the_queue(self) -> None:
        waiting = self.waiting() - self.in_limbo()
        assert self.core.num_waiting == len(waiting)
        assert self.core.num_live == len(self.live())
        if self.disturbed.isdisjoint(waiting):
            num_tokens = sum(len(self.accepted[i].prompt_token_ids) + self.tokens.get(i, 0) for i in waiting)
            assert len(waiting) <= self.core.num_waiting_tokens <= num_tokens, "what is cached does not count"

    @invariant()
    def every_request_ends_once_at_most(self) -> None:
        assert self.ends.outcomes.keys() <= self.accepted.keys()
        assert all(len(outcomes) == 1 for outcomes in self.ends.outcomes.values())

    @invariant()
    def pages_are_leased_or_free(self) -> None:
        assert {ledger.worker for ledger in self.core.ledgers} == self.decode.keys()
        for ledger in self.core.ledgers:
            mine = [pages for worker, pages in self.leases.values() if worker == ledger.worker]
            assert ledger.num_leases == len(mine)
            held = {page for pages in mine for page in pages}
            assert ledger.free_sequences == MAX_NUM_SEQS - len(mine) >= 0
            assert ledger.free_pages == POOL_PAGES[ledger.worker] - len(held)
            assert ledger.cache.num_unused_pages <= ledger.cache.num_pages <= POOL_PAGES[ledger.worker]

    def all_do_their_work(self) -> None:
        if self.away:
            self.it_comes_back_or_never_will(0, True)
        if not self.decode:
            self.a_decode_worker_joins(0)
        self.time_goes_on(1.0)
        if any(self.batches.values()):
            self.prefill_comes_back(0, 0, 0, False)
        if self.sending:
            self.a_handoff_is_done(0, 0)
        for decode in self.decode.values():
            while decode.calls:
                decode.take_call(0)
        for i in range(len(self.decode)):
            self.decode_steps(i, 99, 1)
        while any(decode.reports for decode in self.decode.values()):
            self.a_report_arrives(0, 0)

    def teardown(self) -> None:
        """Let everything run to its end: nothing is left, and everybody got an answer."""
        if not hasattr(self, "core"):
            return
        for _ in range(2000):
            if self.num_unseen_deaths:
                self.the_api_server_resumes()
            while any(self.on_the_way.values()):
                self.a_message_reaches_the_api_server(0, 0)
            if not self.core.num_live and not self.leases:
                break
            self.all_do_their_work()
        self.counters_equal_the_queue()
        self.pages_are_leased_or_free()
        assert self.core.num_live == self.core.num_waiting == 0
        assert not self.leases
        assert self.ends.outcomes.keys() == self.accepted.keys()
        silent = [i for i in self.accepted if i not in self.cancelled and not self.answered[i]]
        assert not silent, f"no answer for {silent}"
        complete = [i for i, (outcome,) in self.ends.outcomes.items() if outcome == "length"]
        # The scripted workers may stop elsewhere when they compute a request again.
        complete = [i for i in complete if i not in self.cancelled | self.disturbed]
        assert all(self.num_got(i) == self.accepted[i].sampling.max_tokens for i in complete)


TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    max_examples=250,
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
    for name in ("decode-0", "decode-1"):
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
    waits = core.queue_state(0.0)
    assert waits.num_requests == 3
    assert core.abort("mine", "key", 0.0) == AbortReply(num_sequences=0, num_foreign=3, queue=waits)
    reply = core.abort("mine", "key-a", 0.0)
    assert (reply.num_sequences, reply.num_foreign, reply.queue.num_requests) == (2, 1, 1)
    (told,) = core.tick(0.0)
    assert isinstance(told, SendEvents)
    assert [event.request_id for event in told.events.events] == ["a0", "a1"]
    assert core.num_live == 1


def test_what_waits_needs_all_its_pages_once_a_worker_has_shown_not_to_see_cached_ones() -> None:
    """When it was looked at before, others held what it shares; now they do not, and its worker computes all."""
    core = make_core(Ends(), max_requests=1)
    for i in range(2):
        core.add_prefill_worker(prefill_info(f"prefill-{i}"))
    core.add_decode_worker(decode_info("decode-0"))
    leases: dict[str, tuple[str, PrefillBatch]] = {}

    def tick() -> None:
        for action in core.tick(1.0):
            if isinstance(action, SendPrefill):
                (item,) = action.batch.items
                leases[item.request.request_id] = (action.worker, action.batch)

    def submit(request_id: str, num_prompt: int, max_tokens: int, *, cached: bool = True) -> None:
        prompt = (1,) * 16 + (2,) * (num_prompt - 16) if cached else (3,) * num_prompt
        request = Request(
            request_id=request_id,
            api_server="api-0",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            prefix=prefix_of(prompt, salt=0) if cached else b"",
        )
        assert core.submit([request], 1.0) is None
        tick()

    def prefilled(request_id: str, reason: FinishReason | None) -> None:
        worker, batch = leases[request_id]
        outcome = PrefillOutcome(request_id=request_id, token_id=1, finish_reason=reason)
        result = PrefillResult(
            batch_id=batch.batch_id,
            worker=worker,
            outcomes=(outcome,),
            num_tokens=1,
            padding_tokens=0,
            replays={},
        )
        core.prefill_done(result, 1.0)
        tick()

    submit("holder", 16, 2)
    prefilled("holder", None)
    submit("blind", 17, 1)  # shares the holder's four pages
    submit("waiting", 28, 20)  # twelve pages, all that there are
    prefilled("blind", "length")
    submit("short", 3, 1, cached=False)
    assert leases.keys() == {"holder", "blind", "short"}
    (item,) = leases["holder"][1].items
    ref = SequenceRef(request_id="holder", epoch=item.lease.epoch)
    last = TokenEvent(request_id="holder", index=1, epoch=ref.epoch, token_id=1, finish_reason="length")
    core.step_done(StepReport(worker="decode-0", seconds=0.0, events=(last,), released=(ref,), number=1), 1.0)
    tick()
    assert "waiting" not in leases, "eleven pages are free"
    prefilled("short", "length")
    assert len(leases["waiting"][1].items[0].lease.page_ids) == 12
