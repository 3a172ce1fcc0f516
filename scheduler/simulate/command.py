"""`purefill simulate`: one fleet under one load."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from scheduler.errors import ConfigError
from scheduler.simulate.collector import Collector, Slo
from scheduler.simulate.engine import Simulation
from scheduler.simulate.fleet import FleetSettings
from scheduler.simulate.fleet_costs import FleetCosts
from scheduler.simulate.options import LoadOptions, costs_of, fleet_of, load_of, parse_slo
from scheduler.simulate.page import page
from scheduler.simulate.report import summarize, table


def simulate(
    settings: FleetSettings,
    costs: FleetCosts,
    load: LoadOptions,
    *,
    slo: Slo,
    gpu_price_per_hour: float | None = None,
) -> tuple[dict[str, Any], Collector]:
    """Play a load on a fleet; return the figures, and what they were made from. Raises `ConfigError`."""
    collector = Collector(slo)
    Simulation(settings, costs, collector).run(load.arrivals())
    summary = summarize(
        settings, costs, collector, load=load.name, slo=slo, gpu_price_per_hour=gpu_price_per_hour
    )
    return summary, collector


def run_simulate(options: argparse.Namespace) -> int:
    """Run the command; return its exit code. Raises `ConfigError` in one line for what is wrong."""
    slo, costs, settings = parse_slo(options.slo), costs_of(options), fleet_of(options)
    if options.gpu_price is not None and not options.gpu_price >= 0:
        raise ConfigError(f"gpu_price must be >= 0, got {options.gpu_price:g}")
    started = time.perf_counter()
    summary, collector = simulate(
        settings, costs, load_of(options), slo=slo, gpu_price_per_hour=options.gpu_price
    )
    seconds = time.perf_counter() - started
    if options.html is not None:
        try:
            options.html.write_text(page(summary, collector), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"html file {options.html} cannot be written: {error.strerror}") from error
    print(json.dumps(summary, indent=1) if options.json else table(summary))
    # Not on stdout, which is the same for the same seed.
    print(f"purefill: {summary['requests']:,} requests in {seconds:.1f} s", file=sys.stderr)
    return 0
