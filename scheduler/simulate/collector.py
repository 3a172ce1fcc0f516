"""What a simulated fleet did: distributions, counts and series, in memory that does not grow with the requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.simulate.histogram import LogHistogram, TimeSeries

COMPLETED = frozenset({"stop", "length"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request must keep to count as good."""

    ttft_s: float | None = None
    itl_s: float | None = None
    """For the mean gap between the tokens of one request."""
    e2e_s: float | None = None

    def __str__(self) -> str:
        limits = {"ttft": self.ttft_s, "itl": self.itl_s, "e2e": self.e2e_s}
        return ",".join(f"{name}={1000 * value:g}ms" for name, value in limits.items() if value is not None)


@dataclass(slots=True, kw_only=True)
class RequestTimes:
    """One request, in seconds of virtual time as its client sees them."""

    arrival_s: float
    num_prompt: int
    num_output: int
    first_token_s: float | None = None
    last_token_s: float = 0.0
    outcome: str = ""
    """``length``, or the label of an error."""

    @property
    def mean_gap_s(self) -> float:
        """Mean gap between its tokens; 0 if it has one only."""
        if self.first_token_s is None or self.num_output < 2:
            return 0.0
        return (self.last_token_s - self.first_token_s) / (self.num_output - 1)

    def keeps(self, slo: Slo) -> bool:
        """Whether it was completed within the limits."""
        if self.outcome not in COMPLETED or self.first_token_s is None:
            return False
        return not (
            (slo.ttft_s is not None and self.first_token_s - self.arrival_s > slo.ttft_s)
            or (slo.itl_s is not None and self.mean_gap_s > slo.itl_s)
            or (slo.e2e_s is not None and self.last_token_s - self.arrival_s > slo.e2e_s)
        )


class Collector:
    """Owns the figures of one run."""

    def __init__(self, slo: Slo, on_request: Callable[[RequestTimes], None] | None = None) -> None:
        """`on_request` is called with each request that has ended."""
        self._slo = slo
        self._on_request = on_request
        self.ttft, self.itl, self.e2e, self.queued = (LogHistogram() for _ in range(4))
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.requeues: Counter[str] = Counter()
        self.batch_requests: Counter[int] = Counter()
        self.num_batch_tokens = self.num_padding = 0
        self.num_good = self.num_prompt_tokens = self.num_output_tokens = 0
        self.num_query_tokens = self.num_cached_tokens = 0
        self.num_deaths = 0
        self.prefill_busy_s = self.decode_busy_s = 0.0
        self.first_arrival_s: float | None = None
        self.last_arrival_s = self.last_token_s = 0.0
        self.queue_over_time = TimeSeries(is_maximum=True)
        self.arrivals_over_time = TimeSeries()
        self.prefill_over_time = TimeSeries()
        self.tokens_over_time = TimeSeries()

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(0.0, self.last_token_s - (self.first_arrival_s or 0.0))

    @property
    def num_requests(self) -> int:
        """Requests that have ended, those that were turned away among them."""
        return self.outcomes.total()

    @property
    def num_completed(self) -> int:
        """Requests that were completed."""
        return sum(count for outcome, count in self.outcomes.items() if outcome in COMPLETED)

    @property
    def good_share(self) -> float:
        """Share of all requests that kept the SLO."""
        return self.num_good / self.num_requests if self.num_requests else 0.0

    def arrived(self, now: float, num_waiting: int) -> None:
        """A request came; so many wait with it."""
        if self.first_arrival_s is None:
            self.first_arrival_s = now
        self.last_arrival_s = now
        self.arrivals_over_time.add(now, 1)
        self.queue_over_time.add(now, num_waiting)

    def batch(self, num_requests: int, reason: str) -> None:
        """A batch left the queue."""
        self.batch_requests[num_requests] += 1
        self.reasons[reason] += 1

    def looked_up(self, num_tokens: int, num_cached: int) -> None:
        """So many tokens were looked up in the prefix cache, and so many of them found."""
        self.num_query_tokens += num_tokens
        self.num_cached_tokens += num_cached

    def prefilled(self, num_tokens: int, padding: int, seconds: float, now: float) -> None:
        """A prefill worker computed a batch in `seconds`."""
        self.num_batch_tokens += num_tokens
        self.num_padding += padding
        self.prefill_busy_s += seconds
        self.prefill_over_time.add(now, seconds)

    def steps(self, num_steps: int, num_sequences: int, first_s: float, last_s: float, now: float) -> None:
        """Decode steps ended `now`, each with a token for `num_sequences`; the first and the last took so long."""
        if num_sequences > 0:
            self.itl.add_range(first_s, last_s, num_steps, num_sequences)
            self.tokens_over_time.add(now, num_steps * num_sequences)

    def gap(self, seconds: float) -> None:
        """A token came so long after the one before it, outside of a run of steps."""
        self.itl.add(seconds)

    def ended(self, times: RequestTimes) -> None:
        """A request ended."""
        self.outcomes[times.outcome] += 1
        if times.first_token_s is not None:
            self.ttft.add(times.first_token_s - times.arrival_s)
        if times.outcome in COMPLETED:
            self.num_prompt_tokens += times.num_prompt
            self.num_output_tokens += times.num_output
            self.e2e.add(times.last_token_s - times.arrival_s)
            self.last_token_s = max(self.last_token_s, times.last_token_s)
            self.num_good += times.keeps(self._slo)
        if self._on_request is not None:
            self._on_request(times)
