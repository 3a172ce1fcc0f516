import random

import pytest

from scheduler.batching.arrivals import Arrivals, share_and_mean


def test_a_steady_stream() -> None:
    arrivals = Arrivals()
    for i in range(300):
        arrivals.observe(i * 0.01, 10 + i % 3)
    now = 299 * 0.01
    assert arrivals.rate(now) == pytest.approx(100)
    assert arrivals.mean_tokens == pytest.approx(11, abs=0.1)
    share, mean = share_and_mean(arrivals.gaps(now), arrivals.silence(now), 0.02)
    assert share > 0.99
    assert mean == pytest.approx(0.01)


def test_a_burst_is_seen_within_milliseconds_and_silence_at_once() -> None:
    arrivals = Arrivals()
    for i in range(50):
        arrivals.observe(i * 0.05, 64)  # 20 a second
    now = 49 * 0.05
    assert arrivals.rate(now) == pytest.approx(20)
    for _ in range(150):
        now += 0.0002
        arrivals.observe(now, 64)
    assert arrivals.rate(now) > 1000  # 30 ms of burst
    assert arrivals.rate(now + 1) < 130
    # Nobody was silent for longer than 50 ms, so after that nothing is expected.
    assert share_and_mean(arrivals.gaps(now + 0.1), arrivals.silence(now + 0.1), 5) == (0.0, 0.0)
    assert arrivals.rate(now + 60) == 0
    assert arrivals.mean_tokens == 0


def test_the_longer_nobody_came_after_a_burst_the_less_it_goes_on() -> None:
    arrivals, now = Arrivals(), 0.0
    for _ in range(20):  # bursts of 8, every 100 ms
        for _ in range(8):
            arrivals.observe(now, 64)
            now += 0.0005
        now += 0.1 - 8 * 0.0005
    now = now - 0.1 + 8 * 0.0005 - 0.0005  # the last arrival
    gaps = arrivals.gaps(now)
    within_burst, _ = share_and_mean(gaps, 0.0, 0.005)
    after_burst, _ = share_and_mean(gaps, 0.002, 0.007)
    assert within_burst > 0.8
    assert after_burst == 0


def test_too_few_arrivals_foretell_nothing() -> None:
    arrivals = Arrivals()
    assert arrivals.rate(0.0) == 0
    assert arrivals.gaps(0.0) == []
    for i in range(5):
        arrivals.observe(i * 0.001, 64)
    assert arrivals.gaps(0.004) == []


def test_an_arrival_that_is_reported_late_makes_no_negative_gap() -> None:
    arrivals = Arrivals()
    for now in (0.0, 0.1, 0.05, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
        arrivals.observe(now, 1)
    assert arrivals.gaps(0.8)[0] == 0.0


def test_memory_is_bounded() -> None:
    arrivals, rng, now = Arrivals(), random.Random(0), 0.0
    for _ in range(10_000):
        now += rng.expovariate(1000)
        arrivals.observe(now, 1)
    assert len(arrivals.gaps(now)) == 128


def test_share_and_mean() -> None:
    gaps = [0.0, 0.0, 1.0, 2.0, 3.0, 10.0]
    assert share_and_mean(gaps, -1.0, 0.5) == (2 / 7, 0.0)
    assert share_and_mean(gaps, 0.0, 3.0) == (3 / 5, 2.0)
    assert share_and_mean(gaps, 3.0, 2.0) == (0.0, 0.0)
    assert share_and_mean(gaps, 10.0, 99.0) == (0.0, 0.0)
