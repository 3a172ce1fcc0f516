"""Batch policies under loads: the simulator with workers that prefill and take what a cost model says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from benchmarks.loads import Load
from scheduler.batching.cost_model import CostModel
from scheduler.simulate.collector import Collector, RequestTimes, Slo
from scheduler.simulate.engine import Simulation
from scheduler.simulate.fleet import FleetSettings
from scheduler.simulate.fleet_costs import FleetCosts
from scheduler.simulate.traces import Arrival

_PLENTY = 10_000
"""Pages and sequences."""


@dataclass(frozen=True, order=True)
class Setting:
    """A policy with its parameters."""

    policy: Literal["fixed", "adaptive"]
    max_requests: int
    timeout_s: float

    def __str__(self) -> str:
        if self.policy == "adaptive":
            return f"adaptive, {self.max_requests} slots"
        return f"N={self.max_requests}, {1000 * self.timeout_s:g} ms"


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
    """Play a load on a fleet that only prefills. Its workers take what `cost_model` says of a batch's buckets."""
    ttft_s: list[float] = []

    def on_request(times: RequestTimes) -> None:
        assert times.first_token_s is not None, times.outcome
        ttft_s.append(times.first_token_s - times.arrival_s)

    collector = Collector(Slo(), on_request)
    costs = FleetCosts(
        name="stub",
        prefill_seconds={f"{n}x{setting.max_requests}": seconds for n, seconds in cost_model.table().items()},
        decode_seconds={f"{_PLENTY}": 1.0},
        decode_seconds_per_context_token=0.0,
        page_size=1024,
        num_pages=_PLENTY,
        max_model_len=1024 * _PLENTY,
    )
    settings = FleetSettings(
        prefill_workers=num_workers,
        batch_policy=setting.policy,
        max_batch_requests=setting.max_requests,
        batch_timeout_s=setting.timeout_s,
        max_num_seqs=_PLENTY,
        max_queued_requests=10**9,
        max_queued_tokens=10**12,
    )
    # One token each, which is prefill's: nothing is left to decode.
    Simulation(settings, costs, collector).run(Arrival(time_s, size, 1) for time_s, size in load.arrivals)
    assert len(ttft_s) == len(load.arrivals)
    return Outcome(
        ttft_s=tuple(sorted(ttft_s)),
        num_batches=collector.batch_requests.total(),
        num_tokens=collector.num_batch_tokens,
        num_padding=collector.num_padding,
        reasons=collector.reasons,
        busy=collector.prefill_busy_s / collector.seconds / num_workers,
        num_good=sum(ttft <= load.ttft_target_s for ttft in ttft_s),
        seconds=collector.seconds,
    )
