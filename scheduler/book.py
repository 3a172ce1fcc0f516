"""Every request that has not ended, and each way in which one goes on, goes back, or ends. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.actions import Observer, Outbox, RequeueReason
from scheduler.admission import DrainRate
from scheduler.batching.former import BatchFormer, FormedBatch, QueuedRequest
from scheduler.decode_pools import DecodePool, DecodePools, num_start_pages
from scheduler.errors import HandoffError, StaleLeaseError, UnavailableError, WorkerFailedError
from scheduler.live import LiveRequest, RequestState
from scheduler.messages import (
    DecodeStart,
    EarlierTokens,
    PrefillItem,
    PrefillOutcome,
    SequenceRef,
    TokenEvent,
)
from scheduler.prefill_workers import PrefillWorkers
from scheduler.prefix.routing import PrefixRouter
from scheduler.prefix.waiting import ComputedBlocks

_MAX_LOSSES = 2
"""So many deaths of workers in a row make a request that was computed each time the suspect."""
_MAX_FAILED_HANDOFFS = 2
"""A request fails whose pages so often did not reach a decode worker that lives."""
_PROVEN_TOKENS = 8
"""A request that had so many tokens computed after a death was not its cause: it would have caused another."""
_NO_WORKER = "no worker is left that can serve the request"


class RequestBook:
    """Owns the live requests. Whatever it does to one, queue, pages and messages stay in step with it."""

    def __init__(
        self,
        former: BatchFormer,
        drain: DrainRate,
        prefill: PrefillWorkers,
        pools: DecodePools,
        router: PrefixRouter,
        *,
        observer: Observer,
        outbox: Outbox,
    ) -> None:
        self.entries: dict[str, LiveRequest] = {}
        """By request id."""
        self.computed = ComputedBlocks()
        """What prefills under way compute."""
        self._former = former
        self._drain = drain
        self._prefill = prefill
        self._pools = pools
        self._router = router
        self._observer = observer
        self._outbox = outbox
        self._alone: dict[str, QueuedRequest] = {}

    def max_total_tokens(self) -> int:
        """Return how many tokens a sequence may have to fit the largest pool; 0 if no worker is there for it."""
        return self._pools.max_total_tokens if self._prefill.num_open else 0

    def enqueue(self, entry: LiveRequest, now: float, *, front: bool = False) -> None:
        """Put a request into the queue, before or behind those that have not begun yet."""
        request, entry.queued_at = entry.request, now
        num_cached = 0
        entry.count_usable_blocks()
        if entry.chain is not None and self._prefill.compute_from_cache:
            num_cached = self._router.num_cached_tokens(entry)
        queued = QueuedRequest(
            request_id=request.request_id,
            num_tokens=request.num_prefill_tokens - num_cached,
            num_pages=num_start_pages(request, self._pools.page_size),
            arrival_time=entry.arrival_time,
            priority=request.priority,
            deadline=None if request.ttft_slo_s is None else entry.arrival_time + request.ttft_slo_s,
            tenant=request.tenant,
            may_be_cached=entry.chain is not None,
        )
        if entry.is_alone:
            self._alone[request.request_id] = queued
        else:
            self._former.add(queued, front=front)
        self._drain.arrived(now)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._former) + len(self._alone)

    @property
    def num_alone(self) -> int:
        """Those of them that are to be prefilled alone."""
        return len(self._alone)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the requests in the queue."""
        return self._former.num_tokens + sum(queued.num_tokens for queued in self._alone.values())

    def next_alone(self) -> QueuedRequest | None:
        """Return the next of the requests that are prefilled alone, unless one of them is being computed."""
        if not self._alone or any(
            entry.is_alone and entry.state is not RequestState.WAITING for entry in self.entries.values()
        ):
            return None
        return next(iter(self._alone.values()))

    def take_alone(self, queued: QueuedRequest, now: float) -> FormedBatch:
        """Take such a request out of the queue, as a batch of its own."""
        del self._alone[queued.request_id]
        return FormedBatch(requests=(queued,), reason="full", formed_at=now)

    def unqueue(self, request_id: str, now: float) -> None:
        """Take a request out of the queue that will not be prefilled."""
        if self._alone.pop(request_id, None) is None:
            self._former.remove(request_id)
        if not self.num_waiting:
            self._drain.left(0, 0, now, is_empty=True)

    def prefilled(
        self,
        item: PrefillItem,
        outcome: PrefillOutcome,
        now: float,
        *,
        handoff_s: float = 0.0,
        arrived: bool = True,
    ) -> None:
        """Go on with one request whose prefill is back: decode, wait again, or end.

        `arrived`: whether its pages hold what they should, unless the outcome is an error.
        """
        entry = self.entries[outcome.request_id]
        self.computed.end(outcome.request_id)
        has_ended = outcome.finish_reason is not None and entry.resume_at is None
        if outcome.error_label is not None and not entry.cancelled and not has_ended:
            self._not_prefilled(entry, outcome.error_label, outcome.error_message or "", now)
            return
        pool = self._pools.holding(item.lease, entry.ref)
        if pool is not None and arrived and outcome.error_label is None:
            self._share(entry, pool)
        if entry.cancelled or has_ended:
            self.release(entry)
            self.end(entry, outcome.finish_reason or "cancelled", now)
        elif pool is None:
            self.requeue(entry, "worker_lost", now)  # The decode worker never had it, so it is no suspect.
        elif entry.requeue_reason is not None:
            self.release(entry)
            self.requeue(entry, entry.requeue_reason, now)
        else:
            entry.state = RequestState.DECODING
            pool.advance(entry.ref, entry.num_tokens)
            self._pools.changed(pool)
            entry.num_failed_handoffs = 0
            first_token_id = entry.output_token_ids[-1]
            self._outbox.starts[pool.name].append(
                DecodeStart(
                    request=entry.request,
                    lease=item.lease,
                    first_token_id=first_token_id,
                    handoff_s=handoff_s,
                )
            )

    @staticmethod
    def _share(entry: LiveRequest, pool: DecodePool) -> None:
        """Let others use the KV of a sequence's complete blocks: of all its tokens but the newest."""
        chain, num_tokens = entry.chain, entry.num_tokens - 1
        if chain is not None:
            chain.follow(entry.request.prompt_token_ids, entry.output_token_ids, num_tokens)
            pool.ledger.complete(entry.ref, chain.digests[: chain.num_blocks(num_tokens)])

    def _not_prefilled(self, entry: LiveRequest, label: str, message: str, now: float) -> None:
        """Compute a request again whose pages do not hold what they should; fail it if it cannot be computed."""
        assert entry.lease is not None
        pool = self._pools.holding(entry.lease, entry.ref)
        if pool is not None and label == StaleLeaseError.label:
            pool.ledger.forget(entry.ref)
        self.release(entry)
        if label == StaleLeaseError.label:
            self._observer.refused("write")
            self.requeue(entry, "stale_lease", now)
        elif label == HandoffError.label:
            entry.num_failed_handoffs += pool is not None
            if entry.num_failed_handoffs >= _MAX_FAILED_HANDOFFS:
                again = f"{message}; so ended {entry.num_failed_handoffs} attempts to compute the request"
                self.fail(entry, WorkerFailedError.label, again, now)
            else:
                self.requeue(entry, "handoff_failed", now)
        else:
            self.fail(entry, label, message, now)

    def advance(self, entry: LiveRequest, pool: DecodePool, event: TokenEvent, now: float) -> None:
        """Take in what a decode worker says of a sequence that has its lease."""
        if event.token_id is not None:
            # What one worker reports comes in the order in which it happened.
            assert event.index == len(entry.output_token_ids), (event, len(entry.output_token_ids))
            entry.output_token_ids.append(event.token_id)
            pool.advance(entry.ref, entry.num_tokens)
            if entry.chain is not None and entry.num_tokens > entry.chain.next_end:
                self._share(entry, pool)
            if entry.num_losses and event.index > len(entry.request.output_token_ids) + _PROVEN_TOKENS:
                entry.num_losses, entry.is_alone = 0, False
        outcome = event.error_label or event.finish_reason
        # One that goes back to tokens that its ApiServer lacks is released now, and waits again then.
        if outcome is not None and entry.resume_at is None:
            self.end(entry, outcome, now)

    def catch_up(self, entry: LiveRequest, pool: DecodePool, earlier: EarlierTokens) -> None:
        """Take in tokens that a decode worker made before those of which it reports now."""
        entry.output_token_ids += earlier.token_ids
        pool.advance(earlier.ref, entry.num_tokens)
        if entry.chain is not None and entry.num_tokens > entry.chain.next_end:
            self._share(entry, pool)

    def released(self, pool: DecodePool, ref: SequenceRef, now: float) -> None:
        """A decode worker touches a sequence's pages no more. If it has not ended, it waits again."""
        entry = self.entries.get(ref.request_id)
        if ref in pool and entry is not None and entry.holds(ref.epoch) and entry.requeue_reason is None:
            pool.ledger.forget(ref)
        if not pool.release(ref):
            return
        if entry is not None and entry.holds(ref.epoch):
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

    def died_with(self, entries: Sequence[LiveRequest], worker: str, now: float) -> None:
        """Go on with all requests that a worker was computing when it died.

        They wait again, together at first. Whoever was there at two deaths in a row may be the cause: the only one
        that was fails; several are computed again one after the other, and the one that kills a worker then fails.
        """
        suspects = [entry for entry in entries if entry.num_losses]
        for entry in entries:
            self.computed.end(entry.request.request_id)
            entry.num_losses += 1
            if entry.cancelled:
                self.end(entry, "cancelled", now)
            elif entry.is_alone or suspects == [entry]:
                message = (
                    f"{worker} died, the worker number {entry.num_losses} in a row that computed the request"
                )
                self.fail(entry, WorkerFailedError.label, message, now)
            else:
                entry.is_alone = entry.num_losses >= _MAX_LOSSES
                self.requeue(entry, "worker_lost", now)

    def give_up(self, item: PrefillItem, now: float) -> None:
        """Go on with a request whose pages a prefill worker was sending when it died."""
        entry = self.entries[item.request.request_id]
        self.computed.end(item.request.request_id)
        self.release(entry)
        if entry.cancelled:
            self.end(entry, "cancelled", now)
        else:
            self.requeue(entry, "worker_lost", now)

    def resume(self, entry: LiveRequest, num_known: int, now: float) -> None:
        """See to it that an ApiServer gets the tokens beyond the first `num_known`, which are all that it has.

        A worker that died may have told the scheduler of tokens, but not the ApiServer.
        """
        missing = entry.output_token_ids[num_known:]
        if not missing:
            return
        request = entry.request
        if request.sampling.num_logprobs is None and not request.sampling.prompt_logprobs:
            self._outbox.events[request.api_server] += [
                TokenEvent(request_id=request.request_id, index=index, token_id=token_id)
                for index, token_id in enumerate(missing, start=num_known)
            ]
            return
        # Only workers know logprobs: the tokens are computed again.
        entry.resume_at = num_known
        if entry.state is RequestState.WAITING:
            self.unqueue(request.request_id, now)
            self.requeue(entry, "resumed", now)
        elif entry.requeue_reason is None and not entry.cancelled:
            self.move_out(entry.ref, "resumed")

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
