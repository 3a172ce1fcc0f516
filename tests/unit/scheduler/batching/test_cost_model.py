import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batching.cost_model import CostModel, seconds_by_tokens
from tests.unit.scheduler.batching.helpers import h200_model

TABLES = st.dictionaries(st.integers(1, 5000), st.floats(1e-4, 10), min_size=1, max_size=12)
OBSERVATIONS = st.lists(st.tuples(st.integers(1, 12_000), st.floats(1e-6, 100)), max_size=60)


@settings(deadline=None)
@given(TABLES, OBSERVATIONS)
def test_more_tokens_never_cost_less_whatever_was_observed(
    table: dict[int, float], observations: list[tuple[int, float]]
) -> None:
    model = CostModel(table)
    for num_tokens, seconds in observations:
        model.observe(num_tokens, seconds)
        costs = list(model.table().values())
        assert costs == sorted(costs)
        assert all(0 < cost < math.inf for cost in costs)
    for num_tokens in (1, 7, 100, 5000, 5001, 12_000):
        assert model.padded(num_tokens) >= num_tokens
        assert model.seconds(num_tokens) == pytest.approx(model.seconds(model.padded(num_tokens)))
        assert model.seconds(num_tokens) <= model.seconds(num_tokens + 1) + 1e-12


@settings(deadline=None)
@given(TABLES, st.integers(1, 20_000))
def test_the_buckets_next_to_a_batch(table: dict[int, float], num_tokens: int) -> None:
    model = CostModel(table)
    smaller, padded = model.smaller_bucket(num_tokens), model.padded(num_tokens)
    assert smaller < num_tokens <= padded
    assert smaller == 0 or model.padded(smaller) == smaller
    assert model.padded(smaller + 1) == padded
    assert model.buckets_from(num_tokens)[0] == padded
    assert all(model.padded(bucket) == bucket for bucket in model.buckets_from(num_tokens))


@settings(deadline=None)
@given(TABLES)
def test_json_round_trip(table: dict[int, float]) -> None:
    model = CostModel(table)
    assert CostModel.from_json(model.to_json()).table() == model.table()


def test_observations_pull_a_bucket_towards_them_but_one_hiccup_does_not() -> None:
    model = CostModel({64: 0.01, 128: 0.02})
    model.observe(100, 5.0)
    assert model.seconds(128) == pytest.approx(0.022)
    for _ in range(200):
        model.observe(100, 0.03)
    assert model.seconds(128) == pytest.approx(0.03, rel=1e-3)
    assert model.seconds(64) == 0.01


def test_a_batch_beyond_the_largest_bucket_is_chunked() -> None:
    model = CostModel({64: 0.01, 128: 0.02})
    assert model.seconds(300) == pytest.approx(2 * 0.02 + 0.01)
    assert model.padded(300) == 2 * 128 + 64
    assert model.seconds(0) == 0


def test_interpolation_follows_the_measured_table() -> None:
    model = h200_model()
    assert model.seconds(512) == pytest.approx(0.0127)
    assert 0.0127 < model.seconds(700) < 0.024
    assert 0 < model.seconds(16) < 0.0056
    assert model.saturation_tokens == 768  # 23.9 us per token; the best is 23.4


def test_a_measured_table_replaces_the_first_one() -> None:
    model = CostModel.proportional([64, 128])
    assert model.saturation_tokens == 64
    model.replace(seconds_by_tokens({"256x8": 0.02, "32x8": 0.01, "32x1": 0.009}))
    assert model.table() == {32: 0.01, 256: 0.02}
    assert model.saturation_tokens == 256
    assert model.max_tokens == 256


@pytest.mark.parametrize("table", [{}, {0: 1.0}, {16: 0.0}, {16: -1.0}, {16: math.inf}, {16: math.nan}])
def test_a_table_that_makes_no_sense_is_refused(table: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="seconds_by_bucket"):
        CostModel(table)


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": "purefill-cost-model-1"}', "nonsense"])
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        CostModel.from_json(text)


def test_one_point_cannot_be_interpolated() -> None:
    with pytest.raises(ValueError, match="two points"):
        CostModel.interpolated([16, 32], {16: 0.1})
