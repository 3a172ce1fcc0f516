"""How fast the simulator is: processor time per request by fleet and by number of requests, and the memory it takes.

The load is the Azure conversation trace, repeated and sped up with the fleet.

    python -m benchmarks.simulate_speed --requests 1000000      the whole table, then a million through 64 + 192 workers
    python -m benchmarks.simulate_speed                         the table alone
"""

from __future__ import annotations

import argparse
import resource
import time

from benchmarks.loads import SHARED
from scheduler.simulate.collector import Slo
from scheduler.simulate.command import simulate
from scheduler.simulate.fleet import FleetSettings
from scheduler.simulate.fleet_costs import read_costs
from scheduler.simulate.options import LoadOptions

TRACE = SHARED / "data" / "AzureLLMInferenceTrace_conv.csv.gz"
FLEETS = ((4, 12), (16, 48), (64, 192), (250, 750))
SPEED_UP_PER_PREFILL_WORKER = 3.0


def measure(prefill_workers: int, decode_workers: int, num_requests: int) -> None:
    """Simulate, and print a line."""
    load = LoadOptions(
        trace=str(TRACE),
        speed_up=SPEED_UP_PER_PREFILL_WORKER * prefill_workers,
        repeat=1 + num_requests // 19_366,
        requests=num_requests,
        seed=0,
    )
    settings = FleetSettings(
        prefill_workers=prefill_workers, decode_workers=decode_workers, max_queued_requests=100_000
    )
    started, cpu = time.perf_counter(), time.process_time()
    summary, _ = simulate(settings, read_costs("h200-qwen3-8b"), load, slo=Slo())
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{prefill_workers:>5} prefill {decode_workers:>5} decode {num_requests:>10,} requests {seconds:8.1f} s "
        f"{1e6 * cpu / num_requests:7.0f} us of CPU a request, {peak:,.0f} MiB at most, "
        f"prefill busy {summary['prefill_utilisation']:.0%}",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, help="then so many through 64 prefill and 192 decode workers")
    parser.add_argument("--table-requests", type=int, default=20_000, help="of each line of the table")
    options = parser.parse_args()
    for prefill_workers, decode_workers in FLEETS:
        measure(prefill_workers, decode_workers, options.table_requests)
    if options.requests is not None:
        measure(64, 192, options.requests)


if __name__ == "__main__":
    main()
