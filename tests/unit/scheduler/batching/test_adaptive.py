import random

import pytest

from scheduler.batching.adaptive import AdaptivePolicy
from scheduler.batching.former import BatchFormer
from scheduler.batching.policies import Workers
from scheduler.batching.requests import FormedBatch
from tests.unit.scheduler.batching.helpers import h200_model, queued


def make(timeout_s: float = 0.05, max_requests: int = 16) -> tuple[AdaptivePolicy, BatchFormer]:
    cost = h200_model()
    policy = AdaptivePolicy(max_requests=max_requests, timeout_s=timeout_s, cost_model=cost)
    return policy, BatchFormer(policy, cost)


def form(former: BatchFormer, now: float, workers: Workers | None = None) -> FormedBatch | None:
    return former.form(now, free_pages=10**6, free_sequences=10**6, workers=workers or Workers())


def bursts(
    policy: AdaptivePolicy, until: float, size: int = 8, gap: float = 0.0003, period: float = 0.2
) -> None:
    """Let the policy see bursts of `size` requests, the last of which ends well before `until`."""
    start = until - 10 * period
    for burst in range(10):
        for i in range(size):
            policy.arrived(start + burst * period + i * gap, 64)


def test_nothing_is_held_when_nothing_is_known() -> None:
    _, former = make()
    former.add(queued("a", at=1.0))
    formed = form(former, 1.0)
    assert formed is not None
    assert formed.reason == "idle"


@pytest.mark.parametrize("rate", [5, 50, 200])
def test_a_steady_stream_is_not_held_up(rate: float) -> None:
    policy, former = make()
    rng, now = random.Random(1), 0.0
    for _ in range(200):
        now += rng.expovariate(rate)
        policy.arrived(now, 64)
    now += 1 / rate
    former.add(queued("a", at=now))
    formed = form(former, now)
    assert formed is not None
    assert formed.reason == "idle"


def test_a_burst_is_gathered_for_a_part_of_what_a_batch_takes() -> None:
    policy, former = make()
    bursts(policy, until=10.0)
    now, formed, num_arrived = 10.0, None, 0
    while formed is None and num_arrived < 8:
        former.add(queued(f"r{num_arrived}", at=now))
        num_arrived += 1
        formed = form(former, now)
        now += 0.0003
    assert num_arrived >= 3
    assert formed is not None
    assert (len(formed.requests), formed.reason) == (num_arrived, "idle")


def test_a_burst_that_ends_early_is_not_waited_for() -> None:
    policy, former = make()
    bursts(policy, until=10.0)
    former.add(queued("alone", at=10.0))
    now, formed = 10.0, form(former, 10.0)
    assert formed is None
    while formed is None:
        wake_at = former.wake_at()
        assert wake_at is not None
        assert wake_at > now
        now, formed = wake_at, form(former, wake_at)
    assert formed.reason == "idle"
    assert now < 10.0 + 0.002  # its batch takes 4.6 ms


def test_nothing_is_held_while_another_worker_is_idle() -> None:
    policy, former = make()
    bursts(policy, until=10.0)
    former.add(queued("a", at=10.0))
    assert form(former, 10.0, Workers(num_idle=2)) is not None


def test_nothing_is_held_if_another_worker_is_about_to_be_idle() -> None:
    policy, former = make()
    bursts(policy, until=10.0)
    former.add(queued("a", at=10.0))
    assert form(former, 10.0, Workers(num_busy=1, next_idle_at=10.0)) is not None
    former.add(queued("b", at=10.0003))
    assert form(former, 10.0003, Workers(num_busy=1, next_idle_at=11.0)) is None


def test_a_hold_ends_at_the_users_timeout_and_at_a_deadline() -> None:
    policy, former = make(timeout_s=0.0001)
    bursts(policy, until=10.0)
    former.add(queued("a", at=10.0))
    assert form(former, 10.0) is None
    assert former.wake_at() == pytest.approx(10.0001)
    formed = form(former, 10.0001)
    assert formed is not None
    assert formed.reason == "timeout"

    policy, former = make()
    bursts(policy, until=10.0)
    former.add(queued("a", at=10.0, deadline=10.001))
    formed = form(former, 10.0)
    assert formed is not None
    assert formed.reason == "deadline"


def test_a_saturated_batch_leaves_at_once_even_in_a_burst() -> None:
    policy, former = make()
    bursts(policy, until=10.0)
    former.add(queued("long", 2000, at=10.0))
    formed = form(former, 10.0)
    assert formed is not None
    assert formed.reason == "saturated"


def test_idle_workers_share_what_came_at_once() -> None:
    _, former = make()
    for i in range(8):
        former.add(queued(f"r{i}", at=1.0))
    sizes = []
    for num_idle in (4, 3, 2, 1):
        formed = form(former, 1.0, Workers(num_idle=num_idle, num_busy=4 - num_idle, next_idle_at=1.1))
        assert formed is not None
        assert formed.reason == "idle"
        sizes.append(len(formed.requests))
    assert sizes == [2, 2, 2, 2]


def test_a_worker_leaves_some_to_one_that_is_idle_soon_but_not_to_one_that_is_not() -> None:
    def batch(next_idle_at: float) -> int:
        _, former = make()
        for i in range(8):
            former.add(queued(f"r{i}", at=1.0))
        formed = form(former, 1.0, Workers(num_busy=1, next_idle_at=next_idle_at))
        assert formed is not None
        return len(formed.requests)

    assert batch(next_idle_at=1.001) == 4
    assert batch(next_idle_at=1.0128) == 8


def test_a_long_queue_is_not_shared_but_fills_batches() -> None:
    _, former = make()
    for i in range(100):
        former.add(queued(f"r{i}", 32, at=1.0))
    formed = form(former, 1.0, Workers(num_idle=2))
    assert formed is not None
    assert (len(formed.requests), formed.reason) == (16, "full")
