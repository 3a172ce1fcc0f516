"""Paged attention behind transformers' models: the KV of each token goes to its page, queries read pages.

Registered in transformers under the name ``purefill``, so any model whose attention goes through
`ALL_ATTENTION_FUNCTIONS` uses it. What a pass needs travels as the keyword `paged` of the model's forward.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphs.layout import BatchInputs
from scheduler.errors import ConfigError
from worker.decode_kernels import decode_attention, decode_plan
from worker.kernels import prefill_attention
from worker.kv_pool import KVPool

ATTENTION_NAME = "purefill"


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


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedPass | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the form that transformers calls: query ``[1, heads, T, head_dim]``."""
    if paged is None:
        raise ConfigError(
            f"{type(module).__name__} does not hand on what its model is called with: it has no KV to page"
        )
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
