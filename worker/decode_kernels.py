"""The operators of a captured decode step that torch does not have. Their kernels are in `worker.triton_decode`."""

from __future__ import annotations

import torch


@torch.library.custom_op("purefill::decode_plan", mutates_args=())
def decode_plan(query_starts: torch.Tensor, num_cached: torch.Tensor, window: int) -> torch.Tensor:
    """Count the blocks of keys of S sequences of which each computes one token, or none.

    `query_starts` is ``[S + 1]``, `num_cached` ``[S]``, both int32. `window` is the most keys that a query sees, 0
    for all. Returns ``[S + 1]`` int32: how many blocks all sequences before each have, and at the end, all.
    """
    from worker.triton_decode import launch_plan

    return launch_plan(query_starts, num_cached, window)


@decode_plan.register_fake
def _(query_starts: torch.Tensor, num_cached: torch.Tensor, window: int) -> torch.Tensor:
    return torch.empty_like(query_starts)


@torch.library.custom_op("purefill::decode_attention", mutates_args=("pool",))
def decode_attention(
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
) -> torch.Tensor:
    """Write the KV of one new token of each of S sequences to its page and let it attend to its sequence.

    `query` is ``[S, heads, head_dim]``, `key` and `value` are ``[S, kv_heads, head_dim]``, each dense in the last
    dimension. `block_starts` is what `decode_plan` returns for the same window; everything else is as in
    `worker.kernels.prefill_attention`. Slots without a token must come last.

    Returns ``[S, heads, head_dim]``, zero for slots without a token, of which no KV is written.
    """
    from worker.triton_decode import launch_decode

    return launch_decode(
        query,
        key,
        value,
        pool,
        block_starts,
        num_cached,
        page_table,
        keys_offset,
        values_offset,
        page_size,
        scaling,
        window,
        softcap,
    )


@decode_attention.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)
