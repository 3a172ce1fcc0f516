"""Admission: how much may wait, who is turned away, and when they should come back.

A request passes twice. The ApiServer asks with the characters of its prompts, before it spends time on
tokenising; the Scheduler with their tokens, before it takes them into the queue. Both hold an `Admission`.
The queue's owner says what waits (`QueueState`); an admission adds what it has let in and the queue does not
hold yet.
"""

from __future__ import annotations

from math import exp
from types import TracebackType
from typing import Self

from scheduler.errors import InvalidRequestError, OverloadedError
from scheduler.messages import QueueState

_RATE_WINDOW_S = 10.0
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_STATE_LIFE_S = 0.1
"""What was said of a queue longer ago than this is no reason to turn anybody away."""
_FIRST_CHARS_PER_TOKEN = 4.0
_CHARS_KEPT = 0.99
"""How much of the past the average of characters per token keeps at each request."""


class DrainRate:
    """Owns how fast a queue drained in its last 10 s, not counting time in which nothing waited."""

    def __init__(self) -> None:
        self._requests = self._tokens = self._busy_s = 0.0
        self._busy_since: float | None = None

    def arrived(self, now: float) -> None:
        """Something came into the queue."""
        if self._busy_since is None:
            self._busy_since = now

    def left(self, num_requests: int, num_tokens: int, now: float, *, is_empty: bool) -> None:
        """Requests left the queue to be served; `is_empty` says whether they were the last.

        With no requests, the queue just became empty, by cancellation.
        """
        elapsed = 0.0 if self._busy_since is None else now - self._busy_since
        kept = exp(-elapsed / _RATE_WINDOW_S)
        self._requests = kept * self._requests + num_requests
        self._tokens = kept * self._tokens + num_tokens
        self._busy_s = kept * self._busy_s + elapsed
        self._busy_since = None if is_empty else now

    def state(self, num_requests: int, num_tokens: int, now: float) -> QueueState:
        """Return the state of the queue, in which so many requests and tokens wait."""
        busy_s = self._busy_s + (0.0 if self._busy_since is None else now - self._busy_since)
        if not self._requests or not busy_s:
            return QueueState(num_requests=num_requests, num_tokens=num_tokens)
        return QueueState(
            num_requests=num_requests,
            num_tokens=num_tokens,
            requests_per_s=self._requests / busy_s,
            tokens_per_s=self._tokens / busy_s,
        )


class Permit:
    """The right of some requests to be on their way into the queue. A context manager: it ends with its
    scope.

    Ending it twice does no harm.
    """

    def __init__(self, owner: Admission, num_requests: int, num_tokens: int, num_chars: int | None) -> None:
        self._owner = owner
        self.num_requests = num_requests
        self.num_tokens = num_tokens
        """Exact, or estimated from the characters until `settle` is called."""
        self._num_chars = num_chars

    def settle(self, num_tokens: int) -> None:
        """Tell how many tokens the prompts turned out to have."""
        self._owner._settled(self, num_tokens, self._num_chars)

    def close(self) -> None:
        """End the permit: the requests are in the queue, or will never be."""
        self._owner._closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Admission:
    """Owns the open permits and the limits of one process. Of the queue it knows what it is told."""

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        """Raises `ValueError`, naming the parameter, if one is below 1."""
        for name, value in (("max_requests", max_requests), ("max_tokens", max_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._state = QueueState()
        self._state_ends_at = 0.0
        self._open: set[Permit] = set()
        self._open_requests = 0
        self._open_tokens = 0
        self._chars = _FIRST_CHARS_PER_TOKEN
        self._tokens = 1.0

    @property
    def num_requests(self) -> int:
        """Requests that wait or are on their way."""
        return self._state.num_requests + self._open_requests

    @property
    def num_tokens(self) -> int:
        """Tokens of the requests that wait or are on their way, some of them estimated."""
        return self._state.num_tokens + self._open_tokens

    def update(self, state: QueueState, now: float) -> None:
        """Take in what the queue's owner says."""
        self._state = state
        self._state_ends_at = now + _STATE_LIFE_S

    def admit(self, num_requests: int, num_tokens: int, now: float) -> Permit:
        """Let requests in whose prompts have so many tokens together.

        Raises `OverloadedError` if they would be too many now, and `InvalidRequestError` if they always
        would.
        """
        self.check(num_requests, num_tokens, now)
        return self._permit(num_requests, num_tokens, None)

    def check(self, num_requests: int, num_tokens: int, now: float) -> None:
        """Raise as `admit` does, but let nothing in."""
        self._check_size(num_requests, num_tokens)
        self._check_room(num_requests, num_tokens, now)

    def admit_text(self, num_requests: int, num_chars: int, now: float, *, num_tokens: int = 0) -> Permit:
        """Let requests in whose prompts have so many characters together, before they are tokenised.

        `num_tokens` are those of prompts that came as tokens. Raises `OverloadedError` if all that would probably
        be too much now, and `InvalidRequestError` if the sequences, or the prompts that came as tokens, always would.
        `settle` the permit when the tokens are known.
        """
        self._check_size(num_requests, num_tokens)
        num_tokens += self.estimated_tokens(num_chars)
        self._check_room(num_requests, num_tokens, now)
        return self._permit(num_requests, num_tokens, num_chars)

    def estimated_tokens(self, num_chars: int) -> int:
        """Return about how many tokens so many characters are, as prompts of late had it."""
        return round(num_chars * self._tokens / self._chars)

    def _check_size(self, num_requests: int, num_tokens: int) -> None:
        """Raise `InvalidRequestError` for what would not even fit into an empty queue."""
        if num_requests > self._max_requests:
            raise InvalidRequestError(
                f"a request must hold at most {self._max_requests} sequences, the size of the queue, "
                f"got {num_requests} (prompts times n)",
                param="n",
            )
        if num_tokens > self._max_tokens:
            raise InvalidRequestError(
                f"the prompts of a request must have at most {self._max_tokens} tokens together, the size "
                f"of the queue, got {num_tokens} (tokens times n)",
                param="prompt",
            )

    def _check_room(self, num_requests: int, num_tokens: int, now: float) -> None:
        """Raise `OverloadedError` for what does not fit into the queue now."""
        if now > self._state_ends_at:
            self._state = QueueState()
        excess_requests = self.num_requests + num_requests - self._max_requests
        excess_tokens = self.num_tokens + num_tokens - self._max_tokens
        if self.num_requests and (excess_requests > 0 or excess_tokens > 0):
            raise OverloadedError(
                f"the queue is full: {self.num_requests} requests of {self.num_tokens} tokens wait",
                retry_after_s=self._retry_after_s(excess_requests, excess_tokens),
            )

    def _permit(self, num_requests: int, num_tokens: int, num_chars: int | None) -> Permit:
        permit = Permit(self, num_requests, num_tokens, num_chars)
        self._open.add(permit)
        self._open_requests += num_requests
        self._open_tokens += num_tokens
        return permit

    def _retry_after_s(self, excess_requests: int, excess_tokens: int) -> float:
        """Return how long the queue needs to drain so far."""
        wait_s = _MIN_RETRY_S
        for excess, rate in (
            (excess_requests, self._state.requests_per_s),
            (excess_tokens, self._state.tokens_per_s),
        ):
            if excess > 0 and rate is not None:
                wait_s = max(wait_s, excess / rate if rate > 0 else _MAX_RETRY_S)
        return min(wait_s, _MAX_RETRY_S)

    def _settled(self, permit: Permit, num_tokens: int, num_chars: int | None) -> None:
        if num_chars:
            self._chars = _CHARS_KEPT * self._chars + num_chars
            self._tokens = _CHARS_KEPT * self._tokens + num_tokens
        if permit in self._open:
            self._open_tokens += num_tokens - permit.num_tokens
        permit.num_tokens = num_tokens

    def _closed(self, permit: Permit) -> None:
        if permit in self._open:
            self._open.remove(permit)
            self._open_requests -= permit.num_requests
            self._open_tokens -= permit.num_tokens
