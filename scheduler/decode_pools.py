"""The page pools of the decode workers: who has a place in them, who gets more pages, and who must leave. Pure.

A sequence starts with the pages of its prompt and of a few tokens more. As it nears their end it is granted the
next ones. If there are none, the youngest sequences of that worker leave: their requests wait again, before all
others, and are computed again with the tokens that they had. The oldest sequence never leaves for want of pages
unless it has outgrown its pool, so it always comes to its end, then the next oldest, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from scheduler.errors import ConfigError
from scheduler.messages import DecodeWorkerInfo, Lease, PageGrant, Request, SequenceRef, StepReport
from scheduler.pages import PageLedger, epochs
from scheduler.placement import DecodePlacement
from scheduler.prefix.hashing import BLOCK_TOKENS
from scheduler.prefix.index import Holders

_GROW_AHEAD_TOKENS = 16
"""A sequence has room for so many tokens more, where pages are free: a grant is there before it is needed."""
_PAGES_AT_ONCE = 4
"""A sequence is granted so many pages while half of the pool is free, so that it has to be told less often."""
_PREEMPT_AHEAD_TOKENS = 2
"""Others must leave once a sequence has room for fewer tokens than this: until then, one may end by itself."""
_ANY_NUM_TOKENS = 2**63
"""More than any sequence has: the size of a pool that is not known yet."""


def num_start_pages(request: Request, page_size: int) -> int:
    """Return the pages with which a request starts: prompt, tokens so far, and a few tokens more."""
    return -(-min(request.num_prefill_tokens + 1 + _GROW_AHEAD_TOKENS, request.max_total_tokens) // page_size)


@dataclass(slots=True, kw_only=True)
class _Tenant:
    """A sequence that has a lease."""

    ref: SequenceRef
    age: int
    """Smaller is older."""
    num_tokens: int
    max_tokens: int
    num_pages: int
    leaving: bool = False
    """Its pages come back without further ado."""


class Balance(NamedTuple):
    """What is to be done so that all sequences of a worker can go on."""

    grants: list[PageGrant]
    preempted: list[SequenceRef]
    """Sequences that must leave; `release` them when nobody touches their pages any more."""


class DecodePool:
    """Owns the leases on one decode worker's pages, and knows how far each sequence has come."""

    def __init__(
        self,
        info: DecodeWorkerInfo,
        epoch_source: Iterator[int],
        *,
        block_tokens: int = BLOCK_TOKENS,
        holders: Holders | None = None,
    ) -> None:
        """`block_tokens` are those of a block of the prefix cache; `holders` knows those of all pools."""
        self.ledger = PageLedger(info, epoch_source, block_tokens=block_tokens, holders=holders)
        self.is_draining = False
        """Whether it takes no new sequences."""
        self._tenants: dict[int, _Tenant] = {}
        """By the epoch of the lease, which no two share."""
        self._growing: set[int] = set()
        """Those that may need more pages than they have."""
        self._short: dict[int, _Tenant] = {}
        """Those that should have more pages than they have."""
        self._next_report = 1
        self._early_reports: dict[int, StepReport] = {}

    def __contains__(self, ref: SequenceRef) -> bool:
        return ref.epoch in self._tenants

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def is_short(self) -> bool:
        """Whether a sequence should have more pages than it has."""
        return bool(self._short)

    @property
    def name(self) -> str:
        """Name of the decode worker."""
        return self.ledger.worker

    @property
    def max_tokens(self) -> int:
        """Tokens of a sequence that has every page."""
        return self.ledger.num_pages * self.ledger.page_size

    @property
    def free_pages(self) -> int:
        """Pages for new sequences. One is kept for each that is going to grow, and all while one waits for any."""
        if self.is_draining or self._short:
            return 0
        return max(0, self.ledger.free_pages - len(self._growing))

    @property
    def free_sequences(self) -> int:
        """Sequences that may begin."""
        return 0 if self.is_draining else self.ledger.free_sequences

    @property
    def staying(self) -> list[SequenceRef]:
        """Sequences that have not been told to leave."""
        return [tenant.ref for tenant in self._tenants.values() if not tenant.leaving]

    def in_order(self, report: StepReport) -> Iterator[StepReport]:
        """Yield the worker's reports in the order in which it made them: this one once all before it have come."""
        if report.number == self._next_report and not self._early_reports:
            self._next_report += 1
            yield report
            return
        self._early_reports[report.number] = report
        while (following := self._early_reports.pop(self._next_report, None)) is not None:
            self._next_report += 1
            yield following

    def lease(
        self,
        request: Request,
        num_pages: int,
        age: int,
        digests: Sequence[bytes] | None = None,
        num_blocks: int = 0,
    ) -> Lease:
        """Lease pages to a request that is to be prefilled, and cached blocks as `PageLedger.lease` says."""
        lease = self.ledger.lease(num_pages, digests, num_blocks)
        tenant = _Tenant(
            ref=SequenceRef(request_id=request.request_id, epoch=lease.epoch),
            age=age,
            num_tokens=request.num_prefill_tokens,
            max_tokens=request.max_total_tokens,
            num_pages=num_pages,
        )
        self._tenants[lease.epoch] = tenant
        self._note(tenant)
        return lease

    def advance(self, ref: SequenceRef, num_tokens: int) -> None:
        """A sequence has `num_tokens` tokens now, the newest of which is not in its pages yet."""
        tenant = self._tenants[ref.epoch]
        tenant.num_tokens = num_tokens
        room = tenant.num_pages * self.ledger.page_size
        if num_tokens + _GROW_AHEAD_TOKENS > room < tenant.max_tokens and not tenant.leaving:
            self._short[ref.epoch] = tenant

    def leave(self, ref: SequenceRef) -> None:
        """A sequence ended, or must leave: it gets no more pages, and those that it has come back soon."""
        self._stop_growing(self._tenants[ref.epoch])

    def release(self, ref: SequenceRef) -> bool:
        """Take back a sequence's pages. Returns False if it had none any more."""
        tenant = self._tenants.pop(ref.epoch, None)
        if tenant is None:
            return False
        self._stop_growing(tenant)
        self.ledger.release(ref)
        return True

    def balance(self) -> Balance:
        """Grant pages to those that are short of them, oldest first; name those that must leave if too few are free."""
        grants: list[PageGrant] = []
        for tenant in sorted(self._short.values(), key=lambda tenant: tenant.age):
            wanted = self._wanted(tenant, _GROW_AHEAD_TOKENS)
            num_pages = min(self._handed_out(tenant, wanted), self.ledger.free_pages)
            if num_pages:
                grants.append(self.ledger.grow(tenant.ref, num_pages))
                tenant.num_pages += num_pages
            if num_pages >= wanted:
                del self._short[tenant.ref.epoch]
                self._note(tenant)
        return Balance(grants, self._preempt() if self._short else [])

    def _preempt(self) -> list[SequenceRef]:
        """Return those that must leave so that each sequence at the end of its pages gets another."""
        leaving = {epoch: t.num_pages for epoch, t in self._tenants.items() if t.leaving}
        free = self.ledger.free_pages
        coming = free + self.ledger.cache.num_pages_back(leaving)
        needed = {epoch: self._wanted(t, _PREEMPT_AHEAD_TOKENS) for epoch, t in self._short.items()}
        preempted: list[SequenceRef] = []
        by_age = sorted((t for t in self._tenants.values() if not t.leaving), key=lambda tenant: tenant.age)
        while sum(needed.values()) > coming:
            # The last one gets the pages of the others, unless it has all of them: then it has outgrown the pool.
            if len(by_age) == 1 and by_age[0].num_pages < self.ledger.num_pages:
                break
            youngest = by_age.pop()
            needed.pop(youngest.ref.epoch, None)
            leaving[youngest.ref.epoch] = youngest.num_pages
            coming = free + self.ledger.cache.num_pages_back(leaving)
            preempted.append(youngest.ref)
            self.leave(youngest.ref)
        return preempted

    def _wanted(self, tenant: _Tenant, ahead_tokens: int) -> int:
        """Return how many pages more than it has a sequence needs for so many tokens more; 0 if none."""
        num_tokens = min(tenant.num_tokens + ahead_tokens, tenant.max_tokens)
        return max(0, self.ledger.pages_for(num_tokens) - tenant.num_pages)

    def _handed_out(self, tenant: _Tenant, wanted: int) -> int:
        """Return how many pages a sequence gets that wants so many, if there are as many."""
        if 0 < wanted < _PAGES_AT_ONCE and 2 * self.ledger.free_pages > self.ledger.num_pages:
            return min(_PAGES_AT_ONCE, self.ledger.pages_for(tenant.max_tokens) - tenant.num_pages)
        return wanted

    def _note(self, tenant: _Tenant) -> None:
        """Take in that a sequence has more pages."""
        if tenant.num_pages * self.ledger.page_size < tenant.max_tokens:
            self._growing.add(tenant.ref.epoch)
        else:
            self._growing.discard(tenant.ref.epoch)

    def _stop_growing(self, tenant: _Tenant) -> None:
        """Let a sequence get no more pages."""
        if not tenant.leaving:
            tenant.leaving = True
            self._short.pop(tenant.ref.epoch, None)
            self._growing.discard(tenant.ref.epoch)


class DecodePools:
    """Owns the pools of all decode workers, and chooses the one for the next batch."""

    def __init__(self, first_epoch: int = 1, *, block_tokens: int = BLOCK_TOKENS) -> None:
        """`block_tokens` are those of a block of the prefix cache."""
        self._epochs = epochs(first_epoch)
        self._block_tokens = block_tokens
        self._holders = Holders()
        self._pools: dict[str, DecodePool] = {}
        self._away: dict[str, int] = {}
        self._page_size = 0
        self._placement = DecodePlacement()
        self._unbalanced: dict[str, DecodePool] = {}
        """Those that are short of pages and changed since they were balanced."""
        self._misplaced: dict[str, DecodePool] = {}
        """Those whose place may be another one. They are placed when one is chosen, not at each change."""
        self._draining: dict[str, DecodePool] = {}
        self._max_total_tokens: int | None = 0
        """None: to be computed anew. It is asked for at each request, and changes with the fleet only."""

    def __iter__(self) -> Iterator[DecodePool]:
        return iter(self._pools.values())

    def __contains__(self, name: str) -> bool:
        return name in self._pools

    @property
    def page_size(self) -> int:
        """Tokens per page. It is the same in all pools, so that a waiting request needs the same in any."""
        assert self._page_size, "no pool was ever there"
        return self._page_size

    @property
    def max_total_tokens(self) -> int:
        """How many tokens a sequence may have to fit the largest pool that takes any, or will; 0 if none does."""
        if self._max_total_tokens is None:
            open_pools = (pool.max_tokens for pool in self if not pool.is_draining)
            self._max_total_tokens = max(chain(open_pools, self._away.values()), default=0)
        return self._max_total_tokens

    def add(self, info: DecodeWorkerInfo) -> None:
        """Take in an empty pool. Raises `ConfigError` if its pages are not as large as those of the others."""
        if self._pools and info.pool.page_size != self.page_size:
            raise ConfigError(
                f"page_size of {info.name} must be {self.page_size}, as in the other pools, "
                f"got {info.pool.page_size}"
            )
        self._page_size = info.pool.page_size
        self._away.pop(info.name, None)
        self._pools[info.name] = DecodePool(
            info, self._epochs, block_tokens=self._block_tokens, holders=self._holders
        )
        self._draining.pop(info.name, None)
        self._max_total_tokens = None
        self.changed(self._pools[info.name])

    def fence_epoch(self) -> int:
        """Return an epoch above those of all leases so far, and below those of all to come."""
        return next(self._epochs)

    def expect_back(self, name: str) -> None:
        """Count on it that a pool that is about to be removed comes back, as large and empty."""
        self._away[name] = self._pools[name].max_tokens
        self._max_total_tokens = None

    def expect(self, name: str) -> None:
        """Count on it that a pool will come that is not known here yet, nor how large it is."""
        self._away[name] = _ANY_NUM_TOKENS
        self._max_total_tokens = None

    def give_up(self, name: str) -> None:
        """A pool that was expected back will not come."""
        self._away.pop(name, None)
        self._max_total_tokens = None

    def drain(self, pool: DecodePool) -> None:
        """Give a pool no new sequences."""
        pool.is_draining = True
        self._draining[pool.name] = pool
        self._max_total_tokens = None
        self.changed(pool)

    def remove(self, name: str) -> None:
        """Forget a pool, all leases on it, and all that is cached there."""
        self._pools.pop(name).ledger.reset_cache()
        self._unbalanced.pop(name, None)
        self._misplaced.pop(name, None)
        self._draining.pop(name, None)
        self._max_total_tokens = None
        self._placement.remove(name)

    def remove_drained(self) -> list[str]:
        """Forget the pools that drain and have no lease left; return their names."""
        if not self._draining:
            return []
        names = [pool.name for pool in self._draining.values() if not len(pool)]
        for name in names:
            self.remove(name)
        return names

    def get(self, name: str) -> DecodePool | None:
        """Return a decode worker's pool, or None if that worker is gone."""
        return self._pools.get(name)

    def holding(self, lease: Lease, ref: SequenceRef) -> DecodePool | None:
        """Return the pool of a lease that has not ended, or None."""
        pool = self._pools.get(lease.decode_worker)
        return pool if pool is not None and ref in pool else None

    def changed(self, pool: DecodePool) -> None:
        """Take in that a pool's leases changed."""
        self._misplaced[pool.name] = pool
        if pool.is_short:
            self._unbalanced[pool.name] = pool

    def balance(self) -> Iterator[tuple[str, Balance]]:
        """Yield what is to be done at each decode worker whose leases changed."""
        unbalanced, self._unbalanced = self._unbalanced, {}
        for name, pool in unbalanced.items():
            balance = pool.balance()
            self._misplaced[name] = pool
            yield name, balance

    def num_cached_tokens(self, digests: Sequence[bytes], num_blocks: int) -> int:
        """Return how many tokens of a sequence's first blocks are cached in the pool that has most of them."""
        if not num_blocks:
            return 0
        caches = (self._pools[name].ledger.cache for name in self._holders.of(digests[0]))
        return self._block_tokens * max((c.match(digests, num_blocks).num_blocks for c in caches), default=0)

    def choose_for(self, digests: Sequence[bytes], num_blocks: int, request: Request) -> DecodePool | None:
        """Return the pool for a batch that begins with a request, whose first blocks have these digests.

        What is cached weighs against load: a pool in which a share x of the request's tokens is cached may have fewer
        pages free than the emptiest, by a share of its pages less than x. The request fits there, if it fits anywhere.
        """
        emptiest = self.choose()
        if emptiest is None or not num_blocks or len(self._pools) == 1:
            return emptiest
        num_pages = num_start_pages(request, self.page_size)
        best, best_score = emptiest, self._score(emptiest, emptiest, digests, num_blocks, request)
        for name in self._holders.of(digests[0]):
            pool = self._pools[name]
            if pool.free_sequences > 0 and pool.free_pages >= num_pages:
                score = self._score(pool, emptiest, digests, num_blocks, request)
                if score > best_score:
                    best, best_score = pool, score
        return best

    def belongs_elsewhere(
        self, pool: DecodePool, digests: Sequence[bytes], num_blocks: int, request: Request
    ) -> bool:
        """Return whether a request has so much cached in another pool that it should wait for a batch for that one."""
        if not num_blocks or len(self._pools) == 1 or self._holders.of(digests[0]) in ((), (pool.name,)):
            return False
        chosen = self.choose_for(digests, num_blocks, request)
        if chosen is None or chosen is pool:
            return False
        here, there = (p.ledger.cache.match(digests, num_blocks).num_blocks for p in (pool, chosen))
        return there > here

    def _score(
        self,
        pool: DecodePool,
        emptiest: DecodePool,
        digests: Sequence[bytes],
        num_blocks: int,
        request: Request,
    ) -> float:
        """Return the share of a request's tokens that is cached in a pool, less the share of its pages it lacks."""
        num_cached = pool.ledger.cache.match(digests, num_blocks).num_blocks * self._block_tokens
        lacking = max(0, emptiest.free_pages - pool.free_pages)
        return num_cached / request.num_prefill_tokens - lacking / pool.ledger.num_pages

    def choose(self) -> DecodePool | None:
        """Return the pool for the next batch: the one with the most pages for new sequences."""
        for pool in self._misplaced.values():
            self._placement.update(pool.name, free_pages=pool.free_pages, free_sequences=pool.free_sequences)
        self._misplaced.clear()
        name = self._placement.choose()
        return None if name is None else self._pools[name]
