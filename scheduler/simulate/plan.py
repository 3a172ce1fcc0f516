"""`purefill plan`: the least fleet that holds an SLO under a load."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

from scheduler.errors import ConfigError
from scheduler.simulate.collector import Collector, RequestTimes, Slo
from scheduler.simulate.engine import Simulation
from scheduler.simulate.fleet import FleetSettings
from scheduler.simulate.fleet_costs import FleetCosts
from scheduler.simulate.options import LoadOptions, costs_of, load_of, parse_slo
from scheduler.simulate.traces import Arrival

_TIMEOUTS_MS = (5.0, 20.0)
_FIXED_SIZES = (1, 4, 8, 16)
_ADAPTIVE_SLOTS = (16, 32)
_ADAPTIVE_TIMEOUT_MS = 50.0


class _MissedError(Exception):
    """So many requests missed the SLO that the rest cannot make up for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A fleet that holds the SLO, and what it gives."""

    fleet: FleetSettings
    good_share: float
    ttft_p99_s: float
    itl_p99_s: float
    seconds: float
    num_tokens: int
    """Prompts and answers."""

    def cost_per_million_tokens(self, gpu_price_per_hour: float) -> float:
        """Return the price of a million tokens, prompts and answers alike."""
        return 1e6 * gpu_price_per_hour * self.fleet.num_gpus * self.seconds / 3600 / max(1, self.num_tokens)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is planned for."""

    arrivals: Sequence[Arrival]
    costs: FleetCosts
    slo: Slo
    good_share: float
    """Share of the requests that must keep the SLO."""
    max_gpus: int

    def try_out(self, fleet: FleetSettings) -> Plan | None:
        """Simulate a fleet; return what it gives if it holds the SLO."""
        most_missed = int((1 - self.good_share) * len(self.arrivals))
        num_missed = 0

        def on_request(times: RequestTimes) -> None:
            nonlocal num_missed
            num_missed += not times.keeps(self.slo)
            if num_missed > most_missed:
                raise _MissedError

        collector = Collector(self.slo, on_request)
        try:
            Simulation(fleet, self.costs, collector).run(iter(self.arrivals))
        except _MissedError:
            return None
        return Plan(
            fleet=fleet,
            good_share=collector.good_share,
            ttft_p99_s=collector.ttft.quantile(0.99),
            itl_p99_s=collector.itl.quantile(0.99),
            seconds=collector.seconds,
            num_tokens=collector.num_prompt_tokens + collector.num_output_tokens,
        )

    def least(self, setting: FleetSettings) -> Plan | None:
        """Return the least fleet with these batch settings that holds the SLO, or None if none does.

        More workers of a kind never hurt, so the least number of each is found by bisection with as many of the other
        as there may be. Where both together do not suffice, fleets of one more GPU are tried, and so on.
        """
        most = self.max_gpus - 1

        def with_workers(prefill: int, decode: int) -> Plan | None:
            return self.try_out(replace(setting, prefill_workers=prefill, decode_workers=decode))

        if with_workers(most, most) is None:
            return None
        num_prefill = _first_that(most, lambda n: with_workers(n, most) is not None)
        num_decode = _first_that(most, lambda n: with_workers(num_prefill, n) is not None)
        for extra in range(self.max_gpus - num_prefill - num_decode + 1):
            for more in range(extra + 1):
                plan = with_workers(num_prefill + more, num_decode + extra - more)
                if plan is not None:
                    return plan
        return None


def settings_to_try(base: FleetSettings) -> Iterator[FleetSettings]:
    """Yield the policies, batch sizes and timeouts that are compared."""
    for size in _FIXED_SIZES:
        for timeout_ms in _TIMEOUTS_MS if size > 1 else (0.0,):
            yield replace(
                base, batch_policy="fixed", max_batch_requests=size, batch_timeout_s=timeout_ms / 1000
            )
    for size in _ADAPTIVE_SLOTS:
        yield replace(
            base,
            batch_policy="adaptive",
            max_batch_requests=size,
            batch_timeout_s=_ADAPTIVE_TIMEOUT_MS / 1000,
        )


def find_plans(
    question: Question, settings: Sequence[FleetSettings], *, num_processes: int, say: Callable[[str], None]
) -> list[Plan]:
    """Return the least fleet of each setting that has one, least first; `say` is told of the progress."""
    found: dict[int, Plan | None] = {}
    with ProcessPoolExecutor(
        min(num_processes, len(settings)), initializer=_begin, initargs=(question,)
    ) as pool:
        futures = {pool.submit(_least, setting): i for i, setting in enumerate(settings)}
        for future in as_completed(futures):
            i = futures[future]
            plan = found[i] = future.result()
            gpus = "no fleet holds the SLO" if plan is None else f"{plan.fleet.num_gpus} GPUs"
            say(f"{len(found)} of {len(settings)}: {_policy(settings[i])}: {gpus}")
    plans = [plan for i in sorted(found) if (plan := found[i]) is not None]
    return sorted(plans, key=lambda plan: (plan.fleet.num_gpus, plan.ttft_p99_s))


def serve_settings(plan: Plan) -> dict[str, object]:
    """Return the settings of `purefill serve` that realise a plan."""
    fleet = plan.fleet
    return {
        "prefill_workers": fleet.prefill_workers,
        "decode_workers": fleet.decode_workers,
        "batch_policy": fleet.batch_policy,
        "max_batch_requests": fleet.max_batch_requests,
        "batch_timeout_ms": 1000 * fleet.batch_timeout_s,
        "max_num_seqs": fleet.max_num_seqs,
        "max_queued_requests": fleet.max_queued_requests,
        "max_queued_tokens": fleet.max_queued_tokens,
    }


def run_plan(options: argparse.Namespace) -> int:
    """Run the command; return 0, or 1 if no fleet holds the SLO. Raises `ConfigError` for what is wrong."""
    slo, costs = parse_slo(options.slo), costs_of(options)
    if not str(slo):
        raise ConfigError("slo must name a limit, such as ttft=200ms")
    if not 0 < options.good_share <= 1:
        raise ConfigError(f"good_share must be > 0 and <= 1, got {options.good_share:g}")
    for name, value, least in (("max_gpus", options.max_gpus, 2), ("processes", options.processes, 1)):
        if value < least:
            raise ConfigError(f"{name} must be >= {least}, got {value}")
    load = load_of(options)
    base = FleetSettings(
        max_num_seqs=options.max_num_seqs,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
    )
    question = _question(load, costs, slo, options)
    settings = [s for s in settings_to_try(base) if s.max_batch_requests <= options.max_num_seqs]
    plans = find_plans(
        question,
        settings,
        num_processes=options.processes,
        say=lambda line: print(f"purefill: {line}", file=sys.stderr, flush=True),
    )
    if options.json:
        print(json.dumps([_as_json(plan, options.gpu_price) for plan in plans], indent=1))
    else:
        print(_frontier(plans, load, slo, options.gpu_price))
    return 0 if plans else 1


def _question(load: LoadOptions, costs: FleetCosts, slo: Slo, options: argparse.Namespace) -> Question:
    return Question(
        arrivals=tuple(load.arrivals()),
        costs=costs,
        slo=slo,
        good_share=options.good_share,
        max_gpus=options.max_gpus,
    )


_asked: list[Question] = []
"""In a process that searches: what it searches for."""


def _begin(question: Question) -> None:
    _asked.append(question)


def _least(setting: FleetSettings) -> Plan | None:
    return _asked[-1].least(setting)


def _first_that(most: int, holds: Callable[[int], bool]) -> int:
    """Return the least number from 1 for which `holds`, which is true of `most` and of all above the least."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _policy(fleet: FleetSettings) -> str:
    return f"{fleet.batch_policy}, {fleet.max_batch_requests} or {1000 * fleet.batch_timeout_s:g} ms"


def _as_json(plan: Plan, price: float | None) -> dict[str, object]:
    figures: dict[str, object] = {
        "gpus": plan.fleet.num_gpus,
        "good_share": plan.good_share,
        "ttft_p99_ms": 1000 * plan.ttft_p99_s,
        "itl_p99_ms": 1000 * plan.itl_p99_s,
        "serve": serve_settings(plan),
    }
    if price is not None:
        figures["cost_per_million_tokens"] = plan.cost_per_million_tokens(price)
    return figures


def _frontier(plans: Sequence[Plan], load: LoadOptions, slo: Slo, price: float | None) -> str:
    if not plans:
        return f"{load.name}: no fleet of that many GPUs holds {slo}"
    lines = [
        f"{load.name}, {slo}",
        f"{'policy':<26}{'GPUs':>6}{'prefill':>9}{'decode':>8}{'good':>9}{'TTFT p99':>11}{'ITL p99':>10}"
        + (f"{'per M tokens':>14}" if price is not None else ""),
    ]
    lines += [
        f"{_policy(plan.fleet):<26}{plan.fleet.num_gpus:>6}{plan.fleet.prefill_workers:>9}"
        f"{plan.fleet.decode_workers:>8}{plan.good_share:>9.2%}{1000 * plan.ttft_p99_s:>8.1f} ms"
        f"{1000 * plan.itl_p99_s:>7.1f} ms"
        + (f"{plan.cost_per_million_tokens(price):>14.4f}" if price is not None else "")
        for plan in plans
    ]
    chosen = serve_settings(plans[0])
    flags = " ".join(f"--{name.replace('_', '-')} {_plain(value)}" for name, value in chosen.items())
    own = {name: value for name, value in chosen.items() if not name.endswith("_workers")}
    lines += ["", f"purefill serve {flags}", "", "values of the Helm chart, with a GPU for each pod:"]
    lines += ["config:", *(f"  {name}: {_plain(value)}" for name, value in own.items())]
    for kind in ("prefill", "decode"):
        lines += [f"{kind}:", f"  replicas: {chosen[f'{kind}_workers']}"]
    return "\n".join(lines)


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
