import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs.buckets import Bucket, BucketLadder, StepLadder, default_token_ladder


@given(st.integers(1, 100_000))
def test_default_ladder_ends_at_the_maximum_and_pads_at_most_a_third(max_tokens: int) -> None:
    ladder = default_token_ladder(max_tokens)
    assert ladder[-1] == max_tokens
    assert list(ladder) == sorted(set(ladder))
    for smaller, larger in itertools.pairwise(ladder):
        # The worst batch of a bucket has one token more than the bucket below.
        assert larger - (smaller + 1) <= larger / 3


sizes = st.lists(st.integers(1, 500), min_size=1, max_size=8)


@given(sizes, sizes, st.data())
def test_fit_returns_the_smallest_bucket_that_holds_the_batch(
    tokens: list[int], slots: list[int], data: st.DataObject
) -> None:
    ladder = BucketLadder(tokens, slots)
    num_tokens = data.draw(st.integers(1, max(tokens)))
    num_sequences = data.draw(st.integers(1, max(slots)))
    fitting = [b for b in ladder.buckets if b.num_tokens >= num_tokens and b.num_slots >= num_sequences]
    assert ladder.fit(num_tokens, num_sequences) == min(fitting)


@pytest.mark.parametrize(("num_tokens", "num_sequences"), [(33, 1), (1, 5)])
def test_a_batch_beyond_the_largest_bucket_is_refused_with_its_size(
    num_tokens: int, num_sequences: int
) -> None:
    with pytest.raises(ValueError, match="32x4"):
        BucketLadder([8, 32], [4]).fit(num_tokens, num_sequences)


def test_buckets_come_largest_first_and_only_once() -> None:
    ladder = BucketLadder([16, 8, 16], [2, 4])
    assert [str(bucket) for bucket in ladder.buckets] == ["16x4", "16x2", "8x4", "8x2"]


@pytest.mark.parametrize(
    ("tokens", "slots", "name"), [([], [1], "capture_tokens"), ([1], [0], "capture_slots")]
)
def test_a_ladder_names_the_list_that_is_wrong(tokens: list[int], slots: list[int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        BucketLadder(tokens, slots)


@given(st.integers(1, 1000), st.data())
def test_step_ladder_has_a_bucket_for_every_number_of_sequences(most: int, data: st.DataObject) -> None:
    ladder = StepLadder(most)
    count = data.draw(st.integers(1, most))
    bucket = ladder.fit(count, count)
    assert bucket in ladder.buckets
    assert bucket.num_tokens == bucket.num_slots
    assert bucket == min(b for b in ladder.buckets if b.num_slots >= count)


def test_step_ladder_takes_one_token_of_each_sequence_only() -> None:
    with pytest.raises(ValueError, match="one token each"):
        StepLadder(8).fit(3, 2)
    with pytest.raises(ValueError, match="at most 8"):
        StepLadder(8).fit(9, 9)
    assert StepLadder(8).fit(3, 3) == Bucket(4, 4)
