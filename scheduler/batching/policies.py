"""When a batch leaves. A policy is told of every arrival and, while a worker is idle, asked about a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduler.batching.cost_model import CostModel
from scheduler.batching.requests import DispatchReason, QueuedRequest


class Workers(NamedTuple):
    """The prefill workers, as far as they matter to a batch that one of them would take."""

    num_idle: int = 1
    """Workers that are idle, the one that would take the batch included."""
    num_busy: int = 0
    next_idle_at: float | None = None
    """When the first of the busy workers is expected to be idle; None if none is busy."""


class QueueView(NamedTuple):
    """What a policy may know before a batch is chosen. Times in seconds, on the caller's clock."""

    now: float
    num_requests: int
    """Requests that wait."""
    num_tokens: int
    """Tokens of the requests that wait."""
    workers: Workers


class BatchView(NamedTuple):
    """What a policy may know of a batch that could leave now."""

    now: float
    requests: Sequence[QueuedRequest]
    num_tokens: int
    is_full: bool
    """No more requests can join, or one that waits cannot."""
    is_saturated: bool
    """It is full because it has enough tokens."""
    most_requests: int
    """What the policy said before the batch was chosen."""
    workers: Workers

    @property
    def oldest_arrival(self) -> float:
        """When the oldest of its requests arrived."""
        return min([request.arrival_time for request in self.requests])

    @property
    def earliest_deadline(self) -> float | None:
        """The earliest deadline of its requests, or None if none has one."""
        deadlines = [request.deadline for request in self.requests if request.deadline is not None]
        return min(deadlines, default=None)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The batch leaves now."""

    reason: DispatchReason


@dataclass(frozen=True, slots=True)
class Hold:
    """The batch is held for others to join it."""

    until: float
    """When to decide again, if nothing happens before. Later than now."""


class BatchPolicy(Protocol):
    """Decides when a batch leaves, and how large it may be."""

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of a batch, unless a single request has more. None: no bound."""

    @property
    def enough_tokens(self) -> int | None:
        """Tokens that make a batch full, though it may get more if that pays. None: no number does."""

    @property
    def may_resize(self) -> bool:
        """Whether a batch that leaves some behind may have fewer requests than fit, or more tokens."""

    def arrived(self, now: float, num_tokens: int) -> None:
        """A request of `num_tokens` tokens arrived."""

    def most_requests(self, queue: QueueView) -> int:
        """Return how many requests the next batch may have at most."""

    def decide(self, batch: BatchView) -> Dispatch | Hold:
        """Return whether a batch leaves now."""


class FixedPolicy:
    """A batch leaves once `max_requests` wait, or `max_tokens` tokens, or the oldest has waited `timeout_s`.

    The wait counts from the request's own arrival; a new arrival never restarts it. A batch also leaves when
    holding it longer would make a request miss its deadline.
    """

    may_resize = False

    def __init__(
        self, *, max_requests: int, timeout_s: float, max_tokens: int | None = None, cost_model: CostModel
    ) -> None:
        """Raises `ValueError`, naming the parameter, if one is out of range."""
        check_limits(max_requests, timeout_s, max_tokens)
        self.max_requests = max_requests
        self.max_tokens = self.enough_tokens = max_tokens
        self._timeout_s = timeout_s
        self._cost = cost_model

    def arrived(self, now: float, num_tokens: int) -> None:
        """Arrivals do not matter to this policy."""

    def most_requests(self, queue: QueueView) -> int:
        """Return how many requests the next batch may have at most: always as many as were set."""
        return self.max_requests

    def decide(self, batch: BatchView) -> Dispatch | Hold:
        """Return whether a batch leaves now."""
        if batch.is_full:
            return Dispatch("full")
        return dispatch_if_due(batch, self._timeout_s, self._cost.seconds(batch.num_tokens))


def dispatch_if_due(batch: BatchView, timeout_s: float, seconds: float) -> Dispatch | Hold:
    """Dispatch a batch that takes `seconds` if it can be held no longer; else hold it until that is so."""
    times_out_at = batch.oldest_arrival + timeout_s
    if batch.now >= times_out_at:
        return Dispatch("timeout")
    deadline = batch.earliest_deadline
    if deadline is None:
        return Hold(times_out_at)
    latest = deadline - seconds
    return Dispatch("deadline") if batch.now >= latest else Hold(min(times_out_at, latest))


def check_limits(max_requests: int, timeout_s: float, max_tokens: int | None) -> None:
    """Raise `ValueError`, naming the parameter, if one is out of range."""
    if max_requests < 1:
        raise ValueError(f"max_requests must be >= 1, got {max_requests}")
    if not timeout_s >= 0:
        raise ValueError(f"timeout_s must be >= 0, got {timeout_s}")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
