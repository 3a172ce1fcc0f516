"""The scheduler without any I/O: every request's state, the queue, the leases and the workers.

The actor in `scheduler.actor` and the simulator both drive this class. They tell it what happened and when, and
carry out the actions that it returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scheduler.actions import Action, Observer, Outbox, ReleaseWorker, SendPrefill
from scheduler.admission import Admission, DrainRate
from scheduler.batching.cost_model import seconds_by_tokens
from scheduler.batching.former import BatchFormer, FormedBatch, QueuedRequest
from scheduler.batching.requests import CacheView
from scheduler.book import RequestBook
from scheduler.decode_pools import DecodePool, DecodePools
from scheduler.errors import RequestCancelledError
from scheduler.intake import check_group, check_room
from scheduler.live import LiveRequest, RequestState
from scheduler.messages import (
    AbortReply,
    DecodeWorkerInfo,
    HandoffResult,
    PrefillBatch,
    PrefillItem,
    PrefillResult,
    PrefillWorkerInfo,
    QueueState,
    Rejection,
    Request,
    StepReport,
)
from scheduler.pages import PageLedger
from scheduler.prefill_workers import PrefillWorkers
from scheduler.prefix.hashing import BLOCK_TOKENS, BlockChain
from scheduler.prefix.routing import PrefixRouter
from scheduler.prefix.waiting import MIN_SHARED_TOKENS, PoolView, WholeView


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
        self,
        former: BatchFormer,
        limits: QueueLimits,
        observer: Observer,
        *,
        first_epoch: int = 1,
        block_tokens: int = BLOCK_TOKENS,
        min_shared_tokens: int = MIN_SHARED_TOKENS,
    ) -> None:
        """Leases count from `first_epoch`, which must be above those of any scheduler before this one.

        `block_tokens` are those of a block of the prefix cache, and of the digests in `Request.prefix`. A request waits
        for one under way with which it shares `min_shared_tokens` or more that are not cached yet.
        """
        self._block_tokens = block_tokens
        self._min_shared_blocks = -(-min_shared_tokens // block_tokens)
        self._former = former
        self._admission = Admission(max_requests=limits.max_requests, max_tokens=limits.max_tokens)
        self._drain = DrainRate()
        self._observer = observer
        self._prefill = PrefillWorkers()
        self._pools = DecodePools(first_epoch, block_tokens=block_tokens)
        self._router = PrefixRouter(self._pools, block_tokens)
        self._num_accepted = 0
        # No worker mistakes a batch for one of a scheduler before this one.
        self._num_batches = first_epoch - 1
        self._room_since: float | None = None
        """Since when what waits could be computed and is held for others to join; None: it is not."""
        self._may_form = False
        """Whether there is a worker for a batch that the former would let go."""
        self._room_at: float | None = None
        """When a batch can next be sent ahead to a busy worker, if it is to be another time."""
        self._outbox = Outbox()
        self._book = RequestBook(
            former,
            self._drain,
            self._prefill,
            self._pools,
            self._router,
            observer=observer,
            outbox=self._outbox,
        )

    # What others may look at.

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._book.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the requests in the queue."""
        return self._book.num_waiting_tokens

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._book.entries)

    @property
    def waiting_by_class(self) -> dict[int, tuple[int, int]]:
        """Requests and tokens that wait in each priority class; those that came back are in none."""
        tokens = self._former.tokens_by_class
        return {priority: (num, tokens[priority]) for priority, num in self._former.counts_by_class.items()}

    @property
    def ledgers(self) -> Iterable[PageLedger]:
        """The page ledger of each decode worker."""
        return (pool.ledger for pool in self._pools)

    @property
    def pools(self) -> Iterable[DecodePool]:
        """The pool of each decode worker that is in service."""
        return iter(self._pools)

    @property
    def draining_prefill_workers(self) -> dict[str, bool]:
        """Whether each prefill worker that is in service drains, by name."""
        return self._prefill.draining

    @property
    def working(self) -> set[str]:
        """Workers that have something to compute, so that something should be heard of them."""
        decoding = {
            entry.lease.decode_worker
            for entry in self._book.entries.values()
            if entry.lease is not None and entry.state is RequestState.DECODING
        }
        return decoding.union(self._prefill.busy)

    @property
    def may_lack_pages(self) -> bool:
        """Whether a request may wait for pages to come free. Else all wait for time, company or a prefill worker."""
        return self._book.num_alone > 0 or (len(self._former) > 0 and self._former.wake_at() is None)

    def wake_at(self) -> float | None:
        """Return when `tick` must be called if nothing happens before, or None."""
        wake_at = self._former.wake_at() if self._may_form else None
        if self._room_at is None or not len(self._former):
            return wake_at
        return self._room_at if wake_at is None else min(wake_at, self._room_at)

    # What happens.

    def add_prefill_worker(self, info: PrefillWorkerInfo) -> None:
        """A prefill worker is ready."""
        self._prefill.add(info.name)
        self._observer.joined(info)
        if info.bucket_seconds:
            self._former.measured(seconds_by_tokens(info.bucket_seconds))

    def add_decode_worker(self, info: DecodeWorkerInfo) -> None:
        """A decode worker is ready, with an empty pool. Raises `ConfigError` if its pages have another size."""
        self._pools.add(info)
        self._observer.joined(info)

    def fence_epoch(self) -> int:
        """Return an epoch above those of all leases so far, and below those of all to come."""
        return self._pools.fence_epoch()

    def expect_prefill_worker(self, name: str) -> None:
        """A prefill worker is going to be ready. Until then, requests wait for it."""
        self._prefill.expect(name)

    def expect_decode_worker(self, name: str) -> None:
        """A decode worker is going to be ready, with a pool of any size. Until then, requests wait for it."""
        self._pools.expect(name)

    def fail_what_fits_nowhere(self, now: float) -> None:
        """A worker that was expected is here: fail what waited for a larger one, if none is to come."""
        self._book.fail_what_fits_nowhere(now)

    def drain_worker(self, name: str) -> None:
        """Give a worker nothing new. Once nothing is left at it, a `ReleaseWorker` follows."""
        if name in self._prefill:
            self._prefill.drain(name)
        elif (pool := self._pools.get(name)) is not None:
            self._pools.drain(pool)

    def evict_sequences(self, name: str) -> None:
        """Move the sequences of a decode worker that drains: their requests wait again, with their tokens."""
        pool = self._pools.get(name)
        for ref in pool.staying if pool is not None else ():
            self._book.move_out(ref, "drained")

    def submit(self, group: Sequence[Request], now: float) -> Rejection | None:
        """Accept all requests of a group, or none and say why."""
        rejection = self._refusal(group, now)
        if rejection is not None:
            return rejection
        for request in group:
            self._book.enqueue(self._accept(request, now), now)
        return None

    def resume(self, requests: Sequence[Request], now: float) -> None:
        """Take in what an ApiServer still serves, each with the tokens that it has, after somebody died.

        Those that are not known were accepted before: by a scheduler that died, or they had ended here, and a worker
        died before the ApiServer had their end. They wait again, before all others, whatever the limits of the queue.
        """
        for request in requests:
            entry = self._book.entries.get(request.request_id)
            if entry is not None:
                self._book.resume(entry, len(request.output_token_ids), now)
                continue
            self._book.requeue(self._accept(request, now), "resumed", now)
        self._book.fail_what_fits_nowhere(now)

    def cancel(self, request_id: str, now: float) -> None:
        """End a request on its client's wish. One that is being prefilled is dropped when its batch is back."""
        entry = self._book.entries.get(request_id)
        if entry is None or entry.cancelled:
            return
        if entry.state is RequestState.WAITING:
            self._book.unqueue(request_id, now)
            self._book.end(entry, "cancelled", now)
        elif entry.state is RequestState.PREFILLING:
            entry.cancelled = True
            self._book.leave(entry)
        else:
            if entry.requeue_reason is None:  # else it was cancelled there already
                self._book.cancel_decode(entry)
            self._book.end(entry, "cancelled", now)

    def cancel_all_of(self, api_server: str, now: float) -> int:
        """End all requests of an ApiServer whose process died, and return how many they were."""
        own = [i for i, entry in self._book.entries.items() if entry.request.api_server == api_server]
        for request_id in own:
            self.cancel(request_id, now)
        return len(own)

    def abort(self, completion_id: str, key_digest: str, now: float) -> AbortReply:
        """End all sequences of a completion that were asked for with an API key, and tell their ApiServer."""
        entries = [e for e in self._book.entries.values() if e.request.completion_id == completion_id]
        own = [e for e in entries if e.request.tenant.startswith(f"{key_digest}/")]
        for entry in own:
            self._book.tell(entry, RequestCancelledError.label, "the request was cancelled")
            self.cancel(entry.request.request_id, now)
        return AbortReply(
            num_sequences=len(own), num_foreign=len(entries) - len(own), queue=self.queue_state(now)
        )

    def reset_prefix_cache(self) -> int:
        """Forget all cached blocks of tokens, and return how many they were. What runs is not disturbed."""
        return sum(pool.ledger.reset_cache() for pool in self._pools)

    def queue_state(self, now: float) -> QueueState:
        """Return what waits, and how fast the queue drains."""
        return self._drain.state(self.num_waiting, self.num_waiting_tokens, now)

    def prefill_done(self, result: PrefillResult, now: float) -> None:
        """A prefill worker finished a batch, the only one that it had or the first of two."""
        self._observer.prefilled(result)
        batch = self._prefill.take_batch(result.worker, result.batch_id, now, result.seconds)
        self._former.observe(result.num_tokens, result.seconds)
        for item, outcome in zip(batch.items, result.outcomes, strict=True):
            entry = self._book.entries[outcome.request_id]
            if outcome.token_id is not None:
                entry.output_token_ids.append(outcome.token_id)
                if item.lease.shared_epochs and not outcome.num_cached_tokens:
                    self._prefill.recomputes(result.worker)
        if result.handoff_pending:
            self._prefill.is_sending(batch, result)
            return
        handoff_s = 0.0
        if result.handoff is not None:
            self._observer.handed_off(result.handoff)
            handoff_s = result.handoff.seconds
        for item, outcome in zip(batch.items, result.outcomes, strict=True):
            self._book.prefilled(item, outcome, now, handoff_s=handoff_s)

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
            self._book.prefilled(item, outcome, now, handoff_s=handoff.seconds)

    def step_done(self, report: StepReport, now: float) -> None:
        """A decode worker made a step."""
        self._observer.stepped(report)
        pool = self._pools.get(report.worker)
        if pool is None:
            return  # It died, or left, and what it had was given to others.
        for ordered in pool.in_order(report):
            self._take_report(pool, ordered, now)
        self._pools.changed(pool)

    def worker_lost(self, name: str, now: float, *, returns: bool = False) -> None:
        """A worker died. The requests that it held wait again, with the tokens that they have.

        `returns`: it will be added again, unless `worker_gone` says otherwise. Until then, requests that no other
        worker can serve wait, and new ones are accepted.
        """
        if name in self._prefill:
            if returns:
                self._prefill.expect(name)
            self._prefill_lost(name, now)
        elif name in self._pools:
            if returns:
                self._pools.expect_back(name)
            self._pools.remove(name)
            # A batch in prefill still comes back, and its requests wait again then.
            lost = [
                entry
                for entry in self._book.entries.values()
                if entry.state is RequestState.DECODING and entry.lease and entry.lease.decode_worker == name
            ]
            self._book.died_with(lost, name, now)
        self._book.fail_what_fits_nowhere(now)

    def worker_gone(self, name: str, now: float) -> None:
        """A worker that was expected will not come: what only it could serve fails."""
        self._prefill.give_up(name)
        self._pools.give_up(name)
        self._book.fail_what_fits_nowhere(now)

    def tick(self, now: float, *, may_form: bool = True) -> list[Action]:
        """Give pages where they are needed, form the batches that are due; return all actions since the last call.

        `may_form` may be False if nothing happened since but that sequences got tokens, or left pages that nobody
        lacked, and it is not `wake_at` yet: then no batch can be due.
        """
        for worker, balance in self._pools.balance():
            if balance.grants:
                self._outbox.grows[worker] += balance.grants
            for ref in balance.preempted:
                self._book.move_out(ref, "preempted")
        if not may_form:
            return self._outbox.take()
        self._let_leave(now)
        # While such a request waits nobody else gets pages or workers, or it would wait for ever.
        if self._dispatch_alone(now):
            self._form_batches(now)
        else:
            self._may_form, self._room_at = False, None
        return self._outbox.take()

    # How it is done.

    def _form_batches(self, now: float) -> None:
        """Send the batches that are due, to idle workers or ahead to busy ones."""
        while (room := self._prefill.room(now)) is not None and (pool := self._choose_pool()) is not None:
            if self._room_since is None and room.is_idle:
                self._room_since = now
            formed = self._former.form(
                now,
                free_pages=pool.free_pages,
                free_sequences=pool.free_sequences,
                workers=room.workers,
                only_full=room.only_full,
                cache=self._view_of(pool),
            )
            if formed is None:
                if not room.is_idle or self._former.wake_at() is None:
                    self._room_since = None  # Nothing waits for others, or nothing that waits fits.
                break
            self._dispatch(pool, formed, now)
        else:
            self._room_since = None
        self._may_form = room is not None
        self._room_at = self._prefill.next_room_at(now)

    def _choose_pool(self) -> DecodePool | None:
        """Return the pool for the next batch, which begins with the first of the waiting requests."""
        first = self._former.first()
        entry = None if first is None else self._book.entries[first.request_id]
        if entry is None or entry.chain is None or not self._prefill.compute_from_cache:
            return self._pools.choose()
        return self._router.choose_for(entry)

    def _view_of(self, pool: DecodePool) -> CacheView | None:
        """Return what is cached in a pool for those that wait; None if nothing ever is."""
        if not pool.ledger.is_caching:
            return None
        if not self._prefill.compute_from_cache:
            return WholeView(self._book.entries)
        return PoolView(
            pool,
            self._router,
            self._book.entries,
            self._book.computed,
            block_tokens=self._block_tokens,
            min_shared_blocks=self._min_shared_blocks,
        )

    def _take_report(self, pool: DecodePool, report: StepReport, now: float) -> None:
        """Take in the tokens of a step, and the pages that it freed."""
        for earlier in report.earlier:
            entry = self._book.entries.get(earlier.ref.request_id)
            if entry is not None and earlier.ref in pool and entry.holds(earlier.ref.epoch):
                self._book.catch_up(entry, pool, earlier)
        for event in report.events:
            entry = self._book.entries.get(event.request_id)
            if entry is None:
                continue  # Cancelled in the meantime.
            if not entry.holds(event.epoch) or entry.ref not in pool:
                self._observer.refused("event")
            else:
                self._book.advance(entry, pool, event, now)
        for ref in report.released:
            self._book.released(pool, ref, now)

    def _refusal(self, group: Sequence[Request], now: float) -> Rejection | None:
        """Return why a group cannot be accepted, or None."""
        rejection = check_group(group, self._book.max_total_tokens(), self._book.entries)
        if rejection is None:
            self._admission.update(self.queue_state(now), now)
            rejection = check_room(group, self._admission, now)
        return rejection

    def _accept(self, request: Request, now: float) -> LiveRequest:
        self._num_accepted += 1
        entry = LiveRequest(
            request=request,
            arrival_time=now,
            queued_at=now,
            age=self._num_accepted,
            output_token_ids=list(request.output_token_ids),
            chain=BlockChain(request.prefix, self._block_tokens) if request.prefix else None,
        )
        self._book.entries[request.request_id] = entry
        return entry

    def _prefill_lost(self, name: str, now: float) -> None:
        batches, sending = self._prefill.remove_lost(name)
        entries = [self._book.entries[item.request.request_id] for batch in batches for item in batch.items]
        for entry in entries:
            self._book.release(entry)
        self._book.died_with(entries, name, now)
        for computed in sending:
            for item, outcome in zip(computed.batch.items, computed.result.outcomes, strict=True):
                if outcome.finish_reason is not None:
                    self._book.prefilled(item, outcome, now, arrived=False)
                else:
                    self._book.give_up(item, now)

    def _dispatch_alone(self, now: float) -> bool:
        """Send the next request that must be prefilled alone, if any.

        Returns False if it has to wait: for pages, or for a worker that has nothing to do.
        """
        queued = self._book.next_alone()
        if queued is None:
            return True
        pool = self._pools.choose()
        if (
            not self._prefill.num_idle
            or pool is None
            or pool.free_pages < queued.num_pages
            or not pool.free_sequences
        ):
            return False
        self._dispatch(pool, self._book.take_alone(queued, now), now)
        return True

    def _dispatch(self, pool: DecodePool, formed: FormedBatch, now: float) -> None:
        items = [self._lease(pool, queued, now) for queued in formed.requests]
        self._pools.changed(pool)
        if self._prefill.compute_from_cache:
            # What was cached when the batch was formed may have been evicted for its own pages.
            formed = formed.computing([self._num_computed(item) for item in items])
        self._drain.left(len(formed.requests), formed.num_tokens, now, is_empty=not self.num_waiting)
        self._num_batches += 1
        batch = PrefillBatch(batch_id=self._num_batches, decode_worker=pool.name, items=tuple(items))
        expected_s = self._former.expected_seconds(formed.num_tokens)
        is_alone = self._book.entries[formed.requests[0].request_id].is_alone
        worker = self._prefill.dispatch(batch, expected_s, now, is_alone=is_alone)
        self._outbox.prefills.append(SendPrefill(worker=worker, batch=batch))
        self._observer.batch_formed(batch, worker, formed)

    def _lease(self, pool: DecodePool, queued: QueuedRequest, now: float) -> PrefillItem:
        """Give a request that leaves the queue its pages."""
        entry = self._book.entries[queued.request_id]
        entry.state = RequestState.PREFILLING
        digests = None if entry.chain is None else entry.chain.digests
        entry.lease = pool.lease(entry.request, queued.num_pages, entry.age, digests, entry.num_usable_blocks)
        if digests is not None:
            num_cached = len(entry.lease.shared_epochs) * self._pools.page_size // self._block_tokens
            self._book.computed.begin(queued.request_id, digests[num_cached:])
        held_since = now if self._room_since is None else max(entry.queued_at, self._room_since)
        held_s = now - held_since
        waited_s = now - entry.queued_at
        return PrefillItem(
            request=entry.request, lease=entry.lease, queued_s=waited_s - held_s, held_s=held_s
        )

    def _num_computed(self, item: PrefillItem) -> int:
        num_cached = len(item.lease.shared_epochs) * self._pools.page_size
        return item.request.num_prefill_tokens - num_cached

    def _let_leave(self, now: float) -> None:
        """Forget the workers that were to leave and have nothing left."""
        names = self._prefill.remove_drained() + self._pools.remove_drained()
        if names:
            self._outbox.leavers += [ReleaseWorker(worker=name) for name in names]
            self._book.fail_what_fits_nowhere(now)
