"""How a matrix product of few tokens is cut into tiles, also along K, and where that pays. Pure.

`worker.triton_products` computes such a product, and `worker.triton_plain` adds up its parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.gated_tilings import GROUP_ROWS, STEP

_SHARED_BYTES = 220 << 10
"""Of a multiprocessor, for the ring."""
_MOST_STAGES = 8


@dataclass(frozen=True, kw_only=True)
class SplitTiling:
    """A block multiplies 64 rows of the weight a group, with so many tokens at once, over its part of the columns."""

    tokens: int
    num_groups: int
    """2, or 3 if tokens are fewer than 256."""
    num_splits: int
    """Parts of the columns."""

    @property
    def num_stages(self) -> int:
        """Places of the ring of shared memory."""
        return min(_SHARED_BYTES // self.step_bytes, _MOST_STAGES)

    @property
    def step_bytes(self) -> int:
        """Bytes of input and weight of one place of the ring."""
        return (self.num_groups * GROUP_ROWS + self.tokens) * STEP * 2

    def steps(self, num_inputs: int) -> int:
        """Return of how many steps each part of the columns is; the last part may have fewer in fact."""
        return -(-(num_inputs // STEP) // self.num_splits)


TILINGS = tuple(
    SplitTiling(tokens=tokens, num_groups=num_groups, num_splits=num_splits)
    # 256 tokens and three groups have no place for a loader, and not enough registers for the stores.
    for tokens, num_groups in ((64, 2), (64, 3), (128, 2), (128, 3), (256, 2))
    for num_splits in (2, 3, 4, 6)
)
_MOST_TOKENS = 512
"""For more cuBLAS is near its peak, and sums in float32 are more than the weight."""
# What an H200 does in a microsecond. Assumed, not fitted: L2's rate is a little more than what the gated product
# reaches at 512 tokens.
_MEMORY_BYTES = 4.3e6
_CACHE_BYTES = 8e6
_FLOPS = 800e6
_FIXED_US = 4.5
"""Of both kernels: their start, the first loads and the last stores."""
_CUBLAS_FIXED_US = 3.0
_CUBLAS_MEMORY_BYTES = 3.0e6
_CUBLAS_FLOPS = 720e6
"""What cuBLAS reaches in the products of a layer that are not gated, from 128 tokens up."""


def choose_split_tiling(
    num_tokens: int, num_inputs: int, num_outputs: int, *, num_multiprocessors: int
) -> SplitTiling | None:
    """Return the tiling for ``[num_tokens, num_inputs]`` to ``[num_tokens, num_outputs]``, or None if cuBLAS is better.

    With rows enough for all multiprocessors cuBLAS is at the memory's rate. It is also None where the kernel cannot do
    it: a box of the weight has whole sixteens of rows and whole steps, and a ring must not be longer than a part of a
    row.
    """
    enough_rows = num_multiprocessors * 2 * GROUP_ROWS
    if num_inputs % STEP or num_outputs % 16 or num_tokens > _MOST_TOKENS or num_outputs >= enough_rows:
        return None

    def time_us(tiling: SplitTiling) -> float:
        return estimate_us(
            tiling, num_tokens, num_inputs, num_outputs, num_multiprocessors=num_multiprocessors
        )

    possible = [tiling for tiling in TILINGS if tiling.steps(num_inputs) >= tiling.num_stages]
    best = min(possible, key=time_us, default=None)
    operations = 2 * num_tokens * num_inputs * num_outputs
    cublas_us = _CUBLAS_FIXED_US + max(
        2 * num_inputs * num_outputs / _CUBLAS_MEMORY_BYTES, operations / _CUBLAS_FLOPS
    )
    return best if best is not None and time_us(best) < cublas_us else None


def estimate_us(
    tiling: SplitTiling, num_tokens: int, num_inputs: int, num_outputs: int, *, num_multiprocessors: int
) -> float:
    """Return how long product and sum take, with nothing in the L2 cache: an estimate from an H200's rates."""
    rows = tiling.num_groups * GROUP_ROWS
    tiles = -(-num_outputs // rows) * -(-num_tokens // tiling.tokens) * tiling.num_splits
    waves = -(-tiles // num_multiprocessors)
    step_us = num_multiprocessors * max(
        tiling.step_bytes / _CACHE_BYTES, 2 * rows * tiling.tokens * STEP / _FLOPS
    )
    weight_us = 2 * num_inputs * num_outputs / _MEMORY_BYTES
    sums_bytes = 4 * tiling.num_splits * num_tokens * num_outputs
    return (
        max(waves * tiling.steps(num_inputs) * step_us, weight_us) + 2 * sums_bytes / _CACHE_BYTES + _FIXED_US
    )
