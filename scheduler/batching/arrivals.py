"""What the arrivals of the last seconds say about the next one."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import pairwise

_MAX_GAPS = 128
_WINDOW_S = 5.0
_MIN_GAPS = 8
"""From fewer gaps than this nothing is foretold."""


class Arrivals:
    """Owns the times of the last arrivals: at most 129, none older than 5 s.

    The next arrival is foretold from the gaps between them, with no assumption on how those are distributed:
    of the gaps that were longer than the present silence, how many ended soon after? In a steady stream that
    gives the usual rate; within a burst the burst's; and once the silence is longer than any gap, nothing is
    expected.
    """

    def __init__(self) -> None:
        self._times: deque[float] = deque()
        self._tokens: deque[int] = deque()
        self._num_tokens = 0

    def observe(self, now: float, num_tokens: int) -> None:
        """A request of `num_tokens` tokens arrived. One that is reported late counts as of the last."""
        self._times.append(max(now, self._times[-1]) if self._times else now)
        self._tokens.append(num_tokens)
        self._num_tokens += num_tokens
        self._forget(now)

    def rate(self, now: float) -> float:
        """Return arrivals per second of late, the present silence included."""
        self._forget(now)
        if len(self._times) < 2 or now <= self._times[0]:
            return 0.0
        return (len(self._times) - 1) / (now - self._times[0])

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of the requests that arrived of late; 0 if none did."""
        return self._num_tokens / len(self._tokens) if self._tokens else 0.0

    def gaps(self, now: float) -> list[float]:
        """Return the seconds between the arrivals of late, ascending; none if there were too few."""
        self._forget(now)
        return sorted(later - earlier for earlier, later in pairwise(self._times)) if self._enough else []

    def silence(self, now: float) -> float:
        """Return the seconds since the last arrival; 0 if there was none of late."""
        return now - self._times[-1] if self._times else 0.0

    @property
    def _enough(self) -> bool:
        return len(self._times) > _MIN_GAPS

    def _forget(self, now: float) -> None:
        times = self._times
        while times and (len(times) > _MAX_GAPS + 1 or now - times[0] > _WINDOW_S):
            times.popleft()
            self._num_tokens -= self._tokens.popleft()


def share_and_mean(gaps: list[float], longer_than: float, at_most: float) -> tuple[float, float]:
    """Return, of the ascending `gaps` longer than one number, what share is at most another, and their mean.

    One gap more than was seen, an endless one, is counted: what was never seen may still happen. So the
    share is below 1. The mean is 0 if there is none.
    """
    start, stop = bisect_right(gaps, longer_than), bisect_right(gaps, at_most)
    if stop <= start:
        return 0.0, 0.0
    return (stop - start) / (len(gaps) - start + 1), sum(gaps[start:stop]) / (stop - start)
