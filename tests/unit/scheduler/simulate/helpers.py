"""Small cost models and loads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from scheduler.simulate.collector import Collector, RequestTimes, Slo
from scheduler.simulate.engine import Simulation
from scheduler.simulate.fleet import FleetSettings
from scheduler.simulate.fleet_costs import FleetCosts
from scheduler.simulate.traces import Arrival

COSTS = FleetCosts(
    name="test",
    prefill_seconds={"64x8": 0.010, "128x8": 0.015, "512x8": 0.050},
    decode_seconds={"8": 0.005, "64": 0.006},
    decode_seconds_per_context_token=0.0,
    page_size=16,
    num_pages=1000,
    max_model_len=2048,
)


def costs(**changes: Any) -> FleetCosts:
    return replace(COSTS, **changes)


def run(
    arrivals: Iterable[Arrival],
    settings: FleetSettings | None = None,
    of: FleetCosts = COSTS,
    slo: Slo | None = None,
) -> tuple[list[RequestTimes], Collector]:
    """Play a load; return each request's times, in the order of their ends, and the figures."""
    ended: list[RequestTimes] = []
    collector = Collector(slo or Slo(), ended.append)
    Simulation(settings or FleetSettings(), of, collector).run(iter(arrivals))
    return ended, collector
