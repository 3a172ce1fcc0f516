"""Who may use which KV pages: the scheduler's ledger of each decode worker's pool. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler.messages import DecodeWorkerInfo, Lease, PageGrant, SequenceRef
from scheduler.prefix.cache import PrefixCache
from scheduler.prefix.hashing import BLOCK_TOKENS
from scheduler.prefix.index import Holders


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

    def __init__(
        self,
        info: DecodeWorkerInfo,
        epoch_source: Iterator[int],
        *,
        block_tokens: int = BLOCK_TOKENS,
        holders: Holders | None = None,
    ) -> None:
        """`block_tokens` are those of a block of the prefix cache; `holders` knows those of all pools.

        Nothing is cached if a block is not whole pages.
        """
        self.worker = info.name
        self.page_size = info.pool.page_size
        self.is_caching = block_tokens % self.page_size == 0
        self.num_pages = info.pool.num_pages - 1
        """Pages that can be leased: all but the scratch page 0."""
        self.cache = PrefixCache(block_tokens // self.page_size, holders or Holders(), self.worker)
        """The blocks of tokens in the pages. Those that no lease holds are free pages too."""
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
        """Pages that nobody has leased, those of cached blocks included."""
        return self.num_pages - self._num_used + len(self._returned) + self.cache.num_unused_pages

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

    def lease(self, num_pages: int, digests: Sequence[bytes] | None = None, num_blocks: int = 0) -> Lease:
        """Lease pages under a new epoch. The caller has seen that they are free.

        The first of them are those of cached blocks: of the first `num_blocks` of `digests`, as far as they are here.
        `digests` is None for a sequence whose blocks are not to be cached.
        """
        assert self.free_sequences > 0
        epoch = next(self._epochs)
        digests = digests if self.is_caching else None
        blocks = self.cache.hold(digests, num_blocks) if digests else []
        page_ids = [page for block in blocks for page in block.page_ids]
        num_own = num_pages - len(page_ids)
        page_ids += self._take(num_own)
        if digests is not None:
            self.cache.begin(epoch, blocks, num_own)
        self._leases[epoch] = page_ids
        return Lease(
            decode_worker=self.worker,
            epoch=epoch,
            page_ids=tuple(page_ids),
            shared_epochs=tuple([written for block in blocks for written in block.epochs]) if blocks else (),
        )

    def grow(self, ref: SequenceRef, num_pages: int) -> PageGrant:
        """Add pages to a lease that has not ended. The caller has seen that they are free."""
        held, page_ids = self._leases[ref.epoch], self._take(num_pages)
        grant = PageGrant(ref=ref, epoch=next(self._epochs), first_page=len(held), page_ids=tuple(page_ids))
        self.cache.grow(ref.epoch, grant.epoch, num_pages)
        held += page_ids
        return grant

    def complete(self, ref: SequenceRef, digests: Sequence[bytes]) -> None:
        """The KV of a lease's first blocks is in its pages: others may use them from now on."""
        self.cache.complete(ref.epoch, self._leases[ref.epoch], digests)

    def forget(self, ref: SequenceRef) -> None:
        """A worker refused a lease: what it shares is not where it should be, and nobody is to find it there again."""
        self.cache.forget(ref.epoch)

    def release(self, ref: SequenceRef) -> None:
        """End a lease and free its pages. Those of its complete blocks stay cached."""
        self._returned += self.cache.end(ref.epoch, self._leases.pop(ref.epoch))[::-1]

    def reset_cache(self) -> int:
        """Forget all cached blocks, and return how many they were. Leases that hold some keep their pages."""
        num_blocks = len(self.cache)
        self._returned += self.cache.clear()
        return num_blocks

    def _take(self, num_pages: int) -> list[int]:
        assert num_pages <= self.free_pages, (num_pages, self.free_pages)
        returned = self._returned
        while self.num_pages - self._num_used + len(returned) < num_pages:
            returned += self.cache.evict()
        page_ids = returned[: -num_pages - 1 : -1]
        del returned[len(returned) - len(page_ids) :]
        if len(page_ids) < num_pages:
            first, self._num_used = self._num_used + 1, self._num_used + num_pages - len(page_ids)
            page_ids += range(first, self._num_used + 1)
        return page_ids
