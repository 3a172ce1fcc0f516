"""The options of `purefill simulate` and `purefill plan`, and what they mean."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scheduler.errors import ConfigError
from scheduler.simulate.collector import Slo
from scheduler.simulate.fleet import Failures, FleetSettings
from scheduler.simulate.fleet_costs import FleetCosts, read_costs
from scheduler.simulate.synthetic import KINDS, parse_load
from scheduler.simulate.traces import Arrival, played, read_trace

_SLO_FIELDS = {"ttft": "ttft_s", "itl": "itl_s", "e2e": "e2e_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Which load is played, and how."""

    trace: str
    speed_up: float
    repeat: int
    requests: int | None
    seed: int

    def __post_init__(self) -> None:
        if not 0 < self.speed_up < float("inf"):
            raise ConfigError(f"speed_up must be > 0, got {self.speed_up:g}")
        for name, value in (("repeat", self.repeat), ("requests", self.requests)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")

    @property
    def name(self) -> str:
        """What it is called in reports."""
        name = self.trace if self._is_synthetic else Path(self.trace).name
        speed = f", {self.speed_up:g}x" if self.speed_up != 1 else ""
        return name + speed + (f", {self.repeat} times" if self.repeat > 1 else "")

    @property
    def _is_synthetic(self) -> bool:
        return self.trace.partition(":")[0] in KINDS

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the load from its begin. Raises `ConfigError` for what is wrong with it."""
        if self._is_synthetic:
            load = parse_load(self.trace)
            return played(
                lambda: load.arrivals(self.seed),
                speed_up=self.speed_up,
                repeat=self.repeat,
                limit=self.requests,
            )
        path = Path(self.trace).expanduser()
        return played(
            lambda: read_trace(path), speed_up=self.speed_up, repeat=self.repeat, limit=self.requests
        )


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Give `parser` what both commands have."""
    parser.add_argument(
        "--trace",
        required=True,
        metavar="FILE",
        help="Azure, BurstGPT, Mooncake or own CSV, also .gz; or a synthetic load such as "
        "poisson:rate=50,requests=10000,prompt=1024,output=128 (also gamma: and onoff:)",
    )
    parser.add_argument(
        "--cost-model",
        default="h200-qwen3-8b",
        metavar="NAME|FILE",
        help="shipped or own (default: %(default)s)",
    )
    parser.add_argument(
        "--flops-ratio", type=float, metavar="X", help="another GPU: so many times the FLOP/s"
    )
    parser.add_argument("--bandwidth-ratio", type=float, metavar="X", help="and the memory bandwidth")
    parser.add_argument(
        "--speed-up", type=float, default=1.0, metavar="X", help="play the load so many times as fast"
    )
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="play it so many times in a row")
    parser.add_argument("--requests", type=int, metavar="N", help="play no more requests than this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--max-num-seqs", type=int, default=64, metavar="N", help="sequences of one decode worker"
    )
    parser.add_argument("--max-queued-requests", type=int, default=1024, metavar="N")
    parser.add_argument("--max-queued-tokens", type=int, default=1_048_576, metavar="N")
    parser.add_argument("--gpu-price", type=float, metavar="PRICE", help="of one GPU for one hour")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `purefill simulate`."""
    add_load_options(parser)
    parser.add_argument("--prefill-workers", type=int, default=1, metavar="N")
    parser.add_argument("--decode-workers", type=int, default=1, metavar="N")
    parser.add_argument("--batch-policy", choices=("fixed", "adaptive"), default="fixed")
    parser.add_argument("--max-batch-requests", type=int, default=8, metavar="N")
    parser.add_argument("--batch-timeout-ms", type=float, default=20.0, metavar="MS")
    parser.add_argument("--max-batch-tokens", type=int, metavar="N")
    parser.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="make use of the hash_ids of Mooncake's traces",
    )
    parser.add_argument("--slo", default="", metavar="ttft=200ms,itl=30ms", help="also e2e=10s")
    parser.add_argument("--mtbf-s", type=float, metavar="S", help="mean time between failures of one worker")
    parser.add_argument(
        "--repair-s", type=float, default=60.0, metavar="S", help="mean time until it is back"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the options of `purefill plan`."""
    add_load_options(parser)
    parser.add_argument("--slo", required=True, metavar="ttft=200ms,itl=30ms", help="also e2e=10s")
    parser.add_argument("--good-share", type=float, default=0.99, help="of the requests that must keep it")
    parser.add_argument("--max-gpus", type=int, default=64, metavar="N")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")


def load_of(options: argparse.Namespace) -> LoadOptions:
    """Return the load that was asked for. Raises `ConfigError`."""
    return LoadOptions(
        trace=options.trace,
        speed_up=options.speed_up,
        repeat=options.repeat,
        requests=options.requests,
        seed=options.seed,
    )


def costs_of(options: argparse.Namespace) -> FleetCosts:
    """Return the cost model that was asked for. Raises `ConfigError`."""
    costs = read_costs(options.cost_model, max_num_seqs=options.max_num_seqs)
    if options.flops_ratio is None and options.bandwidth_ratio is None:
        return costs
    return costs.on_other_gpu(
        flops_ratio=1.0 if options.flops_ratio is None else options.flops_ratio,
        bandwidth_ratio=1.0 if options.bandwidth_ratio is None else options.bandwidth_ratio,
    )


def fleet_of(options: argparse.Namespace) -> FleetSettings:
    """Return the fleet that was asked for. Raises `ConfigError`."""
    failures = None
    if options.mtbf_s is not None:
        failures = Failures(mtbf_s=options.mtbf_s, repair_s=options.repair_s)
    return FleetSettings(
        prefill_workers=options.prefill_workers,
        decode_workers=options.decode_workers,
        batch_policy=options.batch_policy,
        max_batch_requests=options.max_batch_requests,
        batch_timeout_s=options.batch_timeout_ms / 1000,
        max_batch_tokens=options.max_batch_tokens,
        max_num_seqs=options.max_num_seqs,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        prefix_cache=options.prefix_cache,
        failures=failures,
        seed=options.seed,
    )


def parse_slo(text: str) -> Slo:
    """Read limits such as ``ttft=200ms,itl=30ms,e2e=10s``. Raises `ConfigError` naming what is wrong."""
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in _SLO_FIELDS:
            raise ConfigError(f"slo must name ttft, itl or e2e, got {part}")
        scale, digits = (0.001, value[:-2]) if value.endswith("ms") else (1.0, value.removesuffix("s"))
        try:
            values[_SLO_FIELDS[name]] = float(digits) * scale
        except ValueError:
            values[_SLO_FIELDS[name]] = -1.0
        if not value.endswith("s") or not values[_SLO_FIELDS[name]] > 0:
            raise ConfigError(f"slo: {name} must be a time > 0 such as 200ms or 1.5s, got {value!r}")
    return Slo(**values)
