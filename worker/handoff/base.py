"""What every transport does for a prefill worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.errors import HandoffError, StaleLeaseError
from scheduler.messages import Lease
from worker.kv_pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """Pages that a prefill fills, on their way to their leases."""

    leases: Sequence[Lease]
    page_ids: Sequence[Sequence[int]]
    """For each lease, where in `Handoff.pool` its KV is to be written; nothing for those that are refused."""
    refused: Mapping[int, StaleLeaseError]
    """Leases, by place, whose pages have a newer owner already."""
    num_cached: Sequence[int] | None = None
    """For each lease, of how many of its first tokens `page_ids` hold the KV already; None: of none."""

    @property
    def own_page_ids(self) -> list[Sequence[int]]:
        """Those of `page_ids` whose content goes into pages of its lease alone, and not into shared ones."""
        return [
            ids[len(lease.shared_epochs) :] for lease, ids in zip(self.leases, self.page_ids, strict=True)
        ]

    def num_arrived(self, errors: Collection[int]) -> int:
        """Return how many pages hold what was written, if those of the leases in these places do not."""
        return sum(len(ids) for i, ids in enumerate(self.own_page_ids) if i not in errors)


class Arriving(Protocol):
    """A writing on its way: a future, or the `Arrival` itself."""

    def done(self) -> bool:
        """Whether it has arrived, or has failed to."""

    def result(self, timeout: float | None = None) -> Arrival:
        """Wait for it, for `timeout` seconds at most. Raises `TimeoutError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What became of a writing."""

    errors: Mapping[int, StaleLeaseError | HandoffError]
    """Leases, by place, whose pages do not hold what was written; those refused at the beginning are not named."""
    num_bytes: int
    """Of the pages that hold it."""
    seconds: float
    """Spent for the handoff alone."""

    def done(self) -> bool:
        """Return true, as of everything `Arriving` that is known."""
        return True

    def result(self, timeout: float | None = None) -> Arrival:
        """Return it."""
        return self


class Handoff(Protocol):
    """The way into one decode worker's pages. `begin`, write, `finish`; a second writing may begin meanwhile."""

    @property
    def transport(self) -> str:
        """``shm``, ``cuda_ipc``, ``gloo`` or ``nccl``."""

    @property
    def pool(self) -> KVPool:
        """The pages into which prefill writes."""

    @property
    def max_pages(self) -> int | None:
        """Most pages that one writing may have; None: no bound."""

    def begin(self, leases: Sequence[Lease], num_tokens: Sequence[int]) -> Writing:
        """Make room for so many tokens of each lease. May wait until earlier writings have arrived."""

    def finish(self, writing: Writing) -> Arriving:
        """All has been written: see to it that it arrives. Every writing that began must be finished, once."""

    def close(self) -> None:
        """End the connection, if there is one. What is on its way fails."""
