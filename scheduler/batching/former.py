"""The batch former: holds waiting requests and says when which of them leave as one prefill batch."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

DispatchReason = Literal["full", "timeout", "deadline", "saturated", "idle"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FormedBatch:
    """Requests that leave the queue together, oldest first."""

    requests: tuple[QueuedRequest, ...]
    reason: DispatchReason

    @property
    def num_tokens(self) -> int:
        """Tokens of all its requests."""
        return sum(request.num_tokens for request in self.requests)


class BatchFormer:
    """Owns the waiting requests, in order. Knows no clock, no worker and no Ray.

    Policy `fixed`: a batch leaves when `max_requests` wait, when its tokens reach `max_tokens`, or when the
    oldest request has waited `timeout_s` since its own arrival.
    """

    def __init__(self, *, max_requests: int, timeout_s: float, max_tokens: int | None = None) -> None:
        self._max_requests = max_requests
        self._timeout_s = timeout_s
        self._max_tokens = max_tokens
        self._waiting: OrderedDict[str, QueuedRequest] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def num_tokens(self) -> int:
        """Tokens of all waiting requests."""
        return self._num_tokens

    def add(self, request: QueuedRequest, *, front: bool = False) -> None:
        """Queue a request; `front` is for one that was already dispatched and must be computed again."""
        self._waiting[request.request_id] = request
        if front:
            self._waiting.move_to_end(request.request_id, last=False)
        self._num_tokens += request.num_tokens

    def remove(self, request_id: str) -> bool:
        """Take a request out of the queue. Returns False if it does not wait here."""
        request = self._waiting.pop(request_id, None)
        if request is None:
            return False
        self._num_tokens -= request.num_tokens
        return True

    def form(self, now: float, *, free_pages: int, free_sequences: int) -> FormedBatch | None:
        """Return the batch to send now to an idle prefill worker, or None to hold.

        The batch's pages and sequences fit what the chosen decode worker has free. Its requests leave the queue.
        """
        chosen, reason = self._choose(free_pages, free_sequences)
        if not chosen:
            return None
        if reason is None and now >= self._due(chosen[0]):
            reason = "timeout"
        if reason is None:
            return None
        for request in chosen:
            self.remove(request.request_id)
        return FormedBatch(requests=tuple(chosen), reason=reason)

    def wake_at(self) -> float | None:
        """Return when `form` must be asked again if nothing else happens before, or None if nothing waits."""
        oldest = next(iter(self._waiting.values()), None)
        return None if oldest is None else self._due(oldest)

    def _due(self, request: QueuedRequest) -> float:
        return request.arrival_time + self._timeout_s

    def _choose(
        self, free_pages: int, free_sequences: int
    ) -> tuple[list[QueuedRequest], DispatchReason | None]:
        """Return the oldest requests that may leave together, and "full" if no more may join them."""
        chosen: list[QueuedRequest] = []
        num_tokens = num_pages = 0
        for request in self._waiting.values():
            num_pages += request.num_pages
            if num_pages > free_pages or len(chosen) >= free_sequences:
                break
            if self._max_tokens and chosen and num_tokens + request.num_tokens > self._max_tokens:
                return chosen, "full"
            chosen.append(request)
            num_tokens += request.num_tokens
            if len(chosen) >= self._max_requests or (self._max_tokens and num_tokens >= self._max_tokens):
                return chosen, "full"
        return chosen, None
