"""How many requests per second the batch former forms into batches, alone, on one core.

For queues of 1,000 to 100,000 waiting requests it measures, in CPU time per request:

- add: putting a request into the queue,
- form: taking requests out, batch by batch (the queue shrinks by 20,000, or is emptied and filled again),
- cancel: taking one out that has not been served.

The goal is 200,000 requests/s formed from a queue of 100,000, at a cost per request that does not grow with
the queue.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import h200
from benchmarks.loads import short_prompt
from scheduler.batching.adaptive import AdaptivePolicy
from scheduler.batching.former import BatchFormer
from scheduler.batching.policies import FixedPolicy
from scheduler.batching.requests import QueuedRequest

QUEUES = (1_000, 10_000, 100_000)
NUM_FORMED = 20_000


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A policy and a mix of requests."""

    name: str
    policy: str
    max_requests: int
    num_tenants: int = 1
    num_classes: int = 1
    deadlines: bool = False


SCENARIOS = (
    Scenario(name="fixed N=8", policy="fixed", max_requests=8),
    Scenario(name="fixed N=8, deadlines", policy="fixed", max_requests=8, deadlines=True),
    Scenario(name="fixed N=8, 100 tenants", policy="fixed", max_requests=8, num_tenants=100),
    Scenario(
        name="fixed N=8, 3 classes, 100 tenants, deadlines",
        policy="fixed",
        max_requests=8,
        num_tenants=100,
        num_classes=3,
        deadlines=True,
    ),
    Scenario(name="adaptive, 16 slots", policy="adaptive", max_requests=16),
    Scenario(name="adaptive, 64 slots", policy="adaptive", max_requests=64),
    Scenario(name="adaptive, 16 slots, 100 tenants", policy="adaptive", max_requests=16, num_tenants=100),
)


def make_former(scenario: Scenario) -> BatchFormer:
    """Make an empty batch former."""
    cost_model = h200.qwen3_8b()
    policy_class = FixedPolicy if scenario.policy == "fixed" else AdaptivePolicy
    policy = policy_class(max_requests=scenario.max_requests, timeout_s=0.02, cost_model=cost_model)
    return BatchFormer(policy, cost_model)


def make_requests(scenario: Scenario, num: int) -> list[QueuedRequest]:
    """Make requests of short prompts, 20 microseconds apart."""
    rng = random.Random(0)
    requests = []
    for i in range(num):
        arrival_time = i * 20e-6
        requests.append(
            QueuedRequest(
                request_id=f"r{i}",
                num_tokens=short_prompt(rng),
                num_pages=1,
                arrival_time=arrival_time,
                priority=rng.randrange(scenario.num_classes),
                deadline=arrival_time + rng.uniform(0.1, 5) if scenario.deadlines else None,
                tenant=f"t{rng.randrange(scenario.num_tenants)}",
            )
        )
    return requests


def seconds_of(call: Callable[[], object]) -> float:
    """Return the CPU seconds of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(scenario: Scenario, num_waiting: int) -> tuple[float, float, float]:
    """Return the microseconds per request of add, form and cancel."""
    requests = make_requests(scenario, num_waiting)
    num_left = NUM_FORMED
    add_s = form_s = cancel_s = 0.0
    num_added = num_formed = num_cancelled = 0

    def add(former: BatchFormer) -> None:
        for request in requests:
            former.add(request)

    def form(former: BatchFormer, num: int) -> None:
        nonlocal num_formed
        now, enough = requests[-1].arrival_time, len(former) - num
        while len(former) > enough:
            formed = former.form(now, free_pages=10**9, free_sequences=10**6)
            assert formed is not None
            num_formed += len(formed.requests)
            now += 0.002

    def cancel(former: BatchFormer) -> None:
        nonlocal num_cancelled
        num_cancelled += sum(former.remove(request.request_id) for request in requests[::-2])

    while num_left > 0:
        former = make_former(scenario)
        add_s += seconds_of(lambda: add(former))  # noqa: B023
        num_added += num_waiting
        form_s += seconds_of(lambda: form(former, min(num_left, num_waiting)))  # noqa: B023
        cancel_s += seconds_of(lambda: cancel(former))  # noqa: B023
        num_left -= num_waiting
    former = make_former(scenario)
    add(former)
    cancel_s += seconds_of(lambda: cancel(former))
    return 1e6 * add_s / num_added, 1e6 * form_s / num_formed, 1e6 * cancel_s / num_cancelled


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    gc.disable()
    print(f"{'':46}{'waiting':>9}{'add':>10}{'form':>10}{'cancel':>10}{'formed':>14}")
    print(f"{'':55}{'us/request, CPU time':>30}{'requests/s':>14}")
    for scenario in SCENARIOS:
        for num_waiting in QUEUES:
            add_us, form_us, cancel_us = measure(scenario, num_waiting)
            costs = f"{add_us:10.2f}{form_us:10.2f}{cancel_us:10.2f}"
            print(f"{scenario.name:46}{num_waiting:9,}{costs}{1e6 / form_us:14,.0f}")
            gc.collect()


if __name__ == "__main__":
    main()
