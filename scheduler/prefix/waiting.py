"""What waiting requests find cached, and which of them had better wait for a block that is being computed. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from scheduler.batching.requests import Work
from scheduler.decode_pools import DecodePool
from scheduler.live import LiveRequest
from scheduler.prefix.routing import PrefixRouter

MIN_SHARED_TOKENS = 256
"""A request waits for another that computes so many of its own tokens, or more. Fewer are computed twice."""


class ComputedBlocks:
    """Owns the digests of the blocks that requests under way compute: they will be cached soon."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()
        self._by_request: dict[str, Sequence[bytes]] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._counts

    def begin(self, request_id: str, digests: Sequence[bytes]) -> None:
        """A request is going to compute these blocks."""
        self._by_request[request_id] = digests
        self._counts.update(digests)

    def end(self, request_id: str) -> None:
        """It has, or failed. Nothing happens if it computed none."""
        for digest in self._by_request.pop(request_id, ()):
            if self._counts[digest] > 1:
                self._counts[digest] -= 1
            else:
                del self._counts[digest]


class WholeView:
    """The waiting requests where prefill workers compute all tokens, whatever is cached.

    They are looked at all the same: what they were to take before that was known must not stay with them.
    """

    num_followers = 0

    def __init__(self, entries: Mapping[str, LiveRequest]) -> None:
        self._entries = entries

    def look(self, request_id: str) -> Work:
        """Return what the prefill of a request would take."""
        return Work(num_tokens=self._entries[request_id].request.num_prefill_tokens, num_used_pages=0)


class PoolView:
    """The waiting requests as one batch may have them, whose pages are to be in one pool.

    A request that has more cached in another pool, with room for it, is left to a batch for that one. One that shares
    `min_shared_blocks` or more, which are not cached yet, with one under way or one before it in this batch waits
    until those are: for one prefill.
    """

    def __init__(
        self,
        pool: DecodePool,
        router: PrefixRouter,
        entries: Mapping[str, LiveRequest],
        computed: ComputedBlocks,
        *,
        block_tokens: int,
        min_shared_blocks: int,
    ) -> None:
        """`computed` are the blocks of requests under way."""
        self._min_shared_blocks = min_shared_blocks
        self._pool = pool
        self._router = router
        self._entries = entries
        self._computed = computed
        self._block_tokens = block_tokens
        self._in_batch: set[bytes] = set()
        self.num_followers = 0
        """Requests that wait for others of this batch."""

    def look(self, request_id: str) -> Work | None:
        """Return what the prefill of a request would take now, or None if it should wait."""
        entry = self._entries[request_id]
        assert entry.chain is not None
        digests, most = entry.chain.digests, entry.num_usable_blocks
        if self._router.belongs_elsewhere(self._pool, entry):
            return None
        cache = self._pool.ledger.cache
        num_cached, num_used = cache.match(digests, most)
        shared = num_cached + self._min_shared_blocks - 1  # a digest stands for all before it too
        if shared < most:
            if digests[shared] in self._computed:
                return None
            if digests[shared] in self._in_batch:
                self.num_followers += 1
                return None
        self._in_batch.update(digests[num_cached:])
        return Work(
            num_tokens=entry.request.num_prefill_tokens - num_cached * self._block_tokens,
            num_used_pages=num_used * cache.pages_per_block,
        )
