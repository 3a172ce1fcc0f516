"""The scheduler without any I/O: every request's state, the queue, the leases and the workers.

The actor in `scheduler.actor` and the simulator both drive this class. They tell it what happened and when, and
carry out the actions that it returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scheduler.actions import Action, Observer, Outbox, ReleaseWorker, RequeueReason, SendPrefill
from scheduler.admission import Admission, DrainRate
from scheduler.batching.cost_model import seconds_by_tokens
from scheduler.batching.former import BatchFormer, FormedBatch, QueuedRequest
from scheduler.decode_pools import DecodePool, DecodePools, num_start_pages
from scheduler.errors import (
    HandoffError,
    RequestCancelledError,
    StaleLeaseError,
    UnavailableError,
    WorkerFailedError,
)
from scheduler.intake import check_group, check_room
from scheduler.live import LiveRequest, RequestState
from scheduler.messages import (
    AbortReply,
    DecodeStart,
    DecodeWorkerInfo,
    HandoffResult,
    PrefillBatch,
    PrefillItem,
    PrefillOutcome,
    PrefillResult,
    PrefillWorkerInfo,
    QueueState,
    Rejection,
    Request,
    SequenceRef,
    StepReport,
    TokenEvent,
)
from scheduler.pages import PageLedger
from scheduler.prefill_workers import PrefillWorkers

_MAX_LOSSES = 2
"""A request fails that was lost so often, with its worker or on the way to it: it may be the cause."""
_NO_WORKER = "no worker is left that can serve the request"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """How much may wait before new requests are turned away."""

    max_requests: int
    max_tokens: int


class SchedulerCore:
    """Owns every live request from its acceptance to its end, and the pages leased to it.

    Call what happened (`submit`, `cancel`, `prefill_done`, ...), then `tick` for the actions that follow.
    """

    def __init__(
        self, former: BatchFormer, limits: QueueLimits, observer: Observer, *, first_epoch: int = 1
    ) -> None:
        """Leases count from `first_epoch`, which must be above those of any scheduler before this one."""
        self._former = former
        self._admission = Admission(max_requests=limits.max_requests, max_tokens=limits.max_tokens)
        self._drain = DrainRate()
        self._observer = observer
        self._entries: dict[str, LiveRequest] = {}
        self._prefill = PrefillWorkers()
        self._pools = DecodePools(first_epoch)
        self._num_accepted = 0
        self._num_batches = 0
        self._outbox = Outbox()

    # What others may look at.

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._former)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the requests in the queue."""
        return self._former.num_tokens

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._entries)

    @property
    def ledgers(self) -> Iterable[PageLedger]:
        """The page ledger of each decode worker."""
        return (pool.ledger for pool in self._pools)

    def wake_at(self) -> float | None:
        """Return when `tick` must be called if nothing happens before, or None."""
        return self._former.wake_at() if self._prefill.num_idle else None

    # What happens.

    def add_prefill_worker(self, info: PrefillWorkerInfo) -> None:
        """A prefill worker is ready."""
        self._prefill.add(info.name)
        if info.bucket_seconds:
            self._former.measured(seconds_by_tokens(info.bucket_seconds))

    def add_decode_worker(self, info: DecodeWorkerInfo) -> None:
        """A decode worker is ready, with an empty pool. Raises `ConfigError` if its pages have another size."""
        self._pools.add(info)

    def drain_worker(self, name: str) -> None:
        """Give a worker nothing new. Once nothing is left at it, a `ReleaseWorker` follows."""
        if name in self._prefill:
            self._prefill.drain(name)
        elif (pool := self._pools.get(name)) is not None:
            pool.is_draining = True
            self._pools.changed(pool)

    def evict_sequences(self, name: str) -> None:
        """Move the sequences of a decode worker that drains: their requests wait again, with their tokens."""
        pool = self._pools.get(name)
        for ref in pool.staying if pool is not None else ():
            self._move_out(ref, "drained")

    def submit(self, group: Sequence[Request], now: float) -> Rejection | None:
        """Accept all requests of a group, or none and say why."""
        rejection = self._refusal(group, now)
        if rejection is not None:
            self._observer.rejected(rejection.label)
            return rejection
        for request in group:
            self._num_accepted += 1
            entry = LiveRequest(
                request=request,
                arrival_time=now,
                age=self._num_accepted,
                output_token_ids=list(request.output_token_ids),
            )
            self._entries[request.request_id] = entry
            self._enqueue(entry, now)
        return None

    def cancel(self, request_id: str, now: float) -> None:
        """End a request on its client's wish. One that is being prefilled is dropped when its batch is back."""
        entry = self._entries.get(request_id)
        if entry is None or entry.cancelled:
            return
        if entry.state is RequestState.WAITING:
            self._unqueue(request_id, now)
            self._end(entry, "cancelled", now)
        elif entry.state is RequestState.PREFILLING:
            entry.cancelled = True
            self._leave(entry)
        else:
            if entry.requeue_reason is None:  # else it was cancelled there already
                self._cancel_decode(entry)
            self._end(entry, "cancelled", now)

    def abort(self, completion_id: str, key_digest: str, now: float) -> AbortReply:
        """End all sequences of a completion that were asked for with an API key, and tell their ApiServer."""
        entries = [e for e in self._entries.values() if e.request.completion_id == completion_id]
        own = [e for e in entries if e.request.tenant.startswith(f"{key_digest}/")]
        for entry in own:
            self._tell(entry, RequestCancelledError.label, "the request was cancelled")
            self.cancel(entry.request.request_id, now)
        return AbortReply(num_sequences=len(own), num_foreign=len(entries) - len(own))

    def queue_state(self, now: float) -> QueueState:
        """Return what waits, and how fast the queue drains."""
        return self._drain.state(self.num_waiting, self.num_waiting_tokens, now)

    def prefill_done(self, result: PrefillResult, now: float) -> None:
        """A prefill worker finished its batch and is idle again."""
        self._observer.prefilled(result)
        batch = self._prefill.take_batch(result.worker, now, result.seconds)
        self._former.observe(_num_tokens(batch), result.seconds)
        for outcome in result.outcomes:
            entry = self._entries[outcome.request_id]
            if outcome.token_id is not None:
                if not entry.output_token_ids:
                    self._observer.first_token(now - entry.arrival_time)
                entry.output_token_ids.append(outcome.token_id)
        if result.handoff_pending:
            self._prefill.is_sending(batch, result)
            return
        if result.handoff is not None:
            self._observer.handed_off(result.handoff)
        for item, outcome in zip(batch.items, result.outcomes, strict=True):
            self._prefilled(item, outcome, now)

    def handoff_done(self, handoff: HandoffResult, now: float) -> None:
        """A prefill worker that had computed a batch knows what became of its pages."""
        self._observer.handed_off(handoff)
        batch, result = self._prefill.take_sent(handoff.worker, handoff.batch_id)
        failures = {failure.request_id: failure for failure in handoff.failures}
        for item, outcome in zip(batch.items, result.outcomes, strict=True):
            failure = failures.get(outcome.request_id)
            if failure is not None:
                outcome = replace(
                    outcome, error_label=failure.error_label, error_message=failure.error_message
                )
            self._prefilled(item, outcome, now)

    def prefill_failed(self, worker: str, message: str, now: float) -> None:
        """A prefill worker could not compute its batch, but lives."""
        for item in self._prefill.take_batch(worker, now).items:
            entry = self._entries[item.request.request_id]
            self._release(entry)
            self._fail(entry, WorkerFailedError.label, message, now)

    def step_done(self, report: StepReport, now: float) -> None:
        """A decode worker made a step."""
        self._observer.stepped(report)
        pool = self._pools.get(report.worker)
        for event in report.events:
            ref = SequenceRef(request_id=event.request_id, epoch=event.epoch)
            entry = self._entries.get(event.request_id)
            if entry is None:
                continue  # Cancelled in the meantime.
            if pool is None or ref not in pool or not entry.holds(ref):
                self._observer.refused("event")
            else:
                self._advance(entry, pool, event, now)
        if pool is not None:
            for ref in report.released:
                self._released(pool, ref, now)
            self._pools.changed(pool)

    def worker_lost(self, name: str, now: float) -> None:
        """A worker died. The requests that it held wait again, with the tokens that they have."""
        if name in self._prefill:
            batch, sending = self._prefill.remove_lost(name)
            for item in batch.items if batch is not None else ():
                self._give_up(item, name, now)
            for computed in sending:
                for item, outcome in zip(computed.batch.items, computed.result.outcomes, strict=True):
                    if outcome.finish_reason is not None:
                        self._prefilled(item, outcome, now)
                    else:
                        self._give_up(item, name, now)
        elif name in self._pools:
            self._pools.remove(name)
            for entry in [e for e in self._entries.values() if e.lease and e.lease.decode_worker == name]:
                # A batch in prefill still comes back, and its requests wait again then.
                if entry.state is RequestState.DECODING:
                    self._lost(entry, name, now)
        self._fail_what_fits_nowhere(now)

    def tick(self, now: float) -> list[Action]:
        """Give pages where they are needed, form the batches that are due; return all actions since the last call."""
        for worker, balance in self._pools.balance():
            if balance.grants:
                self._outbox.grows[worker] += balance.grants
            for ref in balance.preempted:
                self._move_out(ref, "preempted")
        self._let_leave(now)
        while self._prefill.num_idle and (pool := self._pools.choose()) is not None:
            formed = self._former.form(
                now,
                free_pages=pool.free_pages,
                free_sequences=pool.free_sequences,
                workers=self._prefill.view(now),
            )
            if formed is None:
                break
            self._dispatch(pool, formed, now)
        return self._outbox.take()

    # How it is done.

    def _refusal(self, group: Sequence[Request], now: float) -> Rejection | None:
        """Return why a group cannot be accepted, or None."""
        rejection = check_group(group, self._max_total_tokens(), self._entries)
        if rejection is None:
            self._admission.update(self.queue_state(now), now)
            rejection = check_room(group, self._admission, now)
        return rejection

    def _max_total_tokens(self) -> int:
        """Return how many tokens a sequence may have to fit the largest pool; 0 if no worker is there for it."""
        return self._pools.max_total_tokens if self._prefill.num_open else 0

    def _enqueue(self, entry: LiveRequest, now: float, *, front: bool = False) -> None:
        request = entry.request
        self._former.add(
            QueuedRequest(
                request_id=request.request_id,
                num_tokens=request.num_prefill_tokens,
                num_pages=num_start_pages(request, self._pools.page_size),
                arrival_time=entry.arrival_time,
                priority=request.priority,
                deadline=None if request.ttft_slo_s is None else entry.arrival_time + request.ttft_slo_s,
                tenant=request.tenant,
            ),
            front=front,
        )
        self._drain.arrived(now)

    def _unqueue(self, request_id: str, now: float) -> None:
        """Take a request out of the queue that will not be prefilled."""
        self._former.remove(request_id)
        if not self._former:
            self._drain.left(0, 0, now, is_empty=True)

    def _dispatch(self, pool: DecodePool, formed: FormedBatch, now: float) -> None:
        self._drain.left(len(formed.requests), formed.num_tokens, now, is_empty=not self._former)
        items: list[PrefillItem] = []
        for queued in formed.requests:
            entry = self._entries[queued.request_id]
            entry.state = RequestState.PREFILLING
            entry.lease = pool.lease(entry.request, queued.num_pages, entry.age)
            items.append(PrefillItem(request=entry.request, lease=entry.lease))
        self._pools.changed(pool)
        self._num_batches += 1
        batch = PrefillBatch(batch_id=self._num_batches, decode_worker=pool.name, items=tuple(items))
        worker = self._prefill.dispatch(batch, self._former.expected_seconds(formed.num_tokens), now)
        self._outbox.prefills.append(SendPrefill(worker=worker, batch=batch))
        self._observer.batch_formed(batch.batch_id, worker, formed, now)

    def _prefilled(self, item: PrefillItem, outcome: PrefillOutcome, now: float) -> None:
        """Go on with one request whose prefill is back: decode, wait again, or end."""
        entry = self._entries[outcome.request_id]
        if outcome.error_label is not None and not entry.cancelled and outcome.finish_reason is None:
            self._not_prefilled(entry, outcome.error_label, outcome.error_message or "", now)
            return
        pool = self._pools.holding(item.lease, entry.ref)
        if entry.cancelled or outcome.finish_reason is not None:
            self._release(entry)
            self._end(entry, outcome.finish_reason or "cancelled", now)
        elif pool is None:
            self._lost(entry, item.lease.decode_worker, now)
        elif entry.requeue_reason is not None:
            self._release(entry)
            self._requeue(entry, entry.requeue_reason, now)
        else:
            entry.state = RequestState.DECODING
            pool.advance(entry.ref, entry.num_tokens)
            self._pools.changed(pool)
            first_token_id = entry.output_token_ids[-1]
            self._outbox.starts[pool.name].append(
                DecodeStart(request=entry.request, lease=item.lease, first_token_id=first_token_id)
            )

    def _not_prefilled(self, entry: LiveRequest, label: str, message: str, now: float) -> None:
        """Compute a request again whose pages do not hold what they should; fail it if it cannot be computed."""
        self._release(entry)
        if label == StaleLeaseError.label:
            self._observer.refused("write")
            self._requeue(entry, "stale_lease", now)
        elif label == HandoffError.label:
            self._retry(entry, "handoff_failed", message, now)
        else:
            self._fail(entry, label, message, now)

    def _give_up(self, item: PrefillItem, worker: str, now: float) -> None:
        """Go on with a request whose prefill worker died."""
        entry = self._entries[item.request.request_id]
        self._release(entry)
        self._lost(entry, worker, now)

    def _advance(self, entry: LiveRequest, pool: DecodePool, event: TokenEvent, now: float) -> None:
        """Take in what a decode worker says of a sequence that has its lease."""
        if event.token_id is not None:
            # What one worker reports comes in the order in which it happened.
            assert event.index == len(entry.output_token_ids), (event, len(entry.output_token_ids))
            entry.output_token_ids.append(event.token_id)
            pool.advance(entry.ref, entry.num_tokens)
        outcome = event.error_label or event.finish_reason
        if outcome is not None:
            self._end(entry, outcome, now)

    def _released(self, pool: DecodePool, ref: SequenceRef, now: float) -> None:
        """A decode worker touches a sequence's pages no more. If it has not ended, it waits again."""
        if not pool.release(ref):
            return
        entry = self._entries.get(ref.request_id)
        if entry is not None and entry.holds(ref):
            if entry.requeue_reason is None:
                self._observer.refused("read")
            self._requeue(entry, entry.requeue_reason or "stale_lease", now)

    def _move_out(self, ref: SequenceRef, reason: RequeueReason) -> None:
        """Have a request leave its pages and wait again. All its tokens are known once its pages are back."""
        entry = self._entries[ref.request_id]
        entry.requeue_reason = reason
        self._leave(entry)
        if entry.state is RequestState.DECODING:
            self._cancel_decode(entry)

    def _cancel_decode(self, entry: LiveRequest) -> None:
        assert entry.lease is not None
        self._outbox.cancels[entry.lease.decode_worker].append(entry.ref)

    def _leave(self, entry: LiveRequest) -> None:
        """Let others count on the pages of a request that is about to give them back."""
        if entry.lease is not None and (pool := self._pools.holding(entry.lease, entry.ref)) is not None:
            pool.leave(entry.ref)
            self._pools.changed(pool)

    def _release(self, entry: LiveRequest) -> None:
        """Free the pages of a request that no worker touches any more."""
        assert entry.lease is not None
        pool = self._pools.holding(entry.lease, entry.ref)
        if pool is not None:
            pool.release(entry.ref)
            self._pools.changed(pool)

    def _requeue(self, entry: LiveRequest, reason: RequeueReason, now: float) -> None:
        """Put a request before all that have not begun yet, with the tokens that it has."""
        self._observer.requeued(reason)
        entry.wait_again()
        if entry.request.max_total_tokens > self._max_total_tokens():
            self._fail(entry, UnavailableError.label, _NO_WORKER, now)
        else:
            self._enqueue(entry, now, front=True)

    def _lost(self, entry: LiveRequest, worker: str, now: float) -> None:
        """Go on with a request whose worker died."""
        if entry.cancelled:
            self._end(entry, "cancelled", now)
        else:
            self._retry(entry, "worker_lost", f"{worker} died", now)

    def _retry(self, entry: LiveRequest, reason: RequeueReason, message: str, now: float) -> None:
        """Compute a request again that was lost on the way, unless it may itself be the cause."""
        entry.num_losses += 1
        if entry.num_losses >= _MAX_LOSSES:
            again = f"{message}; so ended {entry.num_losses} attempts to compute the request"
            self._fail(entry, WorkerFailedError.label, again, now)
        else:
            self._requeue(entry, reason, now)

    def _let_leave(self, now: float) -> None:
        """Forget the workers that were to leave and have nothing left."""
        names = self._prefill.remove_drained() + self._pools.remove_drained()
        self._outbox.leavers += [ReleaseWorker(worker=name) for name in names]
        if names:
            self._fail_what_fits_nowhere(now)

    def _fail_what_fits_nowhere(self, now: float) -> None:
        """Fail the requests that wait for workers that are gone."""
        most = self._max_total_tokens()
        for entry in [e for e in self._entries.values() if e.state is RequestState.WAITING]:
            if entry.request.max_total_tokens > most:
                self._unqueue(entry.request.request_id, now)
                self._fail(entry, UnavailableError.label, _NO_WORKER, now)

    def _fail(self, entry: LiveRequest, label: str, message: str, now: float) -> None:
        """End a request with an error, and tell its ApiServer."""
        self._tell(entry, label, message)
        self._end(entry, label, now)

    def _tell(self, entry: LiveRequest, label: str, message: str) -> None:
        """Send an error to a request's ApiServer."""
        self._outbox.events[entry.request.api_server].append(
            TokenEvent(
                request_id=entry.request.request_id,
                index=len(entry.output_token_ids),
                error_label=label,
                error_message=message,
            )
        )

    def _end(self, entry: LiveRequest, outcome: str, now: float) -> None:
        del self._entries[entry.request.request_id]
        self._leave(entry)
        self._observer.ended(entry.request, outcome, len(entry.output_token_ids), now - entry.arrival_time)


def _num_tokens(batch: PrefillBatch) -> int:
    return sum(item.request.num_prefill_tokens for item in batch.items)
