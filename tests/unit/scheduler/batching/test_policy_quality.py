"""The policies under load on a virtual clock, as benchmarks/batching.py compares them, on short loads."""

import pytest

from benchmarks import h200
from benchmarks.loads import Load, fan_outs, poisson
from benchmarks.virtual import Outcome, Setting, run

FIXED = [Setting("fixed", n, ms / 1000) for n in (1, 4, 8, 16) for ms in (5, 20)]
ADAPTIVE = Setting("adaptive", 16, 0.05)
LOADS = [
    poisson(50, seconds=8, seed=0),
    poisson(200, seconds=3, seed=0),
    poisson(800, seconds=2, seed=0),
    poisson(800, seconds=1, seed=0, medium=True),
]


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_adaptive_is_nowhere_much_worse_than_the_best_fixed_setting(load: Load, num_workers: int) -> None:
    def play(setting: Setting) -> Outcome:
        return run(load, setting, h200.qwen3_8b(), num_workers=num_workers)

    best = min(play(setting).quantile(0.99) for setting in FIXED)
    assert play(ADAPTIVE).quantile(0.99) <= 1.05 * best


def test_adaptive_gathers_fan_outs_and_is_better_than_not_holding_and_than_the_default() -> None:
    load = fan_outs(200, seconds=10, seed=0, spread_s=0.001)
    outcomes = {
        setting: run(load, setting, h200.qwen3_8b())
        for setting in (ADAPTIVE, Setting("adaptive", 16, 0.0), Setting("fixed", 16, 0.02))
    }
    mean = {setting: sum(outcome.ttft_s) / len(outcome.ttft_s) for setting, outcome in outcomes.items()}
    held, never_held, default = outcomes
    assert mean[held] < 0.95 * mean[never_held]
    assert mean[held] < 0.75 * mean[default]
    assert outcomes[held].mean_batch > 1.3 * outcomes[never_held].mean_batch


def test_a_small_tail_of_padding_is_left_when_the_queue_is_long() -> None:
    load = poisson(2000, seconds=1, seed=0, medium=True)
    outcome = run(load, ADAPTIVE, h200.qwen3_8b())
    assert outcome.padding_share < 0.02
    assert outcome.reasons.most_common(1)[0][0] == "saturated"
