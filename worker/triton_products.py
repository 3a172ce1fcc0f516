"""Matrix products for Hopper, written in Gluon: the gated one of a layer's MLP, silu(x @ gate^T) * (x @ up^T), in one
kernel, and others as float32 sums over parts of the columns.

cuBLAS computes gate and up alone: SiLU then is a kernel of its own that reads and writes all of them once more. Other
products of few tokens are bound by their weight's way from memory, and have too few rows for all multiprocessors.
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
- A product that is not gated is cut along K, too (splits), until its tiles fill the SMs. Each tile then writes float32
  sums, from registers, which `worker.triton_plain` adds up.
- The weight stays as it is, gate rows first. Seen as [I / 8, 2, 8, K], a box of TMA brings eight rows of gate, the
  same eight of up, the next eight of gate and so on, and each thread gets gate and up of the same element. Other
  weights are seen as [N / 16, 2, 8, K], whose rows such a box brings in their own order.
- With a next weight, the loader asks for a part of it when it has begun its own last load: it comes to the L2 cache
  while this kernel ends and a small one runs.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.gated_tilings import GROUP_ROWS, NUM_GROUPS, STEP, Tiling
from worker.split_tilings import SplitTiling
from worker.launching import overlap_options
from worker.triton_ahead import PREFETCH

_TOKEN_TILES = 8
"""Tiles of the same rows of the weight that are computed one after the other, so that they find it in L2."""


@gluon.jit
def _tile_at(tile, num_token_tiles, num_row_tiles, TOKEN_TILES: gl.constexpr, NUM_SPLITS: gl.constexpr):
    """The token tile, row tile and split at a place of the order that `_TOKEN_TILES` describes."""
    split = 0
    if NUM_SPLITS > 1:
        # All of a split's tiles come before the next split's.
        split = tile // (num_token_tiles * num_row_tiles)
        tile %= num_token_tiles * num_row_tiles
    first = tile // (TOKEN_TILES * num_row_tiles) * TOKEN_TILES
    tiles = gl.minimum(num_token_tiles - first, TOKEN_TILES)
    inside = tile % (TOKEN_TILES * num_row_tiles)
    return first + inside % tiles, inside // tiles, split


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
    work, next_part, NUM_STEPS: gl.constexpr, NUM_GROUPS: gl.constexpr, TOKEN_TILES: gl.constexpr,
    NUM_SPLITS: gl.constexpr, HAS_NEXT: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """The loader: fills each place of the ring as soon as all groups have read it, for all tiles of this block."""
    descs, rings, _, full, empty, num_token_tiles, num_row_tiles = work
    x_ring, _ = rings
    NUM_STAGES: gl.constexpr = x_ring.shape[0]
    _fill(work, NUM_STEPS, NUM_GROUPS, TOKEN_TILES, NUM_SPLITS, OVERLAPS)
    place = 0
    phase = 0
    for tile in range(gl.program_id(0), num_token_tiles * num_row_tiles * NUM_SPLITS, gl.num_programs(0)):
        token_tile, row_tile, split = _tile_at(tile, num_token_tiles, num_row_tiles, TOKEN_TILES, NUM_SPLITS)
        for step in range(gl.where(tile == gl.program_id(0), NUM_STAGES, 0), NUM_STEPS):
            mbarrier.wait(empty.index(place), phase)
            _load_step(
                descs, rings, full, token_tile, row_tile, split * NUM_STEPS + step, place, True, NUM_GROUPS
            )
            place, phase = _next_place(place, phase, NUM_STAGES)
    if HAS_NEXT:
        _prefetch(next_part)


@gluon.jit
def _fill(
    work, NUM_STEPS: gl.constexpr, NUM_GROUPS: gl.constexpr, TOKEN_TILES: gl.constexpr,
    NUM_SPLITS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """Load the first columns of a block's first tile: they fill the ring, which is empty. The weight is there before
    the kernel before this one has ended, which writes the tokens."""
    descs, rings, _, full, _, num_token_tiles, num_row_tiles = work
    x_ring, _ = rings
    NUM_STAGES: gl.constexpr = x_ring.shape[0]
    token_tile, row_tile, split = _tile_at(
        gl.program_id(0), num_token_tiles, num_row_tiles, TOKEN_TILES, NUM_SPLITS
    )
    for stage in gl.static_range(NUM_STAGES):
        _load_weight(descs, rings, full, row_tile, split * NUM_STEPS + stage, stage, True, NUM_GROUPS)
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    for stage in gl.static_range(NUM_STAGES):
        _load_tokens(descs, rings, full, token_tile, split * NUM_STEPS + stage, stage, True)


@gluon.jit
def _prefetch(next_part):
    """Ask for this block's share of the next weight's bytes, by one warp; else as `prefetch_share` in Triton."""
    weight, num_bytes = next_part
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    bytes_each = gl.cdiv(gl.cdiv(num_bytes, gl.num_programs(0) * 32), 16) * 16
    offsets = (gl.program_id(0) * 32 + lanes) * bytes_each
    sizes = gl.minimum(bytes_each, num_bytes - offsets)
    gl.inline_asm_elementwise(
        PREFETCH, "=r,l,r", [weight.to(gl.int64) + offsets, sizes], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _load_step(descs, rings, full, token_tile, row_tile, step, place, pred, NUM_GROUPS: gl.constexpr):
    """Begin to load a step's columns of a tile's weight and tokens into a place of the ring, if `pred`."""
    _load_weight(descs, rings, full, row_tile, step, place, pred, NUM_GROUPS)
    _load_tokens(descs, rings, full, token_tile, step, place, pred)


@gluon.jit
def _load_weight(descs, rings, full, row_tile, step, place, pred, NUM_GROUPS: gl.constexpr):
    """Begin to load a step's weight. The place's barrier expects the tokens, too."""
    x_desc, weight_desc = descs
    _, weight_ring = rings
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


@gluon.jit
def _load_tokens(descs, rings, full, token_tile, step, place, pred):
    """Begin to load a step's tokens, after its weight."""
    x_desc, _ = descs
    x_ring, _ = rings
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    STEP: gl.constexpr = x_desc.block_type.shape[1]
    tma.async_copy_global_to_shared(
        x_desc, [token_tile * TOKENS, step * STEP], full.index(place), x_ring.index(place), pred=pred
    )


@gluon.jit
def _gated(acc, EIGHTS: gl.constexpr, TOKENS: gl.constexpr):
    """silu(gate) * up of the products [16 * EIGHTS, TOKENS]; returns [TOKENS, 8 * EIGHTS]. Nothing leaves a thread."""
    gate, up = acc.reshape([EIGHTS, 2, 8, TOKENS]).permute(0, 2, 3, 1).split()
    value = gate * up / (1.0 + gl.exp2(-1.4426950408889634 * gate))
    return value.reshape([8 * EIGHTS, TOKENS]).permute(1, 0)


@gluon.jit
def _store_gated(
    acc, target, GROUP: gl.constexpr, token, row, EIGHTS: gl.constexpr, TOKENS: gl.constexpr
):  # fmt: skip
    """Store SiLU of a group's products from its first token and row on, through its own part of `results`."""
    out_desc, results = target
    result = results.index(GROUP)
    value = _gated(acc, EIGHTS, TOKENS).to(out_desc.dtype)
    # The store of the tile before must have read what is overwritten now; a whole tile's products lie between.
    tma.store_wait(0)
    result.store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [token, row // 2], result)


@gluon.jit
def _store_sums(
    acc, target, token, row, split, ROWS: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Store a group's products from its first token and row on to `sums`, [splits, T, N]; a warp fills 32 bytes of each
    token's at a time."""
    sums, num_tokens, num_rows = target
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    tokens = token + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    offsets = (split * num_tokens + tokens)[None, :] * num_rows + rows[:, None]
    gl.store(sums + offsets, acc, mask=(tokens < num_tokens)[None, :] & (rows < num_rows)[:, None])


@gluon.jit
def _multiply(
    work,
    NUM_STEPS: gl.constexpr, NUM_GROUPS: gl.constexpr, TOKEN_TILES: gl.constexpr, NUM_SPLITS: gl.constexpr,
    IS_GATED: gl.constexpr, GROUP: gl.constexpr, LOADS: gl.constexpr, OVERLAPS: gl.constexpr = False,
):  # fmt: skip
    """A group of four warps: the products of its rows of every tile of this block, their SiLU if gated, and the store.

    With LOADS it also does the loader's work, each time after it began a product.
    """
    descs, rings, target, full, empty, num_token_tiles, num_row_tiles = work
    x_desc, weight_desc = descs
    x_ring, weight_ring = rings
    NUM_STAGES: gl.constexpr = x_ring.shape[0]
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    STEP: gl.constexpr = x_desc.block_type.shape[1]
    EIGHTS: gl.constexpr = weight_desc.block_type.shape[0]
    # Each warp has 16 of 64 rows and all tokens.
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    place = 0
    phase = 0
    before = 0
    before_phase = 0
    if LOADS:
        _fill(work, NUM_STEPS, NUM_GROUPS, TOKEN_TILES, NUM_SPLITS, OVERLAPS)
    for tile in range(gl.program_id(0), num_token_tiles * num_row_tiles * NUM_SPLITS, gl.num_programs(0)):
        token_tile, row_tile, split = _tile_at(tile, num_token_tiles, num_row_tiles, TOKEN_TILES, NUM_SPLITS)
        if LOADS:
            has_next = tile + gl.num_programs(0) < num_token_tiles * num_row_tiles * NUM_SPLITS
            next_token_tile, next_row_tile, next_split = _tile_at(
                tile + gl.num_programs(0), num_token_tiles, num_row_tiles, TOKEN_TILES, NUM_SPLITS
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
                        gl.where(
                            inside, split * NUM_STEPS + ahead, next_split * NUM_STEPS + ahead - NUM_STEPS
                        ),
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
                next_split * NUM_STEPS + NUM_STAGES - 1,
                before,
                has_next,
                NUM_GROUPS,
            )
        token, row = token_tile * TOKENS, (row_tile * NUM_GROUPS + GROUP) * 16 * EIGHTS
        if IS_GATED:
            _store_gated(acc, target, GROUP, token, row, EIGHTS, TOKENS)
        else:
            _store_sums(acc, target, token, row, split, 16 * EIGHTS, TOKENS, PRODUCTS)
    if IS_GATED:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tokens", "num_rows", "num_token_tiles", "num_row_tiles", "next_bytes"])
def _product_kernel(
    x_desc, weight_desc, out, num_tokens, num_rows, num_token_tiles, num_row_tiles, next_weight, next_bytes,
    NUM_STEPS: gl.constexpr, NUM_GROUPS: gl.constexpr, NUM_STAGES: gl.constexpr, TOKEN_TILES: gl.constexpr,
    NUM_SPLITS: gl.constexpr, IS_GATED: gl.constexpr, HAS_LOADER: gl.constexpr, HAS_NEXT: gl.constexpr,
    OVERLAPS: gl.constexpr,
):  # fmt: skip
    """A block's shared memory and barriers, and its groups of warps. `out` is a descriptor if gated, else a pointer."""
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [NUM_STAGES] + x_desc.block_type.shape, x_desc.layout)
    weight_ring = gl.allocate_shared_memory(
        x_desc.dtype, [NUM_STAGES * NUM_GROUPS] + weight_desc.block_type.shape, weight_desc.layout
    )
    if IS_GATED:
        results = gl.allocate_shared_memory(x_desc.dtype, [NUM_GROUPS] + out.block_type.shape, out.layout)
        target = (out, results)
    else:
        target = (out, num_tokens, num_rows)  # type: ignore[assignment]
    full = mbarrier.allocate_mbarrier(batch=NUM_STAGES)
    empty = mbarrier.allocate_mbarrier(batch=NUM_STAGES)
    for place in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=NUM_GROUPS)
    # TMA must see the new barriers.
    fence_async_shared()
    work = (
        (x_desc, weight_desc),
        (x_ring, weight_ring),
        target,
        full,
        empty,
        num_token_tiles,
        num_row_tiles,
    )
    next_part = (next_weight, next_bytes)
    if not HAS_LOADER:
        gl.static_assert(NUM_GROUPS == 3)
        gl.warp_specialize(
            [
                (_multiply, (work, NUM_STEPS, 3, TOKEN_TILES, NUM_SPLITS, IS_GATED, 0, True, OVERLAPS)),
                (_multiply, (work, NUM_STEPS, 3, TOKEN_TILES, NUM_SPLITS, IS_GATED, 1, False)),
                (_multiply, (work, NUM_STEPS, 3, TOKEN_TILES, NUM_SPLITS, IS_GATED, 2, False)),
            ],
            [4, 4],
            [168, 168],
        )
    elif NUM_GROUPS == 3:
        gl.warp_specialize(
            [
                (_multiply, (work, NUM_STEPS, 3, TOKEN_TILES, NUM_SPLITS, IS_GATED, 0, False)),
                (_multiply, (work, NUM_STEPS, 3, TOKEN_TILES, NUM_SPLITS, IS_GATED, 1, False)),
                (_multiply, (work, NUM_STEPS, 3, TOKEN_TILES, NUM_SPLITS, IS_GATED, 2, False)),
                (_load, (work, next_part, NUM_STEPS, 3, TOKEN_TILES, NUM_SPLITS, HAS_NEXT, OVERLAPS)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.static_assert(NUM_GROUPS == 2)
        gl.warp_specialize(
            [
                (_multiply, (work, NUM_STEPS, 2, TOKEN_TILES, NUM_SPLITS, IS_GATED, 0, False)),
                (_multiply, (work, NUM_STEPS, 2, TOKEN_TILES, NUM_SPLITS, IS_GATED, 1, False)),
                (_load, (work, next_part, NUM_STEPS, 2, TOKEN_TILES, NUM_SPLITS, HAS_NEXT, OVERLAPS)),
            ],
            [4, 1],
            [208, 24],
        )


def launch_gated_product(
    inputs: Tensor,
    weight: Tensor,
    tiling: Tiling,
    *,
    next_weight: Tensor | None = None,
    next_bytes: int = 0,
    only_compile: bool = False,
) -> Tensor:
    """Do as `worker.gated_kernels.gated_product` says, in bfloat16; sums and SiLU are float32.

    The first `next_bytes` of `next_weight`, a multiple of 16, are asked to come to the L2 cache at the end, if the
    tiling has a loader. With `only_compile` nothing is computed, and what is returned has no meaning.
    """
    (num_tokens, num_inputs), num_outputs = inputs.shape, weight.shape[0] // 2
    out = inputs.new_empty(num_tokens, num_outputs)
    weight_desc = _weight_descriptor(
        weight,
        [num_outputs // 8, 2, 8, num_inputs],
        [8 * num_inputs, num_outputs * num_inputs, num_inputs, 1],
    )
    block = [tiling.tokens, GROUP_ROWS // 2]
    _launch(
        inputs,
        weight_desc,
        _descriptor(out, [num_tokens, num_outputs], [num_outputs, 1], block),
        weight.shape[0],
        (next_weight, next_bytes),
        only_compile=only_compile,
        tokens=tiling.tokens,
        NUM_STEPS=num_inputs // STEP,
        NUM_GROUPS=NUM_GROUPS,
        NUM_STAGES=tiling.num_stages,
        NUM_SPLITS=1,
        IS_GATED=True,
        HAS_LOADER=tiling.has_loader,
    )
    return out


def launch_split_sums(
    inputs: Tensor,
    weight: Tensor,
    tiling: SplitTiling,
    *,
    next_weight: Tensor | None = None,
    next_bytes: int = 0,
    only_compile: bool = False,
) -> Tensor:
    """Return ``[splits, T, N]`` in float32, of which the sum over splits is ``inputs @ weight^T``.

    `inputs` is ``[T, K]``, `weight` ``[N, K]``, N a multiple of 16; both contiguous, in bfloat16. The rest as
    `launch_gated_product` says.
    """
    (num_tokens, num_inputs), num_outputs = inputs.shape, weight.shape[0]
    sums = inputs.new_empty(tiling.num_splits, num_tokens, num_outputs, dtype=torch.float32)
    weight_desc = _weight_descriptor(
        weight,
        [num_outputs // 16, 2, 8, num_inputs],
        [16 * num_inputs, 8 * num_inputs, num_inputs, 1],
    )
    _launch(
        inputs,
        weight_desc,
        sums,
        num_outputs,
        (next_weight, next_bytes),
        only_compile=only_compile,
        tokens=tiling.tokens,
        # Beyond a row's end there are zeros, which are not read.
        NUM_STEPS=tiling.steps(num_inputs),
        NUM_GROUPS=tiling.num_groups,
        NUM_STAGES=tiling.num_stages,
        NUM_SPLITS=tiling.num_splits,
        IS_GATED=False,
        HAS_LOADER=True,
    )
    return sums


def _launch(
    inputs: Tensor,
    weight_desc: TensorDescriptor,
    out: TensorDescriptor | Tensor,
    num_rows: int,
    next_part: tuple[Tensor | None, int],
    *,
    only_compile: bool,
    tokens: int,
    **options: int,
) -> None:
    """Launch or compile the kernel for tiles of so many tokens, with the constants that `options` names."""
    num_tokens, num_inputs = inputs.shape
    next_weight, next_bytes = next_part
    num_token_tiles = -(-num_tokens // tokens)
    num_row_tiles = -(-num_rows // (options["NUM_GROUPS"] * GROUP_ROWS))
    num_blocks = torch.cuda.get_device_properties(inputs.device).multi_processor_count
    grid = (min(num_token_tiles * num_row_tiles * options["NUM_SPLITS"], num_blocks),)
    run = partial(_product_kernel.warmup, grid=grid) if only_compile else _product_kernel[grid]
    run(
        _descriptor(inputs, [num_tokens, num_inputs], [num_inputs, 1], [tokens, STEP]),
        weight_desc,
        out,
        num_tokens,
        num_rows,
        num_token_tiles,
        num_row_tiles,
        inputs if next_weight is None else next_weight,
        next_bytes,
        TOKEN_TILES=_TOKEN_TILES,
        HAS_NEXT=next_weight is not None and options["HAS_LOADER"],
        num_warps=4,
        **overlap_options(inputs.device),
        **options,
    )


def _weight_descriptor(weight: Tensor, shape: list[int], strides: list[int]) -> TensorDescriptor:
    """Describe a weight whose boxes are 64 rows, in the order of its first three dimensions, of one step's columns."""
    return _descriptor(weight, shape, strides, [GROUP_ROWS // 16, 2, 8, STEP])


def _descriptor(base: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(base, shape, strides, block, layout)
