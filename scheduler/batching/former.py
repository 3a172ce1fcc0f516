"""The batch former: holds waiting requests and says when which of them leave as one prefill batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from scheduler.batching.cost_model import CostModel
from scheduler.batching.fairness import Entry
from scheduler.batching.packing import Limits, Packer
from scheduler.batching.policies import BatchPolicy, BatchView, Hold, QueueView, Workers
from scheduler.batching.queue import WaitingQueue
from scheduler.batching.requests import CacheView, DispatchReason, FormedBatch, QueuedRequest

__all__ = ["BatchFormer", "DispatchReason", "FormedBatch", "QueuedRequest"]

_ONE_IDLE = Workers()
_MOST_WAITING = 64
"""So many requests that wait for cached blocks are passed over for one batch at most."""


class BatchFormer:
    """Owns the waiting requests. Knows no clock, no worker and no Ray.

    Ask `form` whenever a prefill worker is idle and anything happened (an arrival, a cancellation, pages or
    sequences freed, a worker idle), and at `wake_at`. It keeps no decision between calls, so none can go
    stale.

    Order of service: class by class; within a class by fair shares of its tenants; within the shares by due
    time, which is the deadline or, for a request without one, `patience_s` after its arrival, and later by
    its own prefill time times `size_patience`. So of requests of one size the oldest goes first, and a long
    one lets those short ones pass that came soon after it, and none that came later.
    """

    def __init__(
        self,
        policy: BatchPolicy,
        cost_model: CostModel,
        *,
        patience_s: float = 1.0,
        size_patience: float = 4.0,
        max_skip_s: float = 1.0,
        num_ahead: int = 8,
        quantum_tokens: int = 512,
    ) -> None:
        """Make an empty queue.

        `max_skip_s` bounds how long others may leave before a request for the sake of a better filled
        bucket, or because it lacks pages; `num_ahead` how many requests behind a batch are looked at for
        that. `quantum_tokens` is what a tenant may be served before it is others' turn.
        """
        self._policy = policy
        self._cost = cost_model
        self._patience_s = patience_s
        self._size_patience = size_patience
        self._packer = Packer(cost_model, num_ahead=num_ahead)
        self._queue = WaitingQueue(quantum_tokens=quantum_tokens, max_skip_s=max_skip_s)
        self._wake_at: float | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queue

    @property
    def num_tokens(self) -> int:
        """Tokens of all waiting requests."""
        return self._queue.num_tokens

    @property
    def counts_by_class(self) -> dict[int, int]:
        """Waiting requests of each priority class; those that came back are in none."""
        return self._queue.counts_by_class()

    @property
    def tokens_by_class(self) -> dict[int, int]:
        """Tokens that wait in each priority class; those that came back are in none."""
        return self._queue.tokens_by_class()

    def add(self, request: QueuedRequest, *, front: bool = False) -> None:
        """Queue a request; `front` is for one that was already dispatched and must be computed again.

        Raises `ValueError` if a request of that id waits already.
        """
        due = request.deadline
        if due is None:
            own_s = self._cost.seconds(request.num_tokens)
            due = request.arrival_time + self._patience_s + self._size_patience * own_s
        self._queue.add(request, due=due, returned=front)
        if not front:
            self._policy.arrived(request.arrival_time, request.num_tokens)
        self._wake_at = request.arrival_time

    def remove(self, request_id: str) -> bool:
        """Take a request out of the queue. Returns False if it does not wait here."""
        return self._queue.remove(request_id)

    def form(
        self,
        now: float,
        *,
        free_pages: int,
        free_sequences: int,
        workers: Workers = _ONE_IDLE,
        cache: CacheView | None = None,
        only_full: bool = False,
    ) -> FormedBatch | None:
        """Return the batch to send now to an idle prefill worker, or None to hold.

        The batch's pages and sequences fit what the chosen decode worker has free. Its requests leave the
        queue. `cache` says what is cached there: requests count with the tokens that they have to compute. Those that
        it lets wait stay; if it is for others of this batch, the batch counts as full. `only_full`: it leaves only if
        nothing could join it, for whatever reason but want of room in that decode worker.
        """
        self._wake_at = None
        if not self._queue or free_sequences < 1:
            return None
        queue = QueueView(now, len(self._queue), self._queue.num_tokens, workers)
        most_requests = self._policy.most_requests(queue)
        limits = Limits(
            max_requests=min(most_requests, free_sequences),
            max_pages=free_pages,
            max_tokens=self._policy.max_tokens,
            enough_tokens=self._policy.enough_tokens,
            may_resize=self._policy.may_resize,
        )
        in_order = self._queue.in_order()
        if cache is not None:
            in_order = self._with_cached(in_order, cache)
        packing = self._packer.pack(in_order, limits, now, self._queue.num_tokens)
        if not packing.entries:
            return None
        if only_full and len(packing.entries) < most_requests and not packing.is_saturated:
            return None
        if cache is not None and cache.num_followers:
            packing = packing._replace(is_full=True)
        requests = tuple(
            [
                entry.request
                if entry.num_tokens == entry.request.num_tokens
                else replace(entry.request, num_tokens=entry.num_tokens)
                for entry in packing.entries
            ]
        )
        view = BatchView(
            now=now,
            requests=requests,
            num_tokens=packing.num_tokens,
            is_full=packing.is_full,
            is_saturated=packing.is_saturated,
            most_requests=most_requests,
            workers=workers,
        )
        decision = self._policy.decide(view)
        if isinstance(decision, Hold):
            self._wake_at = decision.until
            return None
        self._queue.take(packing.entries, passed=packing.passed, now=now)
        self._packer.dispatched(packing)
        return FormedBatch(requests=requests, reason=decision.reason, formed_at=now)

    def first(self) -> QueuedRequest | None:
        """Return the request that should be served first, or None."""
        return self._queue.first()

    def _with_cached(self, in_order: Iterator[Entry], cache: CacheView) -> Iterator[Entry]:
        """Pass over the requests that should wait for cached blocks, and take in what the others have to compute."""
        num_waiting = 0
        for entry in in_order:
            if entry.request.may_be_cached:
                work = cache.look(entry.request.request_id)
                if work is None:
                    num_waiting += 1
                    if num_waiting == _MOST_WAITING:
                        return
                    continue
                self._queue.resize(entry, work)
            yield entry

    def wake_at(self) -> float | None:
        """Return when `form` must be asked again if nothing else happens, or None if it need not be."""
        return self._wake_at if self._wake_at is not None and self._queue else None

    def measured(self, seconds_by_bucket: Mapping[int, float]) -> None:
        """Learn the token buckets that the workers captured, and what a batch of each takes, in seconds."""
        self._cost.replace(seconds_by_bucket)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn that a prefill batch of `num_tokens` tokens, padding not counted, took `seconds`."""
        self._cost.observe(num_tokens, seconds)

    def expected_seconds(self, num_tokens: int) -> float:
        """Return what a prefill batch of `num_tokens` tokens, padding not counted, is expected to take."""
        return self._cost.seconds(num_tokens)
