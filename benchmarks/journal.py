"""What a Redis journal costs an ApiServer: the same load with and without it, in turns, in one run.

The parts are those of benchmarks.api_server: a real ApiServer on a core of its own, a stub for scheduler and
workers, streams of 64 tokens in and 16 out. Every request is written down before its answer, and with --keyed
its tokens in groups. First comes a rate that leaves the ApiServer idle time, for what a request waits longer; then one
that it cannot keep up with, for how many it answers. Rounds with and without the journal take turns, and medians
over the rounds are compared, as other work on the machine comes and goes. Redis belongs on the cores of stub and
client, like everything but the ApiServer.

    taskset -c 1 redis-server --port 6390 --save "" --appendonly yes &
    python -m benchmarks.journal --journal redis://127.0.0.1:6390 --rounds 3
"""

from __future__ import annotations

import argparse
import os
from statistics import median

import ray

from benchmarks.api_server import Report, measure
from scheduler.journal.settings import JournalConfig, host_of
from scheduler.messages import RAY_NAMESPACE


def compare(
    name: str, rate: float, seconds: float, rounds: int, journal: JournalConfig, *, keyed: bool
) -> None:
    """Run rounds without and with the journal in turns, and print the medians."""
    without: list[Report] = []
    with_journal: list[Report] = []
    for i in range(rounds):
        # Which goes first changes, so that neither has the better half of each round.
        for is_on in (False, True) if i % 2 == 0 else (True, False):
            report = measure(rate, seconds, 1, journal if is_on else None, keyed=keyed and is_on)
            (with_journal if is_on else without).append(report)
    print(f"\n{name}: {rate:g} requests/s offered for {seconds:g} s, medians of {rounds} rounds")
    print(f"{'':<22}{'without':>10}{'with':>10}{'ratio':>8}")
    for field in ("completed_per_s", "first_event_p50_ms", "first_event_p99_ms", "cpu_ms_per_request"):
        a = median(getattr(report, field) for report in without)
        b = median(getattr(report, field) for report in with_journal)
        print(f"{field:<22}{a:>10.2f}{b:>10.2f}{b / a:>8.3f}")
    print(
        f"{'errors':<22}{sum(r.num_errors for r in without):>10}{sum(r.num_errors for r in with_journal):>10}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--journal", required=True, help="URL of a Redis")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rate", type=float, default=150.0, help="requests/s that leave idle time")
    parser.add_argument("--most", type=float, default=700.0, help="requests/s that are too many")
    parser.add_argument("--keyed", action="store_true", help="send an Idempotency-Key with each request")
    arguments = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(address="local", namespace=RAY_NAMESPACE, include_dashboard=False, log_to_driver=False)
    journal = JournalConfig(url=arguments.journal)
    print(f"journal: {host_of(arguments.journal)}")
    compare("latency", arguments.rate, arguments.seconds, arguments.rounds, journal, keyed=arguments.keyed)
    compare("throughput", arguments.most, arguments.seconds, arguments.rounds, journal, keyed=arguments.keyed)
    ray.shutdown()


if __name__ == "__main__":
    main()
