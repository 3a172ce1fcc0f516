"""How well `purefill simulate` foretells the real service: the same load on both, and the figures side by side.

Starts `purefill serve` on this machine, has it write its cost model, plays short pieces of the Azure conversation trace
(lengths divided, see --scale) and of a Poisson load against it, and simulates the same pieces with that cost model.
Nothing is fitted to the loads: what the cost model holds, the service measured before them, while it was idle.

    python -m benchmarks.simulate_fidelity --seconds 30
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from itertools import islice, takewhile
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.loads import SHARED
from scheduler.simulate.collector import Collector, RequestTimes, Slo
from scheduler.simulate.engine import Simulation
from scheduler.simulate.fleet import FleetSettings
from scheduler.simulate.fleet_costs import FleetCosts, read_costs
from scheduler.simulate.synthetic import SyntheticLoad
from scheduler.simulate.traces import Arrival, played, read_trace
from tests.support.service import Service, serve

TRACE = SHARED / "data" / "AzureLLMInferenceTrace_conv.csv.gz"
MAX_BATCH_REQUESTS = 8
BATCH_TIMEOUT_MS = 20.0
NUM_SKIPPED = 2000


async def ask(client: httpx.AsyncClient, model: str, arrival: Arrival) -> float:
    """Send a request; return the seconds to its first token."""
    body = {
        "model": model,
        # None is known from another.
        "prompt": [random.randrange(1000, 2000) for _ in range(arrival.num_prompt)],
        "max_tokens": arrival.num_output,
        "ignore_eos": True,
        "stream": True,
    }
    started, ttft = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data:") and not ttft:
                ttft = time.perf_counter() - started
    return ttft


async def play(service: Service, load: list[Arrival]) -> list[float]:
    """Send a load at its times; return the seconds to each first token."""
    async with httpx.AsyncClient(base_url=service.url, timeout=120, limits=httpx.Limits()) as client:
        started = time.perf_counter()

        async def one(arrival: Arrival) -> float:
            await asyncio.sleep(arrival.time_s - (time.perf_counter() - started))
            return await ask(client, service.model, arrival)

        return await asyncio.gather(*map(one, load))


def batch_sizes(service: Service) -> dict[float, float]:
    """Return how many batches had at most so many requests, so far."""
    text = httpx.get(f"{service.url}/metrics").text
    sizes: Counter[float] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "purefill_prefill_batch_requests_bucket":
                sizes[float(sample.labels["le"])] += sample.value
    return sizes


def simulated(load: list[Arrival], costs: FleetCosts) -> tuple[list[float], Collector]:
    """Return the seconds to each first token in the simulator."""
    ttft: list[float] = []

    def on_request(times: RequestTimes) -> None:
        assert times.first_token_s is not None
        ttft.append(times.first_token_s - times.arrival_s)

    settings = FleetSettings(max_batch_requests=MAX_BATCH_REQUESTS, batch_timeout_s=BATCH_TIMEOUT_MS / 1000)
    collector = Collector(Slo(), on_request)
    Simulation(settings, costs, collector).run(iter(load))
    return ttft, collector


def compare(name: str, service: Service, load: list[Arrival], costs: FleetCosts) -> None:
    """Play a load on both and print the figures."""
    before = batch_sizes(service)
    real = sorted(asyncio.run(play(service, load)))
    after = batch_sizes(service)
    foretold, collector = simulated(load, costs)
    foretold.sort()
    print(f"{name}: {len(load)} requests in {load[-1].time_s:.0f} s")
    for q in (0.5, 0.99):
        at = min(len(load) - 1, int(q * len(load)))
        print(
            f"  TTFT p{100 * q:g}: real {1000 * real[at]:.1f} ms, simulated {1000 * foretold[at]:.1f} ms "
            f"({foretold[at] / real[at] - 1:+.0%})"
        )
    num_real, num_simulated = after[float("inf")] - before[float("inf")], collector.batch_requests.total()
    mean_real, mean_simulated = len(load) / num_real, len(load) / num_simulated
    print(
        f"  requests a batch: real {mean_real:.2f}, simulated {mean_simulated:.2f} "
        f"({mean_simulated / mean_real - 1:+.0%})"
    )
    for most in (1, 2, 4, 8):
        share = (after[most] - before[most]) / num_real
        other = sum(count for size, count in collector.batch_requests.items() if size <= most) / num_simulated
        print(f"  batches of at most {most}: real {share:.0%}, simulated {other:.0%}")


def piece_of_trace(seconds: float, rate: float, scale: int) -> list[Arrival]:
    """Return what follows the trace's first minutes, which are quieter than the rest, with divided lengths."""
    # 5.53 a second as it is.
    sped_up = played(lambda: read_trace(TRACE), speed_up=rate / 5.53)
    rest = islice(sped_up, NUM_SKIPPED, None)
    first = next(rest)
    return [
        Arrival(a.time_s - first.time_s, max(4, a.num_prompt // scale), max(1, a.num_output // scale))
        for a in takewhile(lambda a: a.time_s - first.time_s < seconds, rest)
    ]


def main() -> None:
    """Compare both loads."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--scale", type=int, default=32, help="divides the trace's lengths")
    options = parser.parse_args()
    trace = piece_of_trace(options.seconds, options.rate, options.scale)
    poisson = SyntheticLoad(
        kind="poisson", rate=options.rate, requests=int(options.rate * options.seconds), prompt=32, output=4
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        with serve(
            "--write-cost-model", str(path),
            "--max-batch-requests", str(MAX_BATCH_REQUESTS),
            "--batch-timeout-ms", str(BATCH_TIMEOUT_MS),
            "--max-model-len", "2048",
        ) as service:  # fmt: skip
            costs = read_costs(str(path))
            print(costs.to_json())
            compare("Azure conversation trace", service, trace, costs)
            compare("Poisson", service, list(poisson.arrivals(0)), costs)


if __name__ == "__main__":
    main()
