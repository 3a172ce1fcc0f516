"""The operators of a captured pass that torch does not have. Their kernels are Triton's, which comes with CUDA only."""

from __future__ import annotations

import torch


@torch.library.custom_op("purefill::prefill_attention", mutates_args=("pool",))
def prefill_attention(
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
    """Write the KV of T token positions to its pages and let each of S sequences attend to its own.

    `query` is ``[T, heads, head_dim]``, `key` and `value` are ``[T, kv_heads, head_dim]``, each dense in the last
    dimension. `pool` is one dimension; a layer's keys, ``[pages, page_size, kv_heads, head_dim]``, begin at
    element `keys_offset`, its values at `values_offset`. `query_starts` is ``[S + 1]``, `num_cached` ``[S]``,
    `page_table` ``[S, P]``, all int32. `window` is the most keys that a query sees, 0 for all; `softcap` 0 is none.

    Of `next_weight`, which the next matrix product reads, `next_bytes` from byte `next_begin` on are asked to come to
    the L2 cache meanwhile, if there are so few tokens that this helps; both are multiples of 16.

    Returns ``[T, heads, head_dim]``, zero at pad positions. Pads write no KV.
    """
    from worker.triton_kernels import launch_attention

    return launch_attention(
        query,
        key,
        value,
        pool,
        query_starts,
        num_cached,
        page_table,
        keys_offset,
        values_offset,
        page_size,
        scaling,
        window,
        softcap,
        next_weight,
        next_begin,
        next_bytes,
    )


@prefill_attention.register_fake
def _(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@torch.library.custom_op("purefill::rotate", mutates_args=())
def rotate(
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
    """Apply rotary embedding to queries and keys, each head's two halves being one rotation's coordinates.

    `query` is ``[T, heads, head_dim]``, `key` ``[T, kv_heads, head_dim]``, `cos` and `sin` ``[T, head_dim]``, each
    dense in the last dimension. With weights, ``[head_dim]``, every head goes through an RMS norm of epsilon `eps`
    first, scaled by weight plus `weight_offset`. The first `next_bytes` of `next_weight` are asked to come to the L2
    cache, as `prefill_attention` says. Returns both in the shape they came in, contiguous.
    """
    from worker.triton_kernels import launch_rotate

    return launch_rotate(
        query, key, query_weight, key_weight, cos, sin, eps, weight_offset, next_weight, next_bytes
    )


@rotate.register_fake
def _(query: torch.Tensor, key: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
    contiguous = torch.contiguous_format
    return torch.empty_like(query, memory_format=contiguous), torch.empty_like(key, memory_format=contiguous)
