"""Handoff by shared memory: prefill writes where decode reads (``shm``, ``cuda_ipc``)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from scheduler.messages import Lease
from worker.handoff.base import Arrival, Writing
from worker.kv_pool import KVPool


class DirectHandoff:
    """Owns nothing: the pages are the decode worker's. Claims them before they are written, and looks again after."""

    def __init__(self, pool: KVPool, *, num_ranks: int = 1) -> None:
        """Of a group, each of `num_ranks` writes into such a pool, and this one claims and looks for all."""
        self.pool = pool
        self.transport = "shm" if pool.device.type == "cpu" else "cuda_ipc"
        self.max_pages = None
        self._num_ranks = num_ranks

    def begin(self, leases: Sequence[Lease], num_tokens: Sequence[int]) -> Writing:
        """Claim the pages."""
        refused = self.pool.claim(leases)
        counts = [-(-count // self.pool.page_size) for count in num_tokens]
        page_ids = [
            () if i in refused else lease.page_ids[:count]
            for i, (lease, count) in enumerate(zip(leases, counts, strict=True))
        ]
        num_cached = [
            0 if i in refused else len(lease.shared_epochs) * self.pool.page_size
            for i, lease in enumerate(leases)
        ]
        return Writing(leases=leases, page_ids=page_ids, refused=refused, num_cached=num_cached)

    def finish(self, writing: Writing) -> Arrival:
        """See whether the pages are still the leases' own."""
        started = time.perf_counter()
        errors = self.pool.check(writing.leases, besides=writing.refused)
        return Arrival(
            errors=errors,
            num_bytes=writing.num_arrived(errors) * self.pool.page_bytes * self._num_ranks,
            seconds=time.perf_counter() - started,
        )

    def close(self) -> None:
        """Nothing is open."""
