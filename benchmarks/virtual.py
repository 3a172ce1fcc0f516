"""The real batch former on a virtual clock, with stub workers that take what a cost model says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from benchmarks.loads import Load
from scheduler.batching.adaptive import AdaptivePolicy
from scheduler.batching.cost_model import CostModel
from scheduler.batching.former import BatchFormer
from scheduler.batching.policies import FixedPolicy, Workers
from scheduler.batching.requests import QueuedRequest

_PLENTY = 10**9


@dataclass(frozen=True, order=True)
class Setting:
    """A policy with its parameters."""

    policy: str
    max_requests: int
    timeout_s: float

    def __str__(self) -> str:
        if self.policy == "adaptive":
            return f"adaptive, {self.max_requests} slots"
        return f"N={self.max_requests}, {1000 * self.timeout_s:g} ms"

    def former(self, cost_model: CostModel) -> BatchFormer:
        """Make an empty batch former."""
        policy_class = FixedPolicy if self.policy == "fixed" else AdaptivePolicy
        policy = policy_class(max_requests=self.max_requests, timeout_s=self.timeout_s, cost_model=cost_model)
        return BatchFormer(policy, cost_model)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a load met with."""

    ttft_s: tuple[float, ...]
    """Time to first token of each request, ascending."""
    num_batches: int
    num_tokens: int
    num_padding: int
    reasons: Counter[str]
    busy: float
    """Share of the time, from the first arrival to the last answer, in which the workers computed."""
    num_good: int
    """Requests whose first token came within the load's target."""
    seconds: float
    """From the first arrival to the last answer."""

    def quantile(self, q: float) -> float:
        """Return the time to first token that the share `q` of the requests did not exceed."""
        return self.ttft_s[min(len(self.ttft_s) - 1, int(q * len(self.ttft_s)))]

    @property
    def mean_batch(self) -> float:
        """Requests per batch."""
        return len(self.ttft_s) / self.num_batches

    @property
    def padding_share(self) -> float:
        """Share of the computed tokens that were padding."""
        return self.num_padding / (self.num_tokens + self.num_padding)

    @property
    def goodput(self) -> float:
        """Requests per second whose first token came within the load's target."""
        return self.num_good / self.seconds


def run(load: Load, setting: Setting, cost_model: CostModel, *, num_workers: int = 1) -> Outcome:
    """Play a load. The stub workers take exactly what `cost_model` says of a batch's bucket."""
    former = setting.former(cost_model)
    arrivals, next_arrival = load.arrivals, 0
    busy_until: list[float] = []
    ttft_s: list[float] = []
    num_batches = num_tokens = num_padding = 0
    busy_s, end = 0.0, 0.0
    reasons: Counter[str] = Counter()
    now = arrivals[0][0]
    while True:
        num_idle = num_workers - len(busy_until)
        wake_at = former.wake_at() if num_idle else None
        now = min(
            arrivals[next_arrival][0] if next_arrival < len(arrivals) else inf,
            busy_until[0] if busy_until else inf,
            inf if wake_at is None else wake_at,
        )
        if now == inf:
            break
        while next_arrival < len(arrivals) and arrivals[next_arrival][0] <= now:
            time, size = arrivals[next_arrival]
            former.add(
                QueuedRequest(request_id=f"{next_arrival}", num_tokens=size, num_pages=1, arrival_time=time)
            )
            next_arrival += 1
        while busy_until and busy_until[0] <= now:
            heappop(busy_until)
        while len(busy_until) < num_workers:
            formed = former.form(
                now,
                free_pages=_PLENTY,
                free_sequences=_PLENTY,
                workers=Workers(
                    num_idle=num_workers - len(busy_until),
                    num_busy=len(busy_until),
                    next_idle_at=busy_until[0] if busy_until else None,
                ),
            )
            if formed is None:
                break
            seconds = cost_model.seconds(formed.num_tokens)
            end = now + seconds
            busy_s += seconds
            heappush(busy_until, end)
            ttft_s += [end - request.arrival_time for request in formed.requests]
            num_batches += 1
            num_tokens += formed.num_tokens
            num_padding += cost_model.padded(formed.num_tokens) - formed.num_tokens
            reasons[formed.reason] += 1
    assert len(ttft_s) == len(arrivals)
    seconds = end - arrivals[0][0]
    return Outcome(
        ttft_s=tuple(sorted(ttft_s)),
        num_batches=num_batches,
        num_tokens=num_tokens,
        num_padding=num_padding,
        reasons=reasons,
        busy=busy_s / seconds / num_workers,
        num_good=sum(ttft <= load.ttft_target_s for ttft in ttft_s),
        seconds=seconds,
    )
