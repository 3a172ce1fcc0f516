"""The scheduler without any I/O: every request's state, the queue, the leases and the workers.

The actor in `scheduler.actor` and the simulator both drive this class. They tell it what happened and when, and
carry out the actions that it returns.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.actions import Action, Observer, Outbox, SendPrefill
from scheduler.admission import Admission, DrainRate
from scheduler.batching.cost_model import seconds_by_tokens
from scheduler.batching.former import BatchFormer, FormedBatch, QueuedRequest
from scheduler.errors import (
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
    WorkerFailedError,
)
from scheduler.messages import (
    AbortReply,
    DecodeStart,
    DecodeWorkerInfo,
    Lease,
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
from scheduler.pages import PageLedger, epochs
from scheduler.placement import DecodePlacement, PrefillPlacement


class RequestState(enum.Enum):
    """Where a live request is. One that has ended is in the scheduler no more."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A live request."""

    request: Request
    arrival_time: float
    state: RequestState = RequestState.WAITING
    lease: Lease | None = None
    num_outputs: int = 0
    cancelled: bool = False


@dataclass(slots=True, kw_only=True)
class _PrefillWorker:
    info: PrefillWorkerInfo
    batch: PrefillBatch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """How much may wait before new requests are turned away."""

    max_requests: int
    max_tokens: int


class SchedulerCore:
    """Owns every live request from its acceptance to its end, and the pages leased to it.

    Call what happened (`submit`, `cancel`, `prefill_done`, ...), then `tick` for the actions that follow.
    """

    def __init__(self, former: BatchFormer, limits: QueueLimits, observer: Observer) -> None:
        self._former = former
        self._admission = Admission(max_requests=limits.max_requests, max_tokens=limits.max_tokens)
        self._drain = DrainRate()
        self._placement = PrefillPlacement()
        self._decode_placement = DecodePlacement()
        self._observer = observer
        self._entries: dict[str, _Entry] = {}
        self._prefill: dict[str, _PrefillWorker] = {}
        self._ledgers: dict[str, PageLedger] = {}
        self._epochs = epochs()
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
        return self._ledgers.values()

    def wake_at(self) -> float | None:
        """Return when `tick` must be called if nothing happens before, or None."""
        return self._former.wake_at() if self._placement.num_idle else None

    # What happens.

    def add_prefill_worker(self, info: PrefillWorkerInfo) -> None:
        """A prefill worker is ready."""
        self._prefill[info.name] = _PrefillWorker(info=info)
        self._placement.add(info.name)
        if info.bucket_seconds:
            self._former.measured(seconds_by_tokens(info.bucket_seconds))

    def add_decode_worker(self, info: DecodeWorkerInfo) -> None:
        """A decode worker is ready, with an empty pool."""
        self._ledgers[info.name] = PageLedger(info, self._epochs)
        self._pool_changed(info.name)

    def submit(self, group: Sequence[Request], now: float) -> Rejection | None:
        """Accept all requests of a group, or none and say why."""
        rejection = self._refusal(group, now)
        if rejection is not None:
            self._observer.rejected(rejection.label)
            return rejection
        for request in group:
            self._entries[request.request_id] = _Entry(
                request=request, arrival_time=now, num_outputs=len(request.output_token_ids)
            )
            self._enqueue(request, now)
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
        else:
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
        batch = self._take_batch(result.worker, now, result.seconds)
        self._former.observe(_num_tokens(batch), result.seconds)
        for item, outcome in zip(batch.items, result.outcomes, strict=True):
            self._prefilled(item, outcome, now)

    def prefill_failed(self, worker: str, message: str, now: float) -> None:
        """A prefill worker could not compute its batch, but lives."""
        for item in self._take_batch(worker, now).items:
            entry = self._entries[item.request.request_id]
            self._release(entry)
            self._fail(entry, WorkerFailedError.label, message, now)

    def step_done(self, report: StepReport, now: float) -> None:
        """A decode worker made a step."""
        self._observer.stepped(report)
        for event in report.events:
            entry = self._entries.get(event.request_id)
            if entry is None:
                continue  # Cancelled in the meantime.
            entry.num_outputs = max(entry.num_outputs, event.index + (event.token_id is not None))
            outcome = event.error_label or event.finish_reason
            if outcome is not None:
                self._end(entry, outcome, now)
        if report.worker in self._ledgers:
            for ref in report.released:
                self._ledgers[report.worker].release(ref)
            self._pool_changed(report.worker)

    def worker_lost(self, name: str, now: float) -> None:
        """A worker died. What it held fails."""
        message = f"{name} died"
        if name in self._prefill:
            if self._prefill[name].batch is not None:
                self.prefill_failed(name, message, now)
            del self._prefill[name]
            self._placement.remove(name)
        elif self._ledgers.pop(name, None) is not None:
            self._decode_placement.remove(name)
            for entry in [e for e in self._entries.values() if e.lease and e.lease.decode_worker == name]:
                # A batch in prefill still comes back, and is dropped then.
                if entry.state is RequestState.DECODING:
                    self._fail(entry, WorkerFailedError.label, message, now)
        most = self._max_total_tokens() if self._prefill else 0
        for entry in [e for e in self._entries.values() if e.state is RequestState.WAITING]:
            if entry.request.max_total_tokens > most:
                self._unqueue(entry.request.request_id, now)
                self._fail(entry, UnavailableError.label, "no worker is left that can serve the request", now)

    def tick(self, now: float) -> list[Action]:
        """Form the batches that are due for idle workers; return all actions since the last call."""
        while self._placement.num_idle and (decode_worker := self._decode_placement.choose()) is not None:
            ledger = self._ledgers[decode_worker]
            formed = self._former.form(
                now,
                free_pages=ledger.free_pages,
                free_sequences=ledger.free_sequences,
                workers=self._placement.workers(now),
            )
            if formed is None:
                break
            self._dispatch(ledger, formed, now)
        return self._outbox.take()

    # How it is done.

    def _refusal(self, group: Sequence[Request], now: float) -> Rejection | None:
        """Return why a group cannot be accepted, or None."""
        first = group[0].request_id
        if not self._prefill or not self._ledgers:
            return Rejection(request_id=first, label=UnavailableError.label, message="no worker is ready")
        most, ids = self._max_total_tokens(), set[str]()
        for request in group:
            if request.max_total_tokens > most:
                return Rejection(
                    request_id=request.request_id,
                    label=InvalidRequestError.label,
                    param="max_tokens",
                    message=f"prompt and max_tokens must be <= {most} tokens together, the size of the KV pool, "
                    f"got {request.max_total_tokens}",
                )
            if request.request_id in self._entries or request.request_id in ids:
                return Rejection(
                    request_id=request.request_id,
                    label=InvalidRequestError.label,
                    param="request_id",
                    message=f"request_id {request.request_id} is in use",
                )
            ids.add(request.request_id)
        num_tokens = sum(request.num_prefill_tokens for request in group)
        self._admission.update(self.queue_state(now), now)
        try:
            # They are in the queue, which counts them, as soon as this returns.
            self._admission.admit(len(group), num_tokens, now).close()
        except OverloadedError as error:
            retry_after_s = error.retry_after_s
            return Rejection(
                request_id=first, label=error.label, message=error.message, retry_after_s=retry_after_s
            )
        except InvalidRequestError as error:
            return Rejection(request_id=first, label=error.label, message=error.message)
        return None

    def _max_total_tokens(self) -> int:
        """Return how many tokens a sequence may have to fit the largest pool."""
        return max((ledger.num_pages * ledger.page_size for ledger in self._ledgers.values()), default=0)

    def _enqueue(self, request: Request, now: float) -> None:
        page_size = max(ledger.page_size for ledger in self._ledgers.values())
        self._former.add(
            QueuedRequest(
                request_id=request.request_id,
                num_tokens=request.num_prefill_tokens,
                num_pages=-(-request.max_total_tokens // page_size),
                arrival_time=now,
                priority=request.priority,
                deadline=None if request.ttft_slo_s is None else now + request.ttft_slo_s,
                tenant=request.tenant,
            )
        )
        self._drain.arrived(now)

    def _unqueue(self, request_id: str, now: float) -> None:
        """Take a request out of the queue that will not be prefilled."""
        self._former.remove(request_id)
        if not self._former:
            self._drain.left(0, 0, now, is_empty=True)

    def _pool_changed(self, decode_worker: str) -> None:
        ledger = self._ledgers[decode_worker]
        self._decode_placement.update(
            decode_worker, free_pages=ledger.free_pages, free_sequences=ledger.free_sequences
        )

    def _dispatch(self, ledger: PageLedger, formed: FormedBatch, now: float) -> None:
        expected_s = self._former.expected_seconds(formed.num_tokens)
        worker = self._placement.choose(expected_s, now)
        assert worker is not None, "no prefill worker is idle"
        self._placement.dispatched(worker, expected_s, now)
        self._drain.left(len(formed.requests), formed.num_tokens, now, is_empty=not self._former)
        items: list[PrefillItem] = []
        for queued in formed.requests:
            entry = self._entries[queued.request_id]
            entry.state = RequestState.PREFILLING
            entry.lease = ledger.lease(queued.request_id, queued.num_pages)
            items.append(PrefillItem(request=entry.request, lease=entry.lease))
        self._pool_changed(ledger.worker)
        self._num_batches += 1
        batch = PrefillBatch(batch_id=self._num_batches, decode_worker=ledger.worker, items=tuple(items))
        self._prefill[worker].batch = batch
        self._outbox.prefills.append(SendPrefill(worker=worker, batch=batch))
        self._observer.batch_formed(batch.batch_id, worker, formed, now)

    def _take_batch(self, worker: str, now: float, seconds: float = 0.0) -> PrefillBatch:
        batch = self._prefill[worker].batch
        assert batch is not None, f"{worker} has no batch"
        self._prefill[worker].batch = None
        self._placement.finished(worker, self._former.expected_seconds(_num_tokens(batch)), seconds, now)
        return batch

    def _prefilled(self, item: PrefillItem, outcome: PrefillOutcome, now: float) -> None:
        """Go on with one request whose prefill is back: decode, or end."""
        entry = self._entries[outcome.request_id]
        if outcome.token_id is None:
            self._release(entry)
            self._fail(entry, outcome.error_label or "internal", outcome.error_message or "", now)
            return
        entry.num_outputs += 1
        self._observer.first_token(now - entry.arrival_time)
        if entry.cancelled or outcome.finish_reason is not None:
            self._release(entry)
            self._end(entry, outcome.finish_reason or "cancelled", now)
        elif item.lease.decode_worker not in self._ledgers:
            self._fail(entry, WorkerFailedError.label, f"{item.lease.decode_worker} died", now)
        else:
            entry.state = RequestState.DECODING
            self._outbox.starts[item.lease.decode_worker].append(
                DecodeStart(request=entry.request, lease=item.lease, first_token_id=outcome.token_id)
            )

    def _cancel_decode(self, entry: _Entry) -> None:
        assert entry.lease is not None
        ref = SequenceRef(request_id=entry.request.request_id, epoch=entry.lease.epoch)
        self._outbox.cancels[entry.lease.decode_worker].append(ref)

    def _release(self, entry: _Entry) -> None:
        """Free the pages of a request that no worker touches any more."""
        assert entry.lease is not None
        ledger = self._ledgers.get(entry.lease.decode_worker)
        if ledger is not None:
            ledger.release(SequenceRef(request_id=entry.request.request_id, epoch=entry.lease.epoch))
            self._pool_changed(ledger.worker)

    def _fail(self, entry: _Entry, label: str, message: str, now: float) -> None:
        """End a request with an error, and tell its ApiServer."""
        self._tell(entry, label, message)
        self._end(entry, label, now)

    def _tell(self, entry: _Entry, label: str, message: str) -> None:
        """Send an error to a request's ApiServer."""
        self._outbox.events[entry.request.api_server].append(
            TokenEvent(
                request_id=entry.request.request_id,
                index=entry.num_outputs,
                error_label=label,
                error_message=message,
            )
        )

    def _end(self, entry: _Entry, outcome: str, now: float) -> None:
        del self._entries[entry.request.request_id]
        self._observer.ended(entry.request, outcome, entry.num_outputs, now - entry.arrival_time)


def _num_tokens(batch: PrefillBatch) -> int:
    return sum(item.request.num_prefill_tokens for item in batch.items)
