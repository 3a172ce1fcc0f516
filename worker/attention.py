"""Paged attention behind transformers' models: the KV of each token goes to its page, queries read pages.

Registered in transformers under the name ``purefill``, so any model whose attention goes through
`ALL_ATTENTION_FUNCTIONS` uses it. What a pass needs travels as the keyword `paged` of the model's forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphs.layout import BatchInputs
from worker.decode_kernels import decode_attention, decode_plan
from worker.kernels import prefill_attention
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

    @property
    def is_whole(self) -> bool:
        """Whether the pass computes the sequence from its beginning: then its KV is the pass's own."""
        return self.kv_len == self.end - self.start


class PagedPass(Protocol):
    """What the attention layers of one forward pass share: where KV is written, and who attends to what."""

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


class CudaPass:
    """A pass on a CUDA device, as one kernel per layer. Nothing in it depends on a value, so it can be captured."""

    def __init__(self, inputs: BatchInputs, pool: KVPool) -> None:
        self._inputs = inputs
        self._pool = pool

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
        """Do as `PagedPass` says, except that pads write no KV at all."""
        keys_offset, values_offset = self._pool.offsets(layer)
        out: torch.Tensor = prefill_attention(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            self._pool.memory,
            self._inputs.query_starts,
            self._inputs.num_cached,
            self._inputs.page_table,
            keys_offset,
            values_offset,
            self._pool.page_size,
            scaling,
            window or 0,
            softcap or 0.0,
        )
        return out


class CudaStep:
    """A decode step on a CUDA device: one token for each sequence, attention by two kernels per layer."""

    def __init__(self, inputs: BatchInputs, pool: KVPool) -> None:
        self._inputs = inputs
        self._pool = pool
        self._plans: dict[int, torch.Tensor] = {}

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
        """Do as `PagedPass` says, except that pads write no KV at all."""
        inputs, most_keys = self._inputs, window or 0
        if most_keys not in self._plans:
            # Made once for all layers that see as much.
            self._plans[most_keys] = decode_plan(inputs.query_starts, inputs.num_cached, most_keys)
        keys_offset, values_offset = self._pool.offsets(layer)
        out: torch.Tensor = decode_attention(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            self._pool.memory,
            self._plans[most_keys],
            inputs.num_cached,
            inputs.page_table,
            keys_offset,
            values_offset,
            self._pool.page_size,
            scaling,
            most_keys,
            softcap or 0.0,
        )
        return out


class HostPass:
    """A pass on the CPU, sequence by sequence."""

    def __init__(self, inputs: BatchInputs, pool: KVPool) -> None:
        derived = inputs.derive()
        self._pool = pool
        self._kv_slots = derived.kv_slots
        starts = inputs.query_starts.tolist()
        tables = inputs.page_table.tolist()
        self._slots: list[_Slot] = []
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}
        for i, kv_len in enumerate(derived.kv_lens.tolist()):
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
        """Do as `PagedPass` says."""
        keys, values = self._pool.layer(layer)
        keys.view(-1, *keys.shape[2:]).index_copy_(0, self._kv_slots, key.transpose(0, 1))
        values.view(-1, *values.shape[2:]).index_copy_(0, self._kv_slots, value.transpose(0, 1))
        out = query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])
        if softcap is None and all(slot.is_whole for slot in self._slots):
            # torch's kernel is a tenth faster in float32, conversion included.
            query, key, value = query.float(), key.float(), value.float()
        for slot in self._slots:
            own = slice(slot.start, slot.end)
            seq_query = query[:, own].unsqueeze(0)
            if slot.is_whole:
                seq_key, seq_value = key[:, own].unsqueeze(0), value[:, own].unsqueeze(0)
            else:
                seq_key = _read(keys, slot).transpose(0, 1).unsqueeze(0)
                seq_value = _read(values, slot).transpose(0, 1).unsqueeze(0)
            if softcap is not None:
                mask = self._mask(slot, window)
                attended = _softcapped_attention(seq_query, seq_key, seq_value, mask, scaling, softcap)
            elif slot.is_whole and (window is None or slot.kv_len <= window):
                attended = scaled_dot_product_attention(
                    seq_query, seq_key, seq_value, is_causal=True, scale=scaling, enable_gqa=True
                )
            else:
                mask = self._mask(slot, window)
                attended = scaled_dot_product_attention(
                    seq_query, seq_key, seq_value, attn_mask=mask, scale=scaling, enable_gqa=True
                )
            out[own] = attended[0].transpose(0, 1)
        return out

    def _mask(self, slot: _Slot, window: int | None) -> torch.Tensor | None:
        """Return the slot's mask; it is made once for all layers."""
        key = (slot.start, window)
        if key not in self._masks:
            self._masks[key] = _causal_mask(slot, window)
        return self._masks[key]


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of a decode step of about the same length, padded to one."""

    rows: torch.Tensor | slice  # [G], their slots
    tokens: torch.Tensor  # [G * L], where the KV of each of their positions is; pads repeat the newest token
    ages: torch.Tensor  # [G, L], how many tokens each key is older than the newest; negative for pads


class HostStep:
    """A decode step on the CPU: one token for each sequence, those of about the same length in one computation.

    The query heads that share a KV head are the rows of one matrix product, so keys are never repeated.
    """

    def __init__(self, inputs: BatchInputs, pool: KVPool) -> None:
        derived = inputs.derive()
        self._pool = pool
        self._kv_slots = derived.kv_slots
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        lengths = derived.kv_lens[derived.kv_lens > 0].long()
        self._groups = [
            _make_group(rows, lengths[rows], inputs.page_table, inputs.page_size)
            for rows in _by_length(lengths.tolist())
        ]

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
        """Do as `PagedPass` says."""
        num_heads, num_slots, head_dim = query.shape
        num_kv_heads = key.shape[0]
        keys, values = (part.view(-1, num_kv_heads, head_dim) for part in self._pool.layer(layer))
        keys.index_copy_(0, self._kv_slots, key.transpose(0, 1))
        values.index_copy_(0, self._kv_slots, value.transpose(0, 1))
        queries = query.transpose(0, 1).reshape(num_slots, num_kv_heads, -1, head_dim)
        out = query.new_zeros(num_slots, num_heads, head_dim)
        for number, group in enumerate(self._groups):
            shape = (*group.ages.shape, num_kv_heads, head_dim)
            own_keys = keys.index_select(0, group.tokens).view(shape).transpose(1, 2)
            own_values = values.index_select(0, group.tokens).view(shape).transpose(1, 2)
            own_queries, mask = queries[group.rows], self._mask(number, window)
            if softcap is not None:
                attended = _softcapped_attention(own_queries, own_keys, own_values, mask, scaling, softcap)
            else:
                attended = scaled_dot_product_attention(
                    own_queries, own_keys, own_values, attn_mask=mask, scale=scaling
                )
            out[group.rows] = attended.reshape(-1, num_heads, head_dim)
        return out

    def _mask(self, number: int, window: int | None) -> torch.Tensor:
        """Return which keys each sequence of a group sees, ``[G, 1, 1, L]``; it is made once for all layers."""
        if (number, window) not in self._masks:
            ages = self._groups[number].ages
            seen = (ages >= 0) if window is None else (ages >= 0) & (ages < window)
            self._masks[number, window] = seen[:, None, None, :]
        return self._masks[number, window]


def _by_length(lengths: list[int]) -> list[torch.Tensor]:
    """Return sequences, by place, in groups of which none is more than twice as long as another."""
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or lengths[place] > 2 * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(place)
    return [torch.tensor(sorted(group)) for group in groups]


def _make_group(
    rows: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> _Group:
    newest = (lengths - 1).unsqueeze(1)
    ages = newest - torch.arange(int(lengths.max()))
    # What lies in a page behind its tokens must not be read: not even a mask stops a NaN.
    positions = newest - ages.clamp(min=0)
    pages = page_table[rows].long().gather(1, positions // page_size)
    is_all = len(rows) == int(rows[-1]) + 1
    return _Group(
        slice(0, len(rows)) if is_all else rows, (pages * page_size + positions % page_size).flatten(), ages
    )


def _read(pool_layer: torch.Tensor, slot: _Slot) -> torch.Tensor:
    """Return the slot's keys or values, ``[kv_len, kv_heads, head_dim]``, from ``[pages, page_size, ...]``."""
    if slot.first_page is not None:
        pages = pool_layer[slot.first_page : slot.first_page + len(slot.pages)]
    else:
        pages = pool_layer[slot.pages]
    return pages.reshape(-1, *pool_layer.shape[2:])[: slot.kv_len]


def _causal_mask(slot: _Slot, window: int | None) -> torch.Tensor | None:
    """Return which keys each query sees, ``[queries, keys]``, or None where a lone query sees them all."""
    num_queries = slot.end - slot.start
    windowed = window is not None and slot.kv_len > window
    if num_queries == 1 and not windowed:
        return None
    query_pos = torch.arange(slot.kv_len - num_queries, slot.kv_len).unsqueeze(1)
    key_pos = torch.arange(slot.kv_len).unsqueeze(0)
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
