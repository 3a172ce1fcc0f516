"""How a gated product is cut into tiles, and where that pays. Pure: `worker.triton_products` computes it."""

from __future__ import annotations

from dataclasses import dataclass

NUM_GROUPS = 3
"""Groups of warps of a block that multiply, each its own rows of the weight."""
GROUP_ROWS = 64
"""Rows of one group; half of them are gate's."""
STEP = 64
"""Columns of input and weight in a place of the ring: 128 bytes of bfloat16, the widest swizzle."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """A block multiplies its rows of the weight with so many tokens at once."""

    tokens: int
    num_stages: int
    """Places of the ring of shared memory."""
    relative_cost: float
    """Of a token, next to the largest tiling, as measured on an H200."""

    @property
    def has_loader(self) -> bool:
        """Whether a warp of its own loads; else the first of the groups loads, too.

        Three groups and a loader are 512 threads, of which each starts with 128 of an SM's 65,536 registers; the
        assembler refuses there the instruction of 256 tokens, although each group has 160 by then.
        """
        return self.tokens < 256


TILINGS = (
    Tiling(tokens=256, num_stages=3, relative_cost=1.0),
    Tiling(tokens=128, num_stages=5, relative_cost=1.06),
    Tiling(tokens=64, num_stages=6, relative_cost=1.25),
)
_FIXED_COST = 0.2
"""Of a block, in parts of a tile: its first loads and its last SiLU, which nothing hides."""
_LEAST_USE = 0.6
"""Share of the multiprocessors' time for which there must be tiles. cuBLAS has smaller ones for less."""
_LEAST_TOKENS = 65


def choose_tiling(
    num_tokens: int, num_inputs: int, num_outputs: int, *, num_multiprocessors: int
) -> Tiling | None:
    """Return the tiling for ``[num_tokens, num_inputs]`` to ``[num_tokens, num_outputs]``, or None if cuBLAS is better.

    It is also None where the kernel cannot do it: a box of the weight has whole eights of rows and whole steps, and a
    ring must not be longer than a row.
    """
    longest = max(tiling.num_stages for tiling in TILINGS)
    if num_inputs % STEP or num_inputs < longest * STEP or num_outputs % 8 or num_tokens < _LEAST_TOKENS:
        return None
    num_row_tiles = -(-2 * num_outputs // (NUM_GROUPS * GROUP_ROWS))

    def waves(tiling: Tiling) -> int:
        return -(-num_row_tiles * -(-num_tokens // tiling.tokens) // num_multiprocessors)

    best = min(TILINGS, key=lambda t: (waves(t) + _FIXED_COST) * t.tokens * t.relative_cost)
    num_tiles = num_row_tiles * num_tokens / best.tokens
    return best if num_tiles >= _LEAST_USE * waves(best) * num_multiprocessors else None
