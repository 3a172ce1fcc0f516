"""What enters the batch former, and what leaves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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

    @property
    def num_past_deadline(self) -> int:
        """Requests whose deadline had passed when they left."""
        return sum(
            request.deadline is not None and request.deadline < self.formed_at for request in self.requests
        )
