"""Every request that has not ended, and each way in which one goes on, goes back, or ends. Pure."""

from __future__ import annotations

from scheduler.actions import Observer, Outbox, RequeueReason
from scheduler.admission import DrainRate
from scheduler.batching.former import BatchFormer, QueuedRequest
from scheduler.decode_pools import DecodePool, DecodePools, num_start_pages
from scheduler.errors import HandoffError, StaleLeaseError, UnavailableError, WorkerFailedError
from scheduler.live import LiveRequest, RequestState
from scheduler.messages import DecodeStart, PrefillItem, PrefillOutcome, SequenceRef, TokenEvent
from scheduler.prefill_workers import PrefillWorkers

_MAX_LOSSES = 2
"""A request fails that was lost so often, with its worker or on the way to it: it may be the cause."""
_NO_WORKER = "no worker is left that can serve the request"


class RequestBook:
    """Owns the live requests. Whatever it does to one, queue, pages and messages stay in step with it."""

    def __init__(
        self,
        former: BatchFormer,
        drain: DrainRate,
        prefill: PrefillWorkers,
        pools: DecodePools,
        *,
        observer: Observer,
        outbox: Outbox,
    ) -> None:
        self.entries: dict[str, LiveRequest] = {}
        """By request id."""
        self._former = former
        self._drain = drain
        self._prefill = prefill
        self._pools = pools
        self._observer = observer
        self._outbox = outbox

    def max_total_tokens(self) -> int:
        """Return how many tokens a sequence may have to fit the largest pool; 0 if no worker is there for it."""
        return self._pools.max_total_tokens if self._prefill.num_open else 0

    def enqueue(self, entry: LiveRequest, now: float, *, front: bool = False) -> None:
        """Put a request into the queue, before or behind those that have not begun yet."""
        request, entry.queued_at = entry.request, now
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

    def unqueue(self, request_id: str, now: float) -> None:
        """Take a request out of the queue that will not be prefilled."""
        self._former.remove(request_id)
        if not self._former:
            self._drain.left(0, 0, now, is_empty=True)

    def prefilled(
        self, item: PrefillItem, outcome: PrefillOutcome, now: float, *, handoff_s: float = 0.0
    ) -> None:
        """Go on with one request whose prefill is back: decode, wait again, or end."""
        entry = self.entries[outcome.request_id]
        if outcome.error_label is not None and not entry.cancelled and outcome.finish_reason is None:
            self._not_prefilled(entry, outcome.error_label, outcome.error_message or "", now)
            return
        pool = self._pools.holding(item.lease, entry.ref)
        if entry.cancelled or outcome.finish_reason is not None:
            self.release(entry)
            self.end(entry, outcome.finish_reason or "cancelled", now)
        elif pool is None:
            self.lost(entry, item.lease.decode_worker, now)
        elif entry.requeue_reason is not None:
            self.release(entry)
            self.requeue(entry, entry.requeue_reason, now)
        else:
            entry.state = RequestState.DECODING
            pool.advance(entry.ref, entry.num_tokens)
            self._pools.changed(pool)
            first_token_id = entry.output_token_ids[-1]
            self._outbox.starts[pool.name].append(
                DecodeStart(
                    request=entry.request,
                    lease=item.lease,
                    first_token_id=first_token_id,
                    handoff_s=handoff_s,
                )
            )

    def _not_prefilled(self, entry: LiveRequest, label: str, message: str, now: float) -> None:
        """Compute a request again whose pages do not hold what they should; fail it if it cannot be computed."""
        self.release(entry)
        if label == StaleLeaseError.label:
            self._observer.refused("write")
            self.requeue(entry, "stale_lease", now)
        elif label == HandoffError.label:
            self._retry(entry, "handoff_failed", message, now)
        else:
            self.fail(entry, label, message, now)

    def give_up(self, item: PrefillItem, worker: str, now: float) -> None:
        """Go on with a request whose prefill worker died."""
        entry = self.entries[item.request.request_id]
        self.release(entry)
        self.lost(entry, worker, now)

    def advance(self, entry: LiveRequest, pool: DecodePool, event: TokenEvent, now: float) -> None:
        """Take in what a decode worker says of a sequence that has its lease."""
        if event.token_id is not None:
            # What one worker reports comes in the order in which it happened.
            assert event.index == len(entry.output_token_ids), (event, len(entry.output_token_ids))
            entry.output_token_ids.append(event.token_id)
            pool.advance(entry.ref, entry.num_tokens)
        outcome = event.error_label or event.finish_reason
        if outcome is not None:
            self.end(entry, outcome, now)

    def released(self, pool: DecodePool, ref: SequenceRef, now: float) -> None:
        """A decode worker touches a sequence's pages no more. If it has not ended, it waits again."""
        if not pool.release(ref):
            return
        entry = self.entries.get(ref.request_id)
        if entry is not None and entry.holds(ref):
            if entry.requeue_reason is None:
                self._observer.refused("read")
            self.requeue(entry, entry.requeue_reason or "stale_lease", now)

    def move_out(self, ref: SequenceRef, reason: RequeueReason) -> None:
        """Have a request leave its pages and wait again. All its tokens are known once its pages are back."""
        entry = self.entries[ref.request_id]
        entry.requeue_reason = reason
        self.leave(entry)
        if entry.state is RequestState.DECODING:
            self.cancel_decode(entry)

    def cancel_decode(self, entry: LiveRequest) -> None:
        """Let a request's decode worker drop it."""
        assert entry.lease is not None
        self._outbox.cancels[entry.lease.decode_worker].append(entry.ref)

    def leave(self, entry: LiveRequest) -> None:
        """Let others count on the pages of a request that is about to give them back."""
        if entry.lease is not None and (pool := self._pools.holding(entry.lease, entry.ref)) is not None:
            pool.leave(entry.ref)
            self._pools.changed(pool)

    def release(self, entry: LiveRequest) -> None:
        """Free the pages of a request that no worker touches any more."""
        assert entry.lease is not None
        pool = self._pools.holding(entry.lease, entry.ref)
        if pool is not None:
            pool.release(entry.ref)
            self._pools.changed(pool)

    def requeue(self, entry: LiveRequest, reason: RequeueReason, now: float) -> None:
        """Put a request before all that have not begun yet, with the tokens that it has."""
        self._observer.requeued(reason)
        entry.wait_again()
        if entry.request.max_total_tokens > self.max_total_tokens():
            self.fail(entry, UnavailableError.label, _NO_WORKER, now)
        else:
            self.enqueue(entry, now, front=True)

    def lost(self, entry: LiveRequest, worker: str, now: float) -> None:
        """Go on with a request whose worker died."""
        if entry.cancelled:
            self.end(entry, "cancelled", now)
        else:
            self._retry(entry, "worker_lost", f"{worker} died", now)

    def _retry(self, entry: LiveRequest, reason: RequeueReason, message: str, now: float) -> None:
        """Compute a request again that was lost on the way, unless it may itself be the cause."""
        entry.num_losses += 1
        if entry.num_losses >= _MAX_LOSSES:
            again = f"{message}; so ended {entry.num_losses} attempts to compute the request"
            self.fail(entry, WorkerFailedError.label, again, now)
        else:
            self.requeue(entry, reason, now)

    def fail_what_fits_nowhere(self, now: float) -> None:
        """Fail the requests that wait for workers that are gone."""
        most = self.max_total_tokens()
        for entry in [e for e in self.entries.values() if e.state is RequestState.WAITING]:
            if entry.request.max_total_tokens > most:
                self.unqueue(entry.request.request_id, now)
                self.fail(entry, UnavailableError.label, _NO_WORKER, now)

    def fail(self, entry: LiveRequest, label: str, message: str, now: float) -> None:
        """End a request with an error, and tell its ApiServer."""
        self.tell(entry, label, message)
        self.end(entry, label, now)

    def tell(self, entry: LiveRequest, label: str, message: str) -> None:
        """Send an error to a request's ApiServer."""
        self._outbox.events[entry.request.api_server].append(
            TokenEvent(
                request_id=entry.request.request_id,
                index=len(entry.output_token_ids),
                error_label=label,
                error_message=message,
            )
        )

    def end(self, entry: LiveRequest, outcome: str, now: float) -> None:
        """Forget a request. Its pages stay leased until no worker touches them."""
        del self.entries[entry.request.request_id]
        self.leave(entry)
        self._observer.ended(entry.request, outcome, len(entry.output_token_ids), now - entry.arrival_time)
