"""What enters the batch former, and what leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

DispatchReason = Literal["full", "timeout", "deadline", "saturated", "idle"]
"""Why a batch left.

full: no more requests, pages or sequences fit. timeout: its oldest request was held as long as a request is.
deadline: a request would miss its deadline. saturated: one more token costs as much as it brings. idle:
waiting for another request would not pay.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """What the batch former needs to know of a waiting request."""

    request_id: str
    num_tokens: int
    """Tokens that its prefill computes."""
    num_pages: int
    """KV pages that it needs before it may be prefilled."""
    arrival_time: float
    """Seconds, on the caller's clock."""
    priority: int = 0
    """Its class. Smaller is served first."""
    deadline: float | None = None
    """When its first token is wished for, in seconds on the caller's clock."""
    tenant: str = ""
    """Whose request it is, for fairness within its class."""
    may_be_cached: bool = False
    """Whether what it takes depends on what is cached: a `CacheView` knows."""


class Work(NamedTuple):
    """What the prefill of a request takes with what is cached now."""

    num_tokens: int
    """Tokens that it computes, >= 1."""
    num_used_pages: int
    """Of its pages, those that others hold already: they need not be free."""


class CacheView(Protocol):
    """What is cached where a batch would go. Made anew for each batch."""

    @property
    def num_followers(self) -> int:
        """Requests so far that wait for blocks which others compute that were looked at before them."""

    def look(self, request_id: str) -> Work | None:
        """Return what a request takes if it leaves with those that were looked at before, or None if it should wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormedBatch:
    """Requests that leave the queue together, in the order in which they were to be served."""

    requests: tuple[QueuedRequest, ...]
    reason: DispatchReason
    formed_at: float
    """Seconds, on the caller's clock."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all its requests."""
        return sum(request.num_tokens for request in self.requests)

    def computing(self, num_tokens: Sequence[int]) -> FormedBatch:
        """Return the same batch with the tokens that its requests turn out to compute, of each."""
        if all(n == request.num_tokens for n, request in zip(num_tokens, self.requests, strict=True)):
            return self
        requests = [replace(r, num_tokens=n) for n, r in zip(num_tokens, self.requests, strict=True)]
        return replace(self, requests=tuple(requests))

    @property
    def num_past_deadline(self) -> int:
        """Requests whose deadline had passed when they left."""
        return sum(
            request.deadline is not None and request.deadline < self.formed_at for request in self.requests
        )
