"""Paged attention behind transformers' models: the KV of each token goes to its page, queries read pages.

Registered in transformers under the name ``purefill``, so any model whose attention goes through
`ALL_ATTENTION_FUNCTIONS` uses it. What a pass needs travels as the keyword `paged` of the model's forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphs.layout import BatchInputs
from worker.kv_pool import KVPool

ATTENTION_NAME = "purefill"


@dataclass(frozen=True, slots=True)
class _Slot:
    """One sequence of the pass: its queries are tokens ``start:end`` of the batch, its KV `kv_len` tokens."""

    start: int
    end: int
    kv_len: int
    pages: list[int]
    first_page: int | None
    """Set if the pages are consecutive: then they are one slice, and no copy is needed to read them."""


class PagedPass:
    """What the attention layers of one forward pass share: where KV is written, and who attends to what."""

    def __init__(self, inputs: BatchInputs, kv_slots: torch.Tensor, kv_lens: torch.Tensor, pool: KVPool):
        self._pool = pool
        self._kv_slots = kv_slots
        starts = inputs.query_starts.tolist()
        tables = inputs.page_table.tolist()
        self._slots: list[_Slot] = []
        for i, kv_len in enumerate(kv_lens.tolist()):
            if kv_len:
                pages = tables[i][: -(-kv_len // inputs.page_size)]
                consecutive = pages[-1] - pages[0] == len(pages) - 1 and pages == sorted(pages)
                self._slots.append(
                    _Slot(starts[i], starts[i + 1], kv_len, pages, pages[0] if consecutive else None)
                )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Write the pass's KV to its pages, then let each sequence attend to its own.

        `query` is ``[heads, T, head_dim]``, `key` and `value` ``[kv_heads, T, head_dim]``; returns
        ``[T, heads, head_dim]``, zero at pad positions. `window` is the most keys a query sees.
        """
        keys, values = self._pool.layer(layer)
        keys.view(-1, *keys.shape[2:]).index_copy_(0, self._kv_slots, key.transpose(0, 1))
        values.view(-1, *values.shape[2:]).index_copy_(0, self._kv_slots, value.transpose(0, 1))
        out = query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])
        for slot in self._slots:
            seq_query = query[:, slot.start : slot.end].unsqueeze(0)
            seq_key = _read(keys, slot).transpose(0, 1).unsqueeze(0)
            seq_value = _read(values, slot).transpose(0, 1).unsqueeze(0)
            mask = _causal_mask(slot, window, query.device)
            if softcap is None:
                attended = scaled_dot_product_attention(
                    seq_query, seq_key, seq_value, attn_mask=mask, scale=scaling, enable_gqa=True
                )
            else:
                attended = _softcapped_attention(seq_query, seq_key, seq_value, mask, scaling, softcap)
            out[slot.start : slot.end] = attended[0].transpose(0, 1)
        return out


def _read(pool_layer: torch.Tensor, slot: _Slot) -> torch.Tensor:
    """Return the slot's keys or values, ``[kv_len, kv_heads, head_dim]``, from ``[pages, page_size, ...]``."""
    if slot.first_page is not None:
        pages = pool_layer[slot.first_page : slot.first_page + len(slot.pages)]
    else:
        pages = pool_layer[slot.pages]
    return pages.reshape(-1, *pool_layer.shape[2:])[: slot.kv_len]


def _causal_mask(slot: _Slot, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return which keys each query sees, ``[queries, keys]``, or None where a lone query sees them all."""
    num_queries = slot.end - slot.start
    windowed = window is not None and slot.kv_len > window
    if num_queries == 1 and not windowed:
        return None
    query_pos = torch.arange(slot.kv_len - num_queries, slot.kv_len, device=device).unsqueeze(1)
    key_pos = torch.arange(slot.kv_len, device=device).unsqueeze(0)
    mask = key_pos <= query_pos
    if window is not None and windowed:
        mask &= key_pos > query_pos - window
    return mask


def _softcapped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """Attention whose scores are bent to ``softcap * tanh(score / softcap)``, which torch's own lacks."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, dim=1).transpose(-1, -2) * scaling
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights @ value.repeat_interleave(groups, dim=1)


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedPass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the form that transformers calls: query ``[1, heads, T, head_dim]``."""
    out = paged.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0],
        key[0],
        value[0],
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention_forward)
