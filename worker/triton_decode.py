"""The Triton kernels behind `worker.decode_kernels`: attention of one new token per sequence over KV pages.

All sequences' keys are cut into blocks, and the blocks of each KV head are dealt out to a fixed number of programs in
equal, consecutive runs, whatever the lengths are. So a graph captured once is balanced for any contexts, and few or
short sequences still keep the whole GPU busy. A run may end one sequence and begin another; what it found of each is
a part, with the softmax's running maximum and sum. A second kernel puts the parts of a sequence together. (Flash
decoding with the work split as in stream-K: Dao et al., 2023; Osama et al., 2023.)

The query heads that share a KV head are the rows of one matrix product, so each key is read once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_PLAN_CHUNK = 1024
_PARTS_AT_ONCE = 16
_LEAST_SLOTS_AT_ONCE = 128
"""A slot for each thread of a program: fewer take as long, and one compiled kernel serves all steps up to so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How the decode kernel is laid out on the GPU."""

    block_keys: int
    """Keys that a program reads at once."""
    programs_per_sm: int
    num_warps: int
    num_stages: int


TILING = Tiling(block_keys=64, programs_per_sm=2, num_warps=4, num_stages=3)


def launch_plan(
    query_starts: torch.Tensor, num_cached: torch.Tensor, window: int, tiling: Tiling = TILING
) -> torch.Tensor:
    """Do as `worker.decode_kernels.decode_plan` says."""
    starts = torch.empty_like(query_starts)
    _plan_kernel[(1,)](
        query_starts,
        num_cached,
        starts,
        num_cached.shape[0],
        WINDOW=window,
        BLOCK_KEYS=tiling.block_keys,
        CHUNK=min(_slots_at_once(num_cached.shape[0]), _PLAN_CHUNK),
    )
    return starts


def _slots_at_once(num_slots: int) -> int:
    """Return the slots that a program looks at together, a power of two."""
    return max(int(triton.next_power_of_2(num_slots)), _LEAST_SLOTS_AT_ONCE)


@triton.jit(do_not_specialize=["num_slots"])
def _plan_kernel(
    query_starts, num_cached, starts, num_slots, WINDOW: tl.constexpr, BLOCK_KEYS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    before = 0
    for first in range(0, num_slots, CHUNK):
        slots = first + tl.arange(0, CHUNK)
        mask = slots < num_slots
        begin = tl.load(query_starts + slots, mask=mask, other=0)
        end = tl.load(query_starts + slots + 1, mask=mask, other=0)
        cached = tl.load(num_cached + slots, mask=mask, other=0)
        num_blocks = (cached + BLOCK_KEYS - 1) // BLOCK_KEYS
        if WINDOW > 0:
            num_blocks -= tl.maximum(cached - WINDOW + 1, 0) // BLOCK_KEYS
        # The new token's own KV is no block, but somebody must attend to it.
        num_blocks = tl.where(end > begin, tl.maximum(num_blocks, 1), 0)
        tl.store(starts + slots, before + tl.cumsum(num_blocks, 0) - num_blocks, mask=mask)
        before += tl.sum(num_blocks, 0)
    tl.store(starts + num_slots, before)


def launch_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    block_starts: torch.Tensor,
    num_cached: torch.Tensor,
    page_table: torch.Tensor,
    keys_offset: int,
    values_offset: int,
    page_size: int,
    scaling: float,
    window: int,
    softcap: float,
    tiling: Tiling = TILING,
) -> torch.Tensor:
    """Do as `worker.decode_kernels.decode_attention` says."""
    num_slots, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    padded_dim = max(triton.next_power_of_2(head_dim), 16)
    num_workers = max(_num_multiprocessors(query.device) * tiling.programs_per_sm // num_kv_heads, 1)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    num_parts = num_workers + num_slots
    parts = torch.empty(num_parts, num_heads, head_dim, dtype=torch.float32, device=query.device)
    part_stats = torch.empty(num_parts, num_heads, 2, dtype=torch.float32, device=query.device)
    _decode_kernel[(num_workers * num_kv_heads,)](
        query,
        key,
        value,
        parts,
        part_stats,
        pool,
        block_starts,
        num_cached,
        page_table,
        num_slots,
        page_table.stride(0),
        keys_offset,
        values_offset,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        scaling,
        softcap,
        NUM_WORKERS=num_workers,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=max(triton.next_power_of_2(group), 16),
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        PAGE_SIZE=page_size,
        WINDOW=window,
        HAS_SOFTCAP=softcap > 0,
        PADDED_SLOTS=_slots_at_once(num_slots),
        BLOCK_KEYS=tiling.block_keys,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages if head_dim <= 128 else 2,
    )
    _combine_kernel[(num_slots, num_heads)](
        parts,
        part_stats,
        out,
        block_starts,
        num_slots,
        NUM_WORKERS=num_workers,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        PARTS=_PARTS_AT_ONCE,
        num_warps=2,
    )
    return out


def _num_multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":  # Triton's interpreter
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit(do_not_specialize=["num_slots", "table_stride"])
def _decode_kernel(
    query,  # [S, heads, head_dim]
    key,  # [S, kv_heads, head_dim]
    value,  # [S, kv_heads, head_dim]
    parts,  # [W + S, heads, head_dim]
    part_stats,  # [W + S, heads, 2]: maximum and sum
    pool,
    block_starts,  # [S + 1]
    num_cached,  # [S]
    page_table,  # [S, P]
    num_slots,
    table_stride,
    # Of a large pool's layers only the first few begin within 32 bits: left to itself, Triton compiles for each kind.
    keys_offset: tl.int64,
    values_offset: tl.int64,
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    scaling,
    softcap,
    NUM_WORKERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    # Programs that run side by side read the heads of the same keys, which are neighbours in memory.
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    worker = tl.program_id(0) // NUM_KV_HEADS
    total = tl.load(block_starts + num_slots)
    num_workers = tl.minimum(total, NUM_WORKERS)
    if worker >= num_workers:
        return
    begin = (worker.to(tl.int64) * total // num_workers).to(tl.int32)
    end = ((worker + 1).to(tl.int64) * total // num_workers).to(tl.int32)
    slots = tl.arange(0, PADDED_SLOTS)
    slot_ends = tl.load(block_starts + 1 + slots, mask=slots < num_slots, other=2147483647)
    first_slot = tl.sum((slot_ends <= begin).to(tl.int32), 0)
    last_slot = tl.sum((slot_ends < end).to(tl.int32), 0)

    dims = tl.arange(0, PADDED_DIM)
    dim_mask = dims < HEAD_DIM
    rows = tl.arange(0, ROWS)
    row_mask = rows < GROUP
    heads = kv_head * GROUP + rows
    row_dims = row_mask[:, None] & dim_mask[None, :]
    block_keys = tl.arange(0, BLOCK_KEYS)
    pool_keys = pool + keys_offset + kv_head * HEAD_DIM
    pool_values = pool + values_offset + kv_head * HEAD_DIM
    score_scale = scaling * 1.4426950408889634  # scores are in units of log2(e), for exp2

    for slot in range(first_slot, last_slot + 1):
        slot_start = tl.load(block_starts + slot)
        slot_end = tl.load(block_starts + slot + 1)
        cached = tl.load(num_cached + slot)
        skipped = -slot_start
        first_seen = 0
        if WINDOW > 0:
            first_seen = tl.maximum(cached - WINDOW + 1, 0)
            skipped += first_seen // BLOCK_KEYS
        first_key = (tl.maximum(begin, slot_start) + skipped) * BLOCK_KEYS
        keys_end = tl.minimum((tl.minimum(end, slot_end) + skipped) * BLOCK_KEYS, cached)
        pages = page_table + slot * table_stride
        queries = tl.load(
            query + slot * query_stride_t + heads[:, None] * query_stride_h + dims[None, :],
            mask=row_dims,
            other=0.0,
        )
        top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total_weight = tl.zeros([ROWS], dtype=tl.float32)
        acc = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)
        if PAGE_SIZE % BLOCK_KEYS == 0:
            next_page = tl.load(pages + first_key // PAGE_SIZE)
        for begin_key in range(first_key, keys_end, BLOCK_KEYS):
            positions = begin_key + block_keys
            key_mask = positions < keys_end
            if PAGE_SIZE % BLOCK_KEYS == 0:
                # The next block's page is looked up while this block is on its way.
                page = next_page.to(tl.int64)
                next_page = tl.load(
                    pages + (begin_key + BLOCK_KEYS) // PAGE_SIZE,
                    mask=begin_key + BLOCK_KEYS < keys_end,
                    other=0,
                )
            else:
                page = tl.load(pages + positions // PAGE_SIZE, mask=key_mask, other=0).to(tl.int64)
            offsets = (page * PAGE_SIZE + positions % PAGE_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
            block_k = tl.load(
                pool_keys + offsets[None, :] + dims[:, None],
                mask=key_mask[None, :] & dim_mask[:, None],
                other=0.0,
            )
            block_v = tl.load(
                pool_values + offsets[:, None] + dims[None, :],
                mask=key_mask[:, None] & dim_mask[None, :],
                other=0.0,
            )
            scores = tl.dot(queries, block_k, input_precision="ieee") * score_scale
            if HAS_SOFTCAP:
                scores = _bend(scores, softcap)
            seen = key_mask
            if WINDOW > 0:
                seen = seen & (positions >= first_seen)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            # With a window, the first block may have no key that is seen.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - base[:, None])
            decay = tl.exp2(top - base)
            total_weight = total_weight * decay + tl.sum(weights, 1)
            acc = tl.dot(weights.to(block_v.dtype), block_v, acc * decay[:, None], input_precision="ieee")
            top = new_top

        if slot_end <= end:
            new_key = tl.load(
                key + slot * key_stride_t + kv_head * key_stride_h + dims, mask=dim_mask, other=0.0
            )
            new_value = tl.load(
                value + slot * value_stride_t + kv_head * value_stride_h + dims,
                mask=dim_mask,
                other=0.0,
            )
            page = tl.load(pages + cached // PAGE_SIZE).to(tl.int64)
            target = (page * PAGE_SIZE + cached % PAGE_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
            tl.store(pool_keys + target + dims, new_key, mask=dim_mask)
            tl.store(pool_values + target + dims, new_value, mask=dim_mask)
            scores = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * score_scale
            if HAS_SOFTCAP:
                scores = _bend(scores, softcap)
            new_top = tl.maximum(top, scores)
            weights = tl.exp2(scores - new_top)
            decay = tl.exp2(top - new_top)
            total_weight = total_weight * decay + weights
            acc = acc * decay[:, None] + weights[:, None] * new_value.to(tl.float32)[None, :]
            top = new_top

        # Each step from one (worker, slot) to the next raises their sum, so it names the part.
        part_heads = (worker + slot) * (NUM_KV_HEADS * GROUP) + heads
        tl.store(parts + part_heads[:, None] * HEAD_DIM + dims[None, :], acc, mask=row_dims)
        tl.store(part_stats + 2 * part_heads, top, mask=row_mask)
        tl.store(part_stats + 2 * part_heads + 1, total_weight, mask=row_mask)


@triton.jit
def _bend(scores, softcap):
    """Return ``softcap * tanh(scores / softcap)`` for scores in units of log2(e)."""
    bound = softcap * 1.4426950408889634
    return bound * (2 * tl.sigmoid(2 * scores / bound) - 1)


@triton.jit(do_not_specialize=["num_slots"])
def _combine_kernel(
    parts,  # [W + S, heads, head_dim]
    part_stats,  # [W + S, heads, 2]
    out,  # [S, heads, head_dim], contiguous
    block_starts,  # [S + 1]
    num_slots,
    NUM_WORKERS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    slot, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, PADDED_DIM)
    dim_mask = dims < HEAD_DIM
    out_row = out + (slot.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    total = tl.load(block_starts + num_slots).to(tl.int64)
    slot_start = tl.load(block_starts + slot)
    slot_end = tl.load(block_starts + slot + 1)
    if slot_start == slot_end:
        tl.store(out_row + dims, tl.zeros([PADDED_DIM], dtype=out.dtype.element_ty), mask=dim_mask)
        return
    num_workers = tl.minimum(total, NUM_WORKERS)
    # The worker whose run holds a block b is the last w with w * total // num_workers <= b.
    first_worker = (((slot_start + 1) * num_workers - 1) // total).to(tl.int32)
    last_worker = ((slot_end * num_workers - 1) // total).to(tl.int32)
    top = float("-inf")
    total_weight = 0.0
    acc = tl.zeros([PADDED_DIM], dtype=tl.float32)
    for first in range(first_worker, last_worker + 1, PARTS):
        workers = first + tl.arange(0, PARTS)
        mask = workers <= last_worker
        part_heads = (workers + slot) * NUM_HEADS + head
        tops = tl.load(part_stats + 2 * part_heads, mask=mask, other=float("-inf"))
        sums = tl.load(part_stats + 2 * part_heads + 1, mask=mask, other=0.0)
        values = tl.load(
            parts + part_heads[:, None] * HEAD_DIM + dims[None, :],
            mask=mask[:, None] & dim_mask[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(tops, 0))
        # A part that has seen no key of the window has no maximum; its sum is 0.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        scales = tl.exp2(tops - base)
        decay = tl.exp2(top - base)
        total_weight = total_weight * decay + tl.sum(sums * scales, 0)
        acc = acc * decay + tl.sum(values * scales[:, None], 0)
        top = new_top
    tl.store(out_row + dims, (acc / total_weight).to(out.dtype.element_ty), mask=dim_mask)


def launch_take_chosen(token_ids: torch.Tensor, chosen: torch.Tensor) -> None:
    """Do as `worker.model_runner.take_chosen` says."""
    num_tokens = token_ids.shape[0]
    _take_kernel[(triton.cdiv(num_tokens, _PLAN_CHUNK),)](token_ids, chosen, num_tokens, CHUNK=_PLAN_CHUNK)


@triton.jit(do_not_specialize=["num_tokens"])
def _take_kernel(token_ids, chosen, num_tokens, CHUNK: tl.constexpr):
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    mask = index < num_tokens
    token = tl.load(token_ids + index, mask=mask, other=0)
    is_row = mask & (token < 0)
    row = tl.where(is_row, -1 - token, 0)
    tl.store(token_ids + index, tl.load(chosen + row, mask=is_row, other=0).to(tl.int32), mask=is_row)
