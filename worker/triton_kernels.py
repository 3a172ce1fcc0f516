"""The Triton kernels behind `worker.kernels`: causal attention over KV pages, and rotary embedding.

Attention: a program computes some tokens of one sequence for one KV head and all query heads that share it (the
rows of its matrix products are (token, query head) pairs). Keys and values of the batch itself are read where the
projections left them, those of earlier chunks from their pages; so no program waits for another one's write. The
softmax is computed block by block as in FlashAttention (Dao et al., 2022).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.launching import overlap_options
from worker.triton_ahead import begin_kernel, prefetch_share

_ROWS = 64
"""(token, query head) pairs of a block. With four warps and two stages this was the fastest tiling measured on an
H200 from 16 to 1,024 tokens a sequence; larger ones gain from some 8,000 on."""
_FEW_TOKENS = 512
"""Up to so many a multiprocessor has one program or two, which then must have more of its cached keys on their way.
For more, reading the next product's weight takes less time than computing that product: it is not asked for ahead."""


def launch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    query_starts: torch.Tensor,
    num_cached: torch.Tensor,
    page_table: torch.Tensor,
    keys_offset: int,
    values_offset: int,
    page_size: int,
    scaling: float,
    window: int,
    softcap: float,
    next_weight: torch.Tensor | None = None,
    next_begin: int = 0,
    next_bytes: int = 0,
) -> torch.Tensor:
    """Do as `worker.kernels.prefill_attention` says."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, num_slots = key.shape[1], num_cached.shape[0]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    group = num_heads // num_kv_heads
    rows, block_keys = max(_ROWS, triton.next_power_of_2(group)), 64 if head_dim <= 128 else 32
    block_tokens = max(rows // group, 1)
    # A sequence's blocks begin anew, so there are up to S more than T / block_tokens; the last ones take the pads.
    grid = (num_tokens // block_tokens + num_slots + 1, num_kv_heads)
    _attention_kernel[grid](
        query,
        key,
        value,
        out,
        pool,
        query_starts,
        num_cached,
        page_table,
        query if next_weight is None else next_weight,
        next_begin,
        next_bytes,
        num_tokens,
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
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(triton.next_power_of_2(head_dim), 16),
        PAGE_SIZE=page_size,
        WINDOW=window,
        HAS_SOFTCAP=softcap > 0,
        PADDED_SLOTS=triton.next_power_of_2(num_slots + 1),
        ROWS=rows,
        BLOCK_TOKENS=block_tokens,
        PADDED_BLOCK_TOKENS=triton.next_power_of_2(block_tokens),
        BLOCK_KEYS=block_keys,
        CACHED_STAGES=4 if num_tokens <= _FEW_TOKENS and head_dim <= 128 else 2,
        HAS_NEXT=next_weight is not None and num_tokens <= _FEW_TOKENS,
        **overlap_options(query.device),
        num_warps=4,
        num_stages=2,
    )
    return out


# Without this a bucket of an odd number of tokens would compile a kernel of its own.
@triton.jit(do_not_specialize=["next_begin", "next_bytes", "num_tokens", "num_slots", "table_stride"])
def _attention_kernel(
    query,  # [T, heads, head_dim]
    key,  # [T, kv_heads, head_dim]
    value,  # [T, kv_heads, head_dim]
    out,  # [T, heads, head_dim], contiguous
    pool,
    query_starts,  # [S + 1]
    num_cached,  # [S]
    page_table,  # [S, P]
    next_weight,
    next_begin,
    next_bytes,
    num_tokens,
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PADDED_BLOCK_TOKENS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CACHED_STAGES: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if HAS_NEXT:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        prefetch_share(
            next_weight, next_begin, next_bytes, program, tl.num_programs(0) * tl.num_programs(1), 128
        )
    begin_kernel(OVERLAPS)
    # Long sequences' last blocks have the most to do: the highest numbers start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)

    # Slot i owns the blocks from starts[i] // BLOCK_TOKENS + i on; slot S stands for the pads.
    slots = tl.arange(0, PADDED_SLOTS)
    starts = tl.load(query_starts + slots, mask=slots <= num_slots, other=num_tokens)
    first_blocks = starts // BLOCK_TOKENS + slots
    slot = tl.sum(((first_blocks <= block) & (slots <= num_slots)).to(tl.int32)) - 1
    start = tl.load(query_starts + slot)
    end = tl.load(query_starts + tl.minimum(slot + 1, num_slots))
    end = tl.where(slot == num_slots, num_tokens, end)
    # Place of the block's first token in the batch.
    first = start + (block - (start // BLOCK_TOKENS + slot)) * BLOCK_TOKENS
    if first >= end:
        return

    dims = tl.arange(0, PADDED_DIM)
    dim_mask = dims < HEAD_DIM
    rows = tl.arange(0, ROWS)
    row_tokens = first + rows // GROUP  # place in the batch
    row_heads = kv_head * GROUP + rows % GROUP
    row_mask = (rows < BLOCK_TOKENS * GROUP) & (row_tokens < end)
    out_rows = out + (row_tokens.to(tl.int64) * (NUM_KV_HEADS * GROUP) + row_heads) * HEAD_DIM
    out_mask = row_mask[:, None] & dim_mask[None, :]
    if slot == num_slots:
        zeros = tl.zeros([ROWS, PADDED_DIM], dtype=out.dtype.element_ty)
        tl.store(out_rows[:, None] + dims[None, :], zeros, mask=out_mask)
        return

    cached = tl.load(num_cached + slot)
    pages = page_table + slot * table_stride
    # A KV row is [kv_heads, head_dim]; these point to this head's part of row 0 of page 0.
    pool_keys = pool + keys_offset + kv_head * HEAD_DIM
    pool_values = pool + values_offset + kv_head * HEAD_DIM
    # Row 0 of the sequence's own part of the batch.
    own_keys = key + start.to(tl.int64) * key_stride_t + kv_head * key_stride_h
    own_values = value + start.to(tl.int64) * value_stride_t + kv_head * value_stride_h

    _write_kv(
        own_keys, own_values, key_stride_t, value_stride_t, pool_keys, pool_values, pages,
        first - start, end - start, cached, dims, dim_mask,
        NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_TOKENS, PADDED_BLOCK_TOKENS,
    )  # fmt: skip

    queries = tl.load(
        query
        + row_tokens.to(tl.int64)[:, None] * query_stride_t
        + row_heads[:, None] * query_stride_h
        + dims[None, :],
        mask=out_mask,
        other=0.0,
    )
    positions = cached + row_tokens - start  # place in the sequence
    score_scale = scaling * 1.4426950408889634
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)

    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(cached + first - start - WINDOW + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
    block_keys = tl.arange(0, BLOCK_KEYS)

    # Whole blocks of cached keys within one page each are seen by all rows: no mask, and one look at the table.
    whole_end = first_key
    if WINDOW == 0 and PAGE_SIZE % BLOCK_KEYS == 0:
        whole_end = cached // BLOCK_KEYS * BLOCK_KEYS
        for begin in tl.range(first_key, whole_end, BLOCK_KEYS, num_stages=CACHED_STAGES):
            page = tl.load(pages + begin // PAGE_SIZE).to(tl.int64)
            offsets = (page * PAGE_SIZE + begin % PAGE_SIZE + block_keys) * (NUM_KV_HEADS * HEAD_DIM)
            block_k = tl.load(pool_keys + offsets[None, :] + dims[:, None], mask=dim_mask[:, None], other=0.0)
            block_v = tl.load(
                pool_values + offsets[:, None] + dims[None, :], mask=dim_mask[None, :], other=0.0
            )
            acc, total, top = _attend(
                queries, block_k, block_v, acc, total, top, positions, begin + block_keys, cached,
                score_scale, softcap, WINDOW, HAS_SOFTCAP, False,
            )  # fmt: skip
    for begin in range(whole_end, cached, BLOCK_KEYS):
        key_positions = begin + block_keys
        key_mask = key_positions < cached
        page = tl.load(pages + key_positions // PAGE_SIZE, mask=key_mask, other=0).to(tl.int64)
        offsets = (page * PAGE_SIZE + key_positions % PAGE_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
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
        acc, total, top = _attend(
            queries, block_k, block_v, acc, total, top, positions, key_positions, cached,
            score_scale, softcap, WINDOW, HAS_SOFTCAP, True,
        )  # fmt: skip

    # Of the batch's own keys, those up to the block's first token are seen by all its rows: no mask.
    own_end = tl.minimum(first + BLOCK_TOKENS, end) - start
    own_first = tl.maximum(first_key - cached, 0)
    unmasked_end = own_first if WINDOW > 0 else (first - start + 1) // BLOCK_KEYS * BLOCK_KEYS
    for begin in range(own_first, unmasked_end, BLOCK_KEYS):
        offsets = begin + block_keys
        block_k = tl.load(
            own_keys + offsets[None, :] * key_stride_t + dims[:, None], mask=dim_mask[:, None], other=0.0
        )
        block_v = tl.load(
            own_values + offsets[:, None] * value_stride_t + dims[None, :], mask=dim_mask[None, :], other=0.0
        )
        acc, total, top = _attend(
            queries, block_k, block_v, acc, total, top, positions, cached + begin + block_keys, cached + own_end,
            score_scale, softcap, WINDOW, HAS_SOFTCAP, False,
        )  # fmt: skip
    for begin in range(unmasked_end, own_end, BLOCK_KEYS):
        offsets = begin + block_keys
        key_mask = begin + block_keys < own_end
        block_k = tl.load(
            own_keys + offsets[None, :] * key_stride_t + dims[:, None],
            mask=key_mask[None, :] & dim_mask[:, None],
            other=0.0,
        )
        block_v = tl.load(
            own_values + offsets[:, None] * value_stride_t + dims[None, :],
            mask=key_mask[:, None] & dim_mask[None, :],
            other=0.0,
        )
        acc, total, top = _attend(
            queries, block_k, block_v, acc, total, top, positions, cached + begin + block_keys, cached + own_end,
            score_scale, softcap, WINDOW, HAS_SOFTCAP, True,
        )  # fmt: skip

    # Rows that stand for no token have seen no key.
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_rows[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=out_mask)


@triton.jit
def _attend(
    queries, block_k, block_v, acc, total, top, positions, key_positions, num_keys,
    score_scale, softcap, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take a block of keys ``[head_dim, keys]`` and values ``[keys, head_dim]`` into the running softmax."""
    scores = tl.dot(queries, block_k, input_precision="ieee") * score_scale  # in units of log2(e), for exp2
    if HAS_SOFTCAP:
        bound = softcap * 1.4426950408889634
        scores = bound * (2 * tl.sigmoid(2 * scores / bound) - 1)
    if MASKED:
        seen = (key_positions[None, :] <= positions[:, None]) & (key_positions[None, :] < num_keys)
        if WINDOW > 0:
            seen = seen & (key_positions[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    if MASKED:
        # A row that has seen no key yet has no maximum to subtract.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    else:
        base = new_top
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(block_v.dtype), block_v, acc * decay[:, None], input_precision="ieee")
    return acc, total, new_top


@triton.jit
def _write_kv(
    own_keys, own_values, key_stride_t, value_stride_t, pool_keys, pool_values, pages,
    first, end, cached, dims, dim_mask,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, PADDED_BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Copy keys and values of the sequence's own tokens ``first : first + BLOCK_TOKENS`` to their pages."""
    offsets = tl.arange(0, PADDED_BLOCK_TOKENS)
    tokens = first + offsets
    mask = (offsets < BLOCK_TOKENS) & (tokens < end)
    positions = cached + tokens
    page = tl.load(pages + positions // PAGE_SIZE, mask=mask, other=0).to(tl.int64)
    targets = (page * PAGE_SIZE + positions % PAGE_SIZE) * (NUM_KV_HEADS * HEAD_DIM)
    both = mask[:, None] & dim_mask[None, :]
    tokens = tokens.to(tl.int64)
    k = tl.load(own_keys + tokens[:, None] * key_stride_t + dims[None, :], mask=both, other=0.0)
    v = tl.load(own_values + tokens[:, None] * value_stride_t + dims[None, :], mask=both, other=0.0)
    tl.store(pool_keys + targets[:, None] + dims[None, :], k, mask=both)
    tl.store(pool_values + targets[:, None] + dims[None, :], v, mask=both)


def launch_rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    weight_offset: float,
    next_weight: torch.Tensor | None = None,
    next_bytes: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `worker.kernels.rotate` says."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    out_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    out_key = torch.empty_like(key, memory_format=torch.contiguous_format)
    _rotate_kernel[(num_tokens,)](
        query,
        key,
        query if query_weight is None else query_weight,
        key if key_weight is None else key_weight,
        cos,
        sin,
        out_query,
        out_key,
        query if next_weight is None else next_weight,
        next_bytes,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        cos.stride(0),
        sin.stride(0),
        eps,
        weight_offset,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF_DIM=head_dim // 2,
        PADDED_HEADS=triton.next_power_of_2(num_heads),
        PADDED_KV_HEADS=triton.next_power_of_2(num_kv_heads),
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        HAS_NORM=query_weight is not None,
        HAS_NEXT=next_weight is not None and num_tokens <= _FEW_TOKENS,
        **overlap_options(query.device),
        num_warps=4,
    )
    return out_query, out_key


@triton.jit(do_not_specialize=["next_bytes"])
def _rotate_kernel(
    query,  # [T, heads, head_dim]
    key,  # [T, kv_heads, head_dim]
    query_weight,  # [head_dim]
    key_weight,  # [head_dim]
    cos,  # [T, head_dim]
    sin,  # [T, head_dim]
    out_query,  # [T, heads, head_dim], contiguous
    out_key,  # [T, kv_heads, head_dim], contiguous
    next_weight,
    next_bytes,
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    cos_stride_t,
    sin_stride_t,
    eps,
    weight_offset,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF_DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_NEXT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if HAS_NEXT:
        prefetch_share(next_weight, 0, next_bytes, tl.program_id(0), tl.num_programs(0), 128)
    begin_kernel(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED_HALF)
    mask = dims < HALF_DIM
    cos_1 = tl.load(cos + token * cos_stride_t + dims, mask=mask, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + token * cos_stride_t + HALF_DIM + dims, mask=mask, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + token * sin_stride_t + dims, mask=mask, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + token * sin_stride_t + HALF_DIM + dims, mask=mask, other=0.0).to(tl.float32)
    _rotate_heads(
        query + token * query_stride_t, query_stride_h, query_weight, out_query + token * (NUM_HEADS * HALF_DIM * 2),
        cos_1, cos_2, sin_1, sin_2, eps, weight_offset, NUM_HEADS, PADDED_HEADS, HALF_DIM, PADDED_HALF, HAS_NORM,
    )  # fmt: skip
    _rotate_heads(
        key + token * key_stride_t, key_stride_h, key_weight, out_key + token * (NUM_KV_HEADS * HALF_DIM * 2),
        cos_1, cos_2, sin_1, sin_2, eps, weight_offset, NUM_KV_HEADS, PADDED_KV_HEADS, HALF_DIM, PADDED_HALF, HAS_NORM,
    )  # fmt: skip


@triton.jit
def _rotate_heads(
    source, stride_h, weight, out, cos_1, cos_2, sin_1, sin_2, eps, weight_offset,
    NUM_HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, HALF_DIM: tl.constexpr, PADDED_HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Norm and rotate all heads of one token."""
    heads = tl.arange(0, PADDED_HEADS)[:, None]
    dims = tl.arange(0, PADDED_HALF)[None, :]
    mask = (heads < NUM_HEADS) & (dims < HALF_DIM)
    x_1 = tl.load(source + heads * stride_h + dims, mask=mask, other=0.0).to(tl.float32)
    x_2 = tl.load(source + heads * stride_h + HALF_DIM + dims, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(x_1 * x_1, 1) + tl.sum(x_2 * x_2, 1)
        scale = tl.rsqrt(squares / (2 * HALF_DIM) + eps)[:, None]
        weight_mask = dims < HALF_DIM
        weight_1 = tl.load(weight + dims, mask=weight_mask, other=0.0).to(tl.float32) + weight_offset
        weight_2 = (
            tl.load(weight + HALF_DIM + dims, mask=weight_mask, other=0.0).to(tl.float32) + weight_offset
        )
        x_1 = x_1 * scale * weight_1
        x_2 = x_2 * scale * weight_2
    out_1 = x_1 * cos_1[None, :] - x_2 * sin_1[None, :]
    out_2 = x_2 * cos_2[None, :] + x_1 * sin_2[None, :]
    rows = out + heads * (2 * HALF_DIM)
    tl.store(rows + dims, out_1.to(out.dtype.element_ty), mask=mask)
    tl.store(rows + HALF_DIM + dims, out_2.to(out.dtype.element_ty), mask=mask)
