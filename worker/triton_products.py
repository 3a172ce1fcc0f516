"""The gated product of a layer's MLP in one Hopper kernel, written in Gluon: silu(x @ gate^T) * (x @ up^T).

cuBLAS computes the two products alone: SiLU then is a kernel of its own that reads and writes all of them once more.
The kernel owns no state. Its parts:

- One thread block an SM stays for all its tiles (persistent), so that a tile's first loads run while the tile before
  is still multiplied and stored.
- One warp only loads, by TMA, into a ring of shared memory (of the largest tiles, the first of the groups does); three
  groups of four warps multiply, each its own rows of the tile, and keep their results in registers. A full and an
  empty barrier per place of the ring lie between them. As no group waits for another, one group's SiLU runs beside
  the others' products.
- The products are computed transposed: the rows of a tile are the weight's, its columns the tokens. Three groups of 64
  rows then cut Qwen3-8B's 24,576 rows into 128 tiles, which fill an H200's 132 SMs with one tile each up to 256 tokens,
  two for 512 and so on; and a tile of 192 x 256 reads a fifth less from L2 than one of 128 x 256 for the same work.
- The weight stays as it is, gate rows first. Seen as [I / 8, 2, 8, K], a box of TMA brings eight rows of gate, the
  same eight of up, the next eight of gate and so on, and each thread gets gate and up of the same element.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from worker.gated_tilings import GROUP_ROWS, NUM_GROUPS, STEP, Tiling

_TOKEN_TILES = 8
"""Tiles of the same rows of the weight that are computed one after the other, so that they find it in L2."""


@gluon.jit
def _tile_at(tile, num_token_tiles, num_row_tiles, TOKEN_TILES: gl.constexpr):
    """The token tile and row tile at a place of the order that `Tiling.token_tiles` describes."""
    first = tile // (TOKEN_TILES * num_row_tiles) * TOKEN_TILES
    tiles = gl.minimum(num_token_tiles - first, TOKEN_TILES)
    inside = tile % (TOKEN_TILES * num_row_tiles)
    return first + inside % tiles, inside // tiles


@gluon.jit
def _next_place(place, phase, NUM_STAGES: gl.constexpr):
    """The ring's next place, and the parity of the round in which it is used."""
    place += 1
    if place == NUM_STAGES:
        place = 0
        phase ^= 1
    return place, phase


@gluon.jit
def _load(
    work, NUM_STEPS: gl.constexpr, NUM_GROUPS: gl.constexpr, TOKEN_TILES: gl.constexpr
):  # fmt: skip
    """The loader: fills each place of the ring as soon as all groups have read it, for all tiles of this block."""
    descs, rings, full, empty, num_token_tiles, num_row_tiles = work
    x_ring, _, _ = rings
    NUM_STAGES: gl.constexpr = x_ring.shape[0]
    place = 0
    # A new barrier is in its phase 0; waiting for the phase before that one returns at once.
    phase = 1
    for tile in range(gl.program_id(0), num_token_tiles * num_row_tiles, gl.num_programs(0)):
        token_tile, row_tile = _tile_at(tile, num_token_tiles, num_row_tiles, TOKEN_TILES)
        for step in range(NUM_STEPS):
            mbarrier.wait(empty.index(place), phase)
            _load_step(descs, rings, full, token_tile, row_tile, step, place, True, NUM_GROUPS)
            place, phase = _next_place(place, phase, NUM_STAGES)


@gluon.jit
def _load_step(descs, rings, full, token_tile, row_tile, step, place, pred, NUM_GROUPS: gl.constexpr):
    """Begin to load a step's columns of a tile's weight and tokens into a place of the ring, if `pred`."""
    x_desc, weight_desc, _ = descs
    x_ring, weight_ring, _ = rings
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    STEP: gl.constexpr = x_desc.block_type.shape[1]
    EIGHTS: gl.constexpr = weight_desc.block_type.shape[0]
    NUM_BYTES: gl.constexpr = x_desc.block_type.nbytes + NUM_GROUPS * weight_desc.block_type.nbytes
    bar = full.index(place)
    mbarrier.expect(bar, NUM_BYTES, pred=pred)
    for group in gl.static_range(NUM_GROUPS):
        tma.async_copy_global_to_shared(
            weight_desc,
            [(row_tile * NUM_GROUPS + group) * EIGHTS, 0, 0, step * STEP],
            bar,
            weight_ring.index(place * NUM_GROUPS + group),
            pred=pred,
        )
    tma.async_copy_global_to_shared(
        x_desc, [token_tile * TOKENS, step * STEP], bar, x_ring.index(place), pred=pred
    )


@gluon.jit
def _gated(acc, EIGHTS: gl.constexpr, TOKENS: gl.constexpr):
    """silu(gate) * up of the products [16 * EIGHTS, TOKENS]; returns [TOKENS, 8 * EIGHTS]. Nothing leaves a thread."""
    gate, up = acc.reshape([EIGHTS, 2, 8, TOKENS]).permute(0, 2, 3, 1).split()
    value = gate * up / (1.0 + gl.exp2(-1.4426950408889634 * gate))
    return value.reshape([8 * EIGHTS, TOKENS]).permute(1, 0)


@gluon.jit
def _multiply(
    work,
    NUM_STEPS: gl.constexpr, NUM_GROUPS: gl.constexpr, TOKEN_TILES: gl.constexpr, GROUP: gl.constexpr,
    LOADS: gl.constexpr,
):  # fmt: skip
    """A group of four warps: the products of its rows of every tile of this block, their SiLU, and the store.

    With LOADS it also does the loader's work, each time after it began a product.
    """
    descs, rings, full, empty, num_token_tiles, num_row_tiles = work
    x_desc, weight_desc, out_desc = descs
    x_ring, weight_ring, results = rings
    NUM_STAGES: gl.constexpr = x_ring.shape[0]
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    STEP: gl.constexpr = x_desc.block_type.shape[1]
    EIGHTS: gl.constexpr = weight_desc.block_type.shape[0]
    # Each warp has 16 of 64 rows and all tokens.
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    result = results.index(GROUP)
    place = 0
    phase = 0
    before = 0
    before_phase = 0
    if LOADS:
        # The first tile's first columns fill the ring.
        first_token, first_row = _tile_at(gl.program_id(0), num_token_tiles, num_row_tiles, TOKEN_TILES)
        for stage in gl.static_range(NUM_STAGES):
            _load_step(descs, rings, full, first_token, first_row, stage, stage, True, NUM_GROUPS)
    for tile in range(gl.program_id(0), num_token_tiles * num_row_tiles, gl.num_programs(0)):
        token_tile, row_tile = _tile_at(tile, num_token_tiles, num_row_tiles, TOKEN_TILES)
        if LOADS:
            has_next = tile + gl.num_programs(0) < num_token_tiles * num_row_tiles
            next_token_tile, next_row_tile = _tile_at(
                tile + gl.num_programs(0), num_token_tiles, num_row_tiles, TOKEN_TILES
            )
        acc = gl.zeros([16 * EIGHTS, TOKENS], gl.float32, PRODUCTS)
        for step in range(NUM_STEPS):
            mbarrier.wait(full.index(place), phase)
            weight = weight_ring.index(place * NUM_GROUPS + GROUP).reshape([16 * EIGHTS, STEP])
            acc = warpgroup_mma(
                weight, x_ring.index(place).permute((1, 0)), acc, use_acc=step > 0, is_async=True
            )
            # The product just begun stays in flight; the one before it is done with its place.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), pred=step > 0)
            if LOADS:
                if step > 0:
                    # Refill the place with what is multiplied a ring's length after it, if need be the next tile's.
                    mbarrier.wait(empty.index(before), before_phase)
                    ahead = step - 1 + NUM_STAGES
                    inside = ahead < NUM_STEPS
                    _load_step(
                        descs,
                        rings,
                        full,
                        gl.where(inside, token_tile, next_token_tile),
                        gl.where(inside, row_tile, next_row_tile),
                        gl.where(inside, ahead, ahead - NUM_STEPS),
                        before,
                        inside | has_next,
                        NUM_GROUPS,
                    )
                before_phase = phase
            before = place
            place, phase = _next_place(place, phase, NUM_STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before))
        if LOADS:
            mbarrier.wait(empty.index(before), before_phase)
            _load_step(
                descs,
                rings,
                full,
                next_token_tile,
                next_row_tile,
                NUM_STAGES - 1,
                before,
                has_next,
                NUM_GROUPS,
            )
        value = _gated(acc, EIGHTS, TOKENS).to(out_desc.dtype)
        # The store of the tile before must have read what is overwritten now; a whole tile's products lie between.
        tma.store_wait(0)
        result.store(value)
        fence_async_shared()
        tma.async_copy_shared_to_global(
            out_desc, [token_tile * TOKENS, (row_tile * NUM_GROUPS + GROUP) * 8 * EIGHTS], result
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_token_tiles", "num_row_tiles"])
def _gated_product_kernel(
    x_desc, weight_desc, out_desc, num_token_tiles, num_row_tiles,
    NUM_STEPS: gl.constexpr, NUM_GROUPS: gl.constexpr, NUM_STAGES: gl.constexpr, TOKEN_TILES: gl.constexpr,
    HAS_LOADER: gl.constexpr,
):  # fmt: skip
    """A block's shared memory and barriers, and its groups of warps."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [NUM_STAGES] + x_desc.block_type.shape, x_desc.layout)
    weight_ring = gl.allocate_shared_memory(
        x_desc.dtype, [NUM_STAGES * NUM_GROUPS] + weight_desc.block_type.shape, weight_desc.layout
    )
    results = gl.allocate_shared_memory(
        x_desc.dtype, [NUM_GROUPS] + out_desc.block_type.shape, out_desc.layout
    )
    full = mbarrier.allocate_mbarrier(batch=NUM_STAGES)
    empty = mbarrier.allocate_mbarrier(batch=NUM_STAGES)
    for place in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=NUM_GROUPS)
    # TMA must see the new barriers.
    fence_async_shared()
    work = (
        (x_desc, weight_desc, out_desc),
        (x_ring, weight_ring, results),
        full,
        empty,
        num_token_tiles,
        num_row_tiles,
    )
    if HAS_LOADER:
        gl.warp_specialize(
            [
                (_multiply, (work, NUM_STEPS, NUM_GROUPS, TOKEN_TILES, 0, False)),
                (_multiply, (work, NUM_STEPS, NUM_GROUPS, TOKEN_TILES, 1, False)),
                (_multiply, (work, NUM_STEPS, NUM_GROUPS, TOKEN_TILES, 2, False)),
                (_load, (work, NUM_STEPS, NUM_GROUPS, TOKEN_TILES)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (work, NUM_STEPS, NUM_GROUPS, TOKEN_TILES, 0, True)),
                (_multiply, (work, NUM_STEPS, NUM_GROUPS, TOKEN_TILES, 1, False)),
                (_multiply, (work, NUM_STEPS, NUM_GROUPS, TOKEN_TILES, 2, False)),
            ],
            [4, 4],
            [168, 168],
        )


def launch_gated_product(
    inputs: Tensor, weight: Tensor, tiling: Tiling, *, only_compile: bool = False
) -> Tensor:
    """Do as `worker.gated_kernels.gated_product` says, in bfloat16; sums and SiLU are float32.

    With `only_compile` nothing is computed, and what is returned has no meaning.
    """
    (num_tokens, num_inputs), num_outputs = inputs.shape, weight.shape[0] // 2
    out = inputs.new_empty(num_tokens, num_outputs)
    half = GROUP_ROWS // 2
    x_desc = _descriptor(inputs, [num_tokens, num_inputs], [num_inputs, 1], [tiling.tokens, STEP])
    weight_desc = _descriptor(
        weight,
        [num_outputs // 8, 2, 8, num_inputs],
        [8 * num_inputs, num_outputs * num_inputs, num_inputs, 1],
        [GROUP_ROWS // 16, 2, 8, STEP],
    )
    out_desc = _descriptor(out, [num_tokens, num_outputs], [num_outputs, 1], [tiling.tokens, half])
    num_token_tiles = -(-num_tokens // tiling.tokens)
    num_row_tiles = -(-num_outputs // (NUM_GROUPS * half))
    num_blocks = torch.cuda.get_device_properties(inputs.device).multi_processor_count
    grid = (min(num_token_tiles * num_row_tiles, num_blocks),)
    run = partial(_gated_product_kernel.warmup, grid=grid) if only_compile else _gated_product_kernel[grid]
    run(
        x_desc,
        weight_desc,
        out_desc,
        num_token_tiles,
        num_row_tiles,
        NUM_STEPS=num_inputs // STEP,
        NUM_GROUPS=NUM_GROUPS,
        NUM_STAGES=tiling.num_stages,
        TOKEN_TILES=_TOKEN_TILES,
        HAS_LOADER=tiling.has_loader,
        num_warps=4,
    )
    return out


def _descriptor(base: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(base, shape, strides, block, layout)
