"""How products of few tokens are cut. Times are estimates until a card has measured; what is asserted holds anyway."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.gated_tilings import STEP
from worker.split_tilings import TILINGS, choose_split_tiling, estimate_us

QWEN3_8B = {"qkv": (4096, 6144), "o": (4096, 4096), "down": (12288, 4096)}
SHARED_BYTES = 227 << 10


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_a_ring_fits_into_shared_memory_and_leaves_no_load_alone(tiling: object) -> None:
    assert tiling in TILINGS
    for each in TILINGS:
        assert each.num_stages * each.step_bytes <= SHARED_BYTES - 1024
        assert each.num_stages >= 3


@given(
    num_tokens=st.integers(1, 2048),
    num_steps=st.integers(1, 200),
    num_outputs=st.integers(1, 20_000),
    num_multiprocessors=st.sampled_from([8, 66, 132, 148]),
)
def test_the_parts_are_all_columns_and_none_is_shorter_than_a_ring(
    num_tokens: int, num_steps: int, num_outputs: int, num_multiprocessors: int
) -> None:
    tiling = choose_split_tiling(
        num_tokens, num_steps * STEP, num_outputs, num_multiprocessors=num_multiprocessors
    )
    if tiling is None:
        return
    steps = tiling.steps(num_steps * STEP)
    assert steps * tiling.num_splits >= num_steps
    assert steps >= tiling.num_stages
    assert num_outputs % 16 == 0


@pytest.mark.parametrize("num_tokens", [16, 128])
@pytest.mark.parametrize("name", QWEN3_8B)
def test_few_tokens_are_split_until_most_multiprocessors_have_a_tile(name: str, num_tokens: int) -> None:
    num_inputs, num_outputs = QWEN3_8B[name]
    times = {
        tiling: estimate_us(tiling, num_tokens, num_inputs, num_outputs, num_multiprocessors=132)
        for tiling in TILINGS
    }
    best = min(times, key=lambda tiling: times[tiling])
    rows = best.num_groups * 64
    tiles = -(-num_outputs // rows) * -(-num_tokens // best.tokens) * best.num_splits
    assert 0.6 * 132 <= tiles <= 132


@pytest.mark.parametrize(
    ("num_tokens", "num_inputs", "num_outputs"),
    [
        (1024, 4096, 4096),  # more tokens than it pays for
        (128, 4096 + 32, 4096),  # columns that are no whole steps
        (128, 64, 4096),  # fewer columns than a ring has
        (128, 4096, 4090),  # rows that are no whole sixteens
        (8, 4096, 151_936),  # an LM head has rows for all
    ],
)
def test_cublas_computes_what_the_kernel_cannot_or_not_as_fast(
    num_tokens: int, num_inputs: int, num_outputs: int
) -> None:
    assert choose_split_tiling(num_tokens, num_inputs, num_outputs, num_multiprocessors=132) is None
