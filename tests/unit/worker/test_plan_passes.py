from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphs.buckets import Segment, plan_passes


def test_a_batch_that_fits_is_one_pass() -> None:
    passes = plan_passes([3, 5, 8], max_tokens=16, max_slots=8)
    assert passes == [[Segment(0, 0, 3), Segment(1, 0, 5), Segment(2, 0, 8)]]


def test_a_long_prompt_is_cut_into_chunks_of_the_largest_bucket() -> None:
    passes = plan_passes([40], max_tokens=16, max_slots=8)
    assert passes == [[Segment(0, 0, 16)], [Segment(0, 16, 32)], [Segment(0, 32, 40)]]


def test_the_next_prompts_share_the_pass_of_a_last_chunk() -> None:
    passes = plan_passes([20, 5], max_tokens=16, max_slots=8)
    assert passes == [[Segment(0, 0, 16)], [Segment(0, 16, 20), Segment(1, 0, 5)]]


def test_more_prompts_than_slots_are_split() -> None:
    passes = plan_passes([1] * 5, max_tokens=16, max_slots=2)
    assert [len(segments) for segments in passes] == [2, 2, 1]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 40), st.integers(1, 8))
def test_every_token_is_computed_once_in_order_and_every_pass_fits(
    lengths: list[int], max_tokens: int, max_slots: int
) -> None:
    passes = plan_passes(lengths, max_tokens=max_tokens, max_slots=max_slots)
    done = [0] * len(lengths)
    for segments in passes:
        assert 1 <= len(segments) <= max_slots
        assert sum(s.end - s.start for s in segments) <= max_tokens
        # Two chunks of one prompt in a pass could not attend to each other.
        assert len({s.item for s in segments}) == len(segments)
        for segment in segments:
            assert segment.start == done[segment.item] < segment.end
            done[segment.item] = segment.end
    assert done == lengths
    # A prompt that fits a pass is never cut.
    for item, length in enumerate(lengths):
        if length <= max_tokens:
            assert sum(s.item == item for segments in passes for s in segments) == 1
