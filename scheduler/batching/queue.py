"""All waiting requests, in the order in which they should be served."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from itertools import chain

from scheduler.batching.fairness import Entry, FairQueue
from scheduler.batching.ordered import OrderedQueue
from scheduler.batching.requests import QueuedRequest, Work


class WaitingQueue:
    """Owns the waiting requests. Knows neither time nor batches.

    Order: requests that were dispatched before and came back, oldest first; then class by class, and in a
    class as `FairQueue` says. Adding, removing and taking cost the same however many wait.
    """

    def __init__(self, *, quantum_tokens: int, max_skip_s: float) -> None:
        self._quantum_tokens = quantum_tokens
        self._max_skip_s = max_skip_s
        self._entries: dict[str, Entry] = {}
        self._returned: OrderedQueue[Entry] = OrderedQueue()
        self._classes: dict[int, FairQueue] = {}
        self._priorities: list[int] = []
        self._class_tokens: dict[int, int] = {}
        self._num_tokens = 0
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    @property
    def num_tokens(self) -> int:
        """Tokens of all waiting requests."""
        return self._num_tokens

    def counts_by_class(self) -> dict[int, int]:
        """Return how many requests wait in each priority class. Those that came back are in none."""
        return {priority: len(self._classes[priority]) for priority in self._priorities}

    def tokens_by_class(self) -> dict[int, int]:
        """Return how many tokens wait in each priority class. Those that came back are in none."""
        return dict(self._class_tokens)

    def add(self, request: QueuedRequest, *, due: float, returned: bool = False) -> None:
        """Queue a request that should be served before those of its class and tenant that are due later.

        `returned` is for one that was dispatched before: it goes before all others, and is not charged again.
        Raises `ValueError` if a request of that id waits already.
        """
        if request.request_id in self._entries:
            raise ValueError(f"request_id {request.request_id} waits already")
        self._num_added += 1
        entry = Entry(request, due=due, seq=self._num_added, max_skip_s=self._max_skip_s)
        if returned:
            self._returned.add(0, request.arrival_time, entry.seq, entry)
        else:
            fair = self._classes.get(request.priority)
            if fair is None:
                fair = self._classes[request.priority] = FairQueue(self._quantum_tokens)
                insort(self._priorities, request.priority)
            fair.add(entry)
            self._class_tokens[request.priority] = (
                self._class_tokens.get(request.priority, 0) + request.num_tokens
            )
        self._entries[request.request_id] = entry
        self._num_tokens += request.num_tokens

    def remove(self, request_id: str) -> bool:
        """Take a request out that will not be served. Returns False if it does not wait here."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        self._num_tokens -= entry.num_tokens
        if entry.tenant is None:
            self._returned.discard(entry)
        else:
            fair = self._classes[entry.request.priority]
            fair.discard(entry)
            self._class_tokens[entry.request.priority] -= entry.num_tokens
            self._drop_if_empty(entry.request.priority, fair)
        return True

    def take(self, entries: Iterable[Entry], *, passed: Iterable[Entry], now: float) -> None:
        """Take requests out that are served now, before those of `passed`, which stay."""
        for entry in passed:
            entry.skip(now + self._max_skip_s)
        by_class: dict[int, list[Entry]] = {}
        for entry in entries:
            request = entry.request
            del self._entries[request.request_id]
            self._num_tokens -= entry.num_tokens
            if entry.tenant is None:
                self._returned.discard(entry)
            elif request.priority in by_class:
                by_class[request.priority].append(entry)
            else:
                by_class[request.priority] = [entry]
        for priority, taken in by_class.items():
            fair = self._classes[priority]
            fair.take(taken)
            self._class_tokens[priority] -= sum([entry.num_tokens for entry in taken])
            self._drop_if_empty(priority, fair)

    def resize(self, entry: Entry, work: Work) -> None:
        """Take in what a waiting request takes with what is cached now. Its place stays the same."""
        entry.num_pages = entry.request.num_pages - work.num_used_pages
        more = work.num_tokens - entry.num_tokens
        if more:
            entry.num_tokens += more
            self._num_tokens += more
            if entry.tenant is not None:
                self._class_tokens[entry.request.priority] += more

    def first(self) -> QueuedRequest | None:
        """Return the request that should be served first, or None."""
        entry = next(self.in_order(), None)
        return None if entry is None else entry.request

    def in_order(self) -> Iterator[Entry]:
        """Walk along the requests in the order of service. The queue must not change meanwhile."""
        if not self._returned and len(self._priorities) == 1:
            return self._classes[self._priorities[0]].in_order()
        return chain(self._returned, *(self._classes[priority].in_order() for priority in self._priorities))

    def _drop_if_empty(self, priority: int, fair: FairQueue) -> None:
        if not fair:
            del self._classes[priority], self._class_tokens[priority]
            self._priorities.remove(priority)
