"""Who may use which KV pages: the scheduler's ledger of each decode worker's pool. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.messages import DecodeWorkerInfo, Lease, PageGrant, SequenceRef


def epochs(first: int = 1) -> Iterator[int]:
    """Yield lease epochs: each larger than all before it."""
    epoch = first
    while True:
        yield epoch
        epoch += 1


class PageLedger:
    """Owns the allocation of one decode worker's pages and sequence slots. Every operation is O(pages touched).

    The decode worker owns the memory; which request may use a page is a scheduling decision, so it is made here,
    without a round trip, and before the prefill is sent.
    """

    def __init__(self, info: DecodeWorkerInfo, epoch_source: Iterator[int]) -> None:
        self.worker = info.name
        self.page_size = info.pool.page_size
        self.num_pages = info.pool.num_pages - 1
        """Pages that can be leased: all but the scratch page 0."""
        self._max_sequences = info.max_num_seqs
        self._epochs = epoch_source
        self._num_used = 0
        """Pages that were ever leased: those from 1 to this one, so that a fresh pool gives out consecutive pages."""
        self._returned: list[int] = []
        """Those of them that are free again, taken from the end."""
        self._leases: dict[int, list[int]] = {}
        """Pages by epoch, which no two leases share."""

    @property
    def free_pages(self) -> int:
        """Pages that nobody has leased."""
        return self.num_pages - self._num_used + len(self._returned)

    @property
    def free_sequences(self) -> int:
        """Sequences that may still be leased pages."""
        return self._max_sequences - len(self._leases)

    @property
    def num_leases(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def lease(self, num_pages: int) -> Lease:
        """Lease pages under a new epoch. The caller has seen that they are free."""
        assert self.free_sequences > 0
        page_ids = self._take(num_pages)
        lease = Lease(decode_worker=self.worker, epoch=next(self._epochs), page_ids=tuple(page_ids))
        self._leases[lease.epoch] = page_ids
        return lease

    def grow(self, ref: SequenceRef, num_pages: int) -> PageGrant:
        """Add pages to a lease that has not ended. The caller has seen that they are free."""
        held, page_ids = self._leases[ref.epoch], self._take(num_pages)
        grant = PageGrant(ref=ref, epoch=next(self._epochs), first_page=len(held), page_ids=tuple(page_ids))
        held += page_ids
        return grant

    def release(self, ref: SequenceRef) -> None:
        """End a lease and free its pages."""
        self._returned += self._leases.pop(ref.epoch)[::-1]

    def _take(self, num_pages: int) -> list[int]:
        assert num_pages <= self.free_pages, (num_pages, self.free_pages)
        returned = self._returned
        page_ids = returned[: -num_pages - 1 : -1]
        del returned[len(returned) - len(page_ids) :]
        if len(page_ids) < num_pages:
            first, self._num_used = self._num_used + 1, self._num_used + num_pages - len(page_ids)
            page_ids += range(first, self._num_used + 1)
        return page_ids
