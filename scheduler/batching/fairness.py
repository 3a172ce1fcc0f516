"""One priority class: shares between tenants, and earliest due first within the shares.

Fairness is a round robin over tokens, as in deficit round robin (Shreedhar and Varghese, 1995), with start
tags in place of deficits (start-time fair queueing, Goyal, Vin and Cheng, 1996): each tenant is in a round,
which is the number of whole quanta that it has been served; lower rounds go first. A tenant that was served
more than a quantum falls behind those that were not, however many requests it has waiting; one that comes
(back) joins the current round, so that having been idle earns nothing. Within a round, requests of all
tenants go by their due time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from scheduler.batching.ordered import OrderedQueue
from scheduler.batching.requests import QueuedRequest


class Entry:
    """A waiting request in its place."""

    __slots__ = (
        "bound_from",
        "due",
        "live",
        "num_pages",
        "num_tokens",
        "request",
        "seq",
        "skip_until",
        "tenant",
    )

    def __init__(self, request: QueuedRequest, *, due: float, seq: int, max_skip_s: float) -> None:
        self.request = request
        self.num_tokens = request.num_tokens
        self.num_pages = request.num_pages
        self.due = due
        self.seq = seq
        self.live = True
        self.tenant: _Tenant | None = None
        self.skip_until = inf
        """Until when requests behind it may be taken before it, once one was."""
        self.bound_from = inf if request.deadline is None else request.deadline - max_skip_s
        """It is not bound before this time; `is_bound` says whether it is after."""

    def is_bound(self, now: float) -> bool:
        """Return whether no request behind it may be taken before it, `now` not being before `bound_from`."""
        deadline = self.request.deadline
        return now >= self.skip_until or (deadline is not None and now < deadline)

    def skip(self, until: float) -> None:
        """Note that one behind it was taken before it, which may go on until `until`."""
        self.skip_until = min(self.skip_until, until)
        self.bound_from = min(self.bound_from, self.skip_until)


class _Turn:
    """A tenant's place among the tenants: that of its first request."""

    __slots__ = ("entry", "live", "place", "tenant")

    def __init__(self, tenant: _Tenant, entry: Entry, round_: int) -> None:
        self.tenant = tenant
        self.entry = entry
        self.place = (round_, entry.due, entry.seq)
        self.live = True


class _Tenant:
    __slots__ = ("entries", "name", "tokens_served", "turn")

    def __init__(self, name: str, tokens_served: int) -> None:
        self.name = name
        self.tokens_served = tokens_served
        self.entries: OrderedQueue[Entry] = OrderedQueue()
        self.turn: _Turn | None = None


_Step = tuple[int, float, int, Entry, Iterator[Entry], int]
"""Round, due, seq, entry, the tenant's entries after it, and the tenant's tokens before it."""


class FairQueue:
    """The waiting requests of one priority class, in the order in which they should be served."""

    def __init__(self, quantum_tokens: int) -> None:
        self._quantum = quantum_tokens
        self._tenants: dict[str, _Tenant] = {}
        self._turns: OrderedQueue[_Turn] = OrderedQueue()
        self._num_entries = 0
        self._round = 0
        self._most_tenants = 64
        """With more than these, those who are idle and owe nothing are forgotten."""

    def __len__(self) -> int:
        return self._num_entries

    def add(self, entry: Entry) -> None:
        """Put a request in its place."""
        name = entry.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, 0)
        if tenant.turn is None:
            tenant.tokens_served = max(tenant.tokens_served, self._current_round() * self._quantum)
        entry.tenant = tenant
        tenant.entries.add(0, entry.due, entry.seq, entry)
        self._num_entries += 1
        first = tenant.turn.entry if tenant.turn else None
        if first is None or (entry.due, entry.seq) < (first.due, first.seq):
            self._file(tenant, entry)

    def discard(self, entry: Entry) -> None:
        """Take a request out. Its tenant is not charged for it."""
        tenant = entry.tenant
        assert tenant is not None
        tenant.entries.discard(entry)
        self._num_entries -= 1
        if tenant.turn is not None and tenant.turn.entry is entry:
            self._file(tenant, tenant.entries.first())

    def take(self, entries: Sequence[Entry]) -> None:
        """Take requests out that are served now; their tokens count against their tenants' shares."""
        served: dict[_Tenant, list[Entry]] = {}
        for entry in entries:
            tenant = entry.tenant
            assert tenant is not None
            tenant.tokens_served += entry.num_tokens
            if tenant in served:
                served[tenant].append(entry)
            else:
                served[tenant] = [entry]
        self._num_entries -= len(entries)
        for tenant, taken in served.items():
            tenant.entries.discard(*taken)
            self._file(tenant, tenant.entries.first())

    def in_order(self) -> Iterator[Entry]:
        """Walk along the requests in the order of service. The queue must not change meanwhile."""
        if len(self._turns) == 1:
            turn = self._turns.first()
            assert turn is not None
            return iter(turn.tenant.entries)
        return self._merged()

    def _merged(self) -> Iterator[Entry]:
        """Walk along the requests of several tenants: lowest round first, and first due within a round."""
        started: list[_Step] = []
        turns = iter(self._turns)
        turn = next(turns, None)
        while turn is not None or started:
            if turn is not None and (not started or turn.place < started[0]):
                entry, served = turn.entry, turn.tenant.tokens_served
                rest: Iterator[Entry] | None = None
                if len(turn.tenant.entries) > 1:
                    rest = iter(turn.tenant.entries)
                    next(rest)  # The turn's own entry.
                turn = next(turns, None)
            else:
                _, _, _, entry, rest, served = heappop(started)
            yield entry
            if rest is not None and (following := next(rest, None)) is not None:
                served += entry.num_tokens
                step = (served // self._quantum, following.due, following.seq, following, rest, served)
                heappush(started, step)

    def _current_round(self) -> int:
        turn = self._turns.first()
        if turn is not None:
            self._round = max(self._round, turn.place[0])
        return self._round

    def _file(self, tenant: _Tenant, first: Entry | None) -> None:
        """Give a tenant the place of its first request, or none if nothing of it waits."""
        if tenant.turn is not None:
            self._turns.discard(tenant.turn)
            tenant.turn = None
        if first is not None:
            turn = tenant.turn = _Turn(tenant, first, tenant.tokens_served // self._quantum)
            self._turns.add(*turn.place, turn)
        elif not self._num_entries:
            # Nobody waits: what was served before is no reason to let anybody wait.
            self._tenants.clear()
            self._round = 0
        elif len(self._tenants) > self._most_tenants:
            self._forget_idle()

    def _forget_idle(self) -> None:
        """Forget tenants of whom nothing waits and who are not ahead of the others."""
        limit = (self._current_round() + 1) * self._quantum
        self._tenants = {n: t for n, t in self._tenants.items() if t.turn or t.tokens_served >= limit}
        self._most_tenants = 2 * len(self._tenants) + 64
