"""To which decode worker a request goes: what is cached of it weighs against load. Pure."""

from __future__ import annotations

from scheduler.decode_pools import DecodePool, DecodePools, num_start_pages
from scheduler.live import LiveRequest


class PrefixRouter:
    """Knows what the pools have cached of a request. Owns nothing.

    What is cached weighs against load: a pool in which a share x of a request's tokens is cached may have fewer pages
    free than the emptiest, by a share of its pages less than x.
    """

    def __init__(self, pools: DecodePools, block_tokens: int) -> None:
        """`block_tokens` are those of a block of the pools' prefix caches."""
        self._pools = pools
        self._block_tokens = block_tokens

    def num_cached_tokens(self, entry: LiveRequest) -> int:
        """Return how many tokens of a request are cached in the pool that has most of them."""
        return max((self._num_cached(pool, entry) for pool in self._holders(entry)), default=0)

    def choose_for(self, entry: LiveRequest) -> DecodePool | None:
        """Return the pool for a batch that begins with a request; None if there is none.

        The request fits there, if it fits anywhere.
        """
        emptiest = self._pools.choose()
        if emptiest is None or len(self._pools) == 1:
            return emptiest
        num_pages = num_start_pages(entry.request, self._pools.page_size)
        best, best_score = emptiest, self._score(emptiest, emptiest, entry)
        for pool in self._holders(entry):
            if pool.free_sequences > 0 and pool.free_pages >= num_pages:
                score = self._score(pool, emptiest, entry)
                if score > best_score:
                    best, best_score = pool, score
        return best

    def belongs_elsewhere(self, pool: DecodePool, entry: LiveRequest) -> bool:
        """Return whether a request has so much cached in another pool that it should wait for a batch for that one."""
        if len(self._pools) == 1 or all(holder is pool for holder in self._holders(entry)):
            return False
        chosen = self.choose_for(entry)
        if chosen is None or chosen is pool:
            return False
        return self._num_cached(chosen, entry) > self._num_cached(pool, entry)

    def _holders(self, entry: LiveRequest) -> list[DecodePool]:
        """Return the pools that have the first block of a request, if it may use any."""
        if entry.chain is None or not entry.num_usable_blocks:
            return []
        names = self._pools.holders.of(entry.chain.digests[0])
        return [pool for name in names if (pool := self._pools.get(name)) is not None]

    def _num_cached(self, pool: DecodePool, entry: LiveRequest) -> int:
        if entry.chain is None:
            return 0
        return pool.ledger.cache.count(entry.chain.digests, entry.num_usable_blocks) * self._block_tokens

    def _score(self, pool: DecodePool, emptiest: DecodePool, entry: LiveRequest) -> float:
        """Return the share of a request's tokens that is cached in a pool, less the share of its pages it lacks."""
        lacking = max(0, emptiest.free_pages - pool.free_pages)
        cached_share = self._num_cached(pool, entry) / entry.request.num_prefill_tokens
        return cached_share - lacking / pool.ledger.num_pages
