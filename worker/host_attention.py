"""Paged attention on the CPU: sequences of about the same length are one batch of matrix products.

The query heads that share a KV head are the rows of one product, so that keys are never repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from graphs.layout import BatchInputs, DerivedInputs
from worker.kv_pool import KVPool

_BLOCK_QUERIES = 64
"""Positions whose queries are one product: those of a later block see more keys, and no other time is wasted."""
_STEP_LENGTH = 16
"""Lengths are padded to multiples of it. Then no sum depends on what else is in a batch: the elements of a row are
added in the same order, whether pads follow or not. For other lengths that was not so."""
_WIDE_ROWS = 64
"""Of prompts, rows of up to so many scores get a float32 softmax: torch's for bfloat16 is slow where rows are short."""


def flush_denormals() -> None:
    """Let numbers below 1e-38 be zero, in what this thread computes.

    The probabilities of what nobody attends to are such numbers, and each takes the processor some hundred cycles: the
    softmax of SmolLM2-135M took three times as long.
    """
    torch.set_flush_denormal(True)


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Sequences of a prefill pass that attend together, padded to one length."""

    shape: tuple[int, int]
    """G sequences, L positions."""
    rows: torch.Tensor | slice  # [G * L], their places in the pass; pads repeat a sequence's last
    own: torch.Tensor | None  # the places in [G * L] that are no pads; None: all
    own_rows: torch.Tensor | None  # the places of those in the pass
    cached: torch.Tensor | None
    """``[N]``, where in the pool the KV of all its tokens is, if the pass begins in the middle of the one sequence."""
    is_whole_pass: bool = False
    """Whether `rows` are all rows of the pass, in order."""


class _Room:
    """Memory for one attention of a group of whole prompts, which all layers alike use one after the other.

    Each tensor is there head by head, as products want it, and once more position by position, as layers have it.
    """

    def __init__(self, group: _Prompts, heads: tuple[int, int, int], out: torch.Tensor) -> None:
        """`heads` are the numbers of query and KV heads, and the size of a head; `out`, ``[T, heads, head_dim]``, is
        that of the pass."""
        num_sequences, length = group.shape
        num_heads, num_kv_heads, head_dim = heads
        self.kv_shape = (num_sequences, length, num_kv_heads, head_dim)
        self.shape = (num_sequences, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
        batch = num_sequences * num_kv_heads
        self.queries, self.attended = (
            out.new_empty(batch, self.shape[3] * length, head_dim) for _ in range(2)
        )
        keys, self.values = (out.new_empty(batch, length, head_dim) for _ in range(2))
        self.keys = keys.transpose(1, 2)  # [G * kv_heads, head_dim, L]
        by_head = (num_sequences, num_kv_heads, length)
        (
            self.queries_by_position,
            self.attended_by_position,
            self.keys_by_position,
            self.values_by_position,
        ) = (
            part.view(*by_head, *part_shape).transpose(1, 2)
            for part, part_shape in (
                (self.queries, self.shape[3:]),
                (self.attended, self.shape[3:]),
                (keys, self.shape[4:]),
                (self.values, self.shape[4:]),
            )
        )
        self.out = out[group.rows].view(self.shape) if group.own is None else out.new_empty(self.shape)


class HostPass:
    """A prefill pass on the CPU."""

    def __init__(self, inputs: BatchInputs, derived: DerivedInputs, pool: KVPool) -> None:
        self._pool = pool
        self._kv_slots = derived.kv_slots
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}
        self._outs: dict[torch.Size, torch.Tensor] = {}
        self._rooms: dict[tuple[int, tuple[int, int, int]], _Room] = {}
        starts, kv_lens = inputs.query_starts.tolist(), derived.kv_lens.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        alike: dict[int, list[int]] = {}
        for i, length in enumerate(lengths):
            if kv_lens[i] == length > 0:
                alike.setdefault(_padded(length), []).append(i)
        self._groups = [
            _whole_prompts(
                padded, [starts[i] for i in group], [lengths[i] for i in group], len(inputs.token_ids)
            )
            for padded, group in alike.items()
        ]
        for i, length in enumerate(lengths):
            if kv_lens[i] > length > 0:
                positions = torch.arange(kv_lens[i]).unsqueeze(0)
                cached = _places(inputs.page_table[i : i + 1], positions, inputs.page_size)[0]
                rows = slice(starts[i], starts[i] + length)
                self._groups.append(_Prompts((1, length), rows, None, None, cached))

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
        """Do as `PagedPass` says. What is returned is the next layer's again."""
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        keys, values = _write(self._pool, layer, self._kv_slots, key, value)
        out = self._outs.get(query.shape)
        if out is None:
            out = self._outs[query.shape] = query.new_zeros(query.shape)
        for number, group in enumerate(self._groups):
            own_query, own_key, own_value = query, key, value
            if not group.is_whole_pass:
                own_query, own_key, own_value = query[group.rows], key[group.rows], value[group.rows]
            if group.cached is not None:
                own_key, own_value = (part.index_select(0, group.cached) for part in (keys, values))
            num_sequences, length = group.shape
            if group.cached is None and length <= _BLOCK_QUERIES:
                attended = self._attend_short(
                    number, own_query, own_key, own_value, out, scaling, window, softcap
                )
            else:
                attended = out[group.rows] if group.own is None else torch.empty_like(own_query)
                self._attend_group(
                    own_query.view(num_sequences, length, *query.shape[1:]),
                    _by_head(own_key, num_sequences),
                    _by_head(own_value, num_sequences),
                    attended.view(num_sequences, length, *query.shape[1:]),
                    scaling=scaling,
                    window=window,
                    softcap=softcap,
                )
            if group.own is not None and group.own_rows is not None:
                out.index_copy_(0, group.own_rows, attended.index_select(0, group.own))
        return out

    def _attend_short(
        self,
        number: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Let all queries of a group, ``[G * L, heads, head_dim]``, see all its keys in one product; return as much.

        A layer has some ten such operators, and at 16 tokens each of them takes as long as calling it. `out` is that
        of the pass, where the group's part is left if it has no pads.
        """
        heads = (query.shape[1], key.shape[1], key.shape[2])
        room = self._rooms.get((number, heads))
        if room is None:
            room = self._rooms[number, heads] = _Room(self._groups[number], heads, out)
        room.queries_by_position.copy_(query.view(room.shape))
        room.keys_by_position.copy_(key.view(room.kv_shape))
        room.values_by_position.copy_(value.view(room.kv_shape))
        mask = self._mask(0, room.shape[1], 0, window, room.shape[3], query.dtype)
        weights = _weights(room.queries, room.keys, mask, scaling, softcap)
        torch.bmm(weights, room.values, out=room.attended)
        return room.out.copy_(room.attended_by_position).view(-1, *out.shape[1:])

    def _attend_group(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Let the last L of N positions attend: `query` and `out` are ``[G, L, heads, head_dim]``, `keys` and `values`
        ``[G * kv_heads, N, head_dim]``."""
        num_sequences, length, _, head_dim = query.shape
        num_kv_heads = keys.shape[0] // num_sequences
        num_before = keys.shape[1] - length
        shape = (num_sequences, length, num_kv_heads, -1, head_dim)
        query, out = query.view(shape), out.view(shape)
        for start in range(0, length, _BLOCK_QUERIES):
            end = min(start + _BLOCK_QUERIES, length)
            first_key = 0 if window is None else max(num_before + start - window + 1, 0)
            seen = slice(first_key, num_before + end)
            mask = self._mask(num_before + start, end - start, first_key, window, query.shape[3], query.dtype)
            block = query[:, start:end].transpose(1, 2)
            queries = block.reshape(len(keys), -1, head_dim)
            weights = _weights(queries, keys[:, seen].transpose(1, 2), mask, scaling, softcap)
            out[:, start:end] = torch.bmm(weights, values[:, seen]).view(block.shape).transpose(1, 2)

    def _mask(
        self,
        start: int,
        num_queries: int,
        first_key: int,
        window: int | None,
        heads_per_key: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return zero where a query from position `start` on sees a key from `first_key` on, else minus infinity,
        ``[num_queries * heads_per_key, keys]``, of the type in which the scores are to be. It is made once for all
        layers."""
        name = (start, num_queries, first_key, window or 0, heads_per_key)
        if name not in self._masks:
            queries = torch.arange(start, start + num_queries).repeat_interleave(heads_per_key).unsqueeze(1)
            keys = torch.arange(first_key, start + num_queries)
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            self._masks[name] = _as_mask(seen, torch.float32 if seen.shape[1] <= _WIDE_ROWS else dtype)
        return self._masks[name]


def _padded(length: int) -> int:
    return -(-length // _STEP_LENGTH) * _STEP_LENGTH


def _whole_prompts(padded: int, starts: Sequence[int], lengths: Sequence[int], num_tokens: int) -> _Prompts:
    """Return the group of sequences whose tokens in the pass of `num_tokens` are ``start : start + length``, all of
    them."""
    count = len(starts)
    if min(lengths) == padded and starts[-1] - starts[0] == (count - 1) * padded:
        whole = slice(starts[0], starts[0] + count * padded)
        return _Prompts((count, padded), whole, None, None, None, is_whole_pass=count * padded == num_tokens)
    last = torch.tensor(lengths).unsqueeze(1) - 1
    positions = torch.arange(padded).expand(count, padded)
    rows = (torch.tensor(starts).unsqueeze(1) + torch.minimum(positions, last)).flatten()
    own = (positions <= last).flatten().nonzero()[:, 0]
    return _Prompts((count, padded), rows, own, rows[own], None)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Sequences of a decode step of about the same length, padded to one."""

    rows: torch.Tensor | slice  # [G], their slots
    tokens: torch.Tensor  # [G, L], where the KV of each of their positions is; pads repeat the newest token
    ages: torch.Tensor  # [G, L], how many tokens each key is older than the newest; negative for pads


class HostStep:
    """A decode step on the CPU: one token for each sequence."""

    def __init__(self, inputs: BatchInputs, derived: DerivedInputs, pool: KVPool) -> None:
        self._pool = pool
        self._kv_slots = derived.kv_slots
        self._masks: dict[tuple[int, int, int | None], torch.Tensor] = {}
        self._rows_of_heads: dict[tuple[int, int], torch.Tensor] = {}
        lengths = derived.kv_lens[derived.kv_lens > 0].long()
        self._groups = [
            _make_steps(torch.tensor(sorted(places)), lengths, inputs.page_table, inputs.page_size)
            for places in _by_length(lengths.tolist())
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
        keys, values = (
            part.view(-1, head_dim)
            for part in _write(self._pool, layer, self._kv_slots, key.transpose(0, 1), value.transpose(0, 1))
        )
        queries = query.transpose(0, 1).reshape(num_slots, num_kv_heads, -1, head_dim)
        out = query.new_zeros(num_slots, num_heads, head_dim)
        for number, group in enumerate(self._groups):
            own = self._heads(number, num_kv_heads)
            shape = (-1, group.tokens.shape[1], head_dim)
            weights = _weights(
                queries[group.rows].flatten(0, 1),
                keys.index_select(0, own).view(shape).transpose(1, 2),
                self._mask(number, num_kv_heads, window, query.dtype),
                scaling,
                softcap,
            )
            attended = torch.bmm(weights, values.index_select(0, own).view(shape))
            attended = attended.view(-1, num_heads, head_dim)
            if len(attended) == num_slots:
                return attended
            out[group.rows] = attended
        return out

    def _heads(self, number: int, num_kv_heads: int) -> torch.Tensor:
        """Return where the heads of a group's KV are in the pool, ``[G * kv_heads * L]``, in rows of one head."""
        if (number, num_kv_heads) not in self._rows_of_heads:
            first = self._groups[number].tokens.unsqueeze(1) * num_kv_heads
            rows = first + torch.arange(num_kv_heads).unsqueeze(1)
            self._rows_of_heads[number, num_kv_heads] = rows.flatten()
        return self._rows_of_heads[number, num_kv_heads]

    def _mask(self, number: int, num_kv_heads: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return zero for the keys that each sequence of a group sees, else minus infinity, ``[G * kv_heads, 1, L]``.

        It is made once for all layers.
        """
        name = (number, num_kv_heads, window)
        if name not in self._masks:
            ages = self._groups[number].ages
            seen = (ages >= 0) if window is None else (ages >= 0) & (ages < window)
            self._masks[name] = _as_mask(seen, dtype).repeat_interleave(num_kv_heads, 0).unsqueeze(1)
        return self._masks[name]


def _make_steps(
    rows: torch.Tensor, all_lengths: torch.Tensor, page_table: torch.Tensor, page_size: int
) -> _Steps:
    lengths = all_lengths[rows]
    newest = (lengths - 1).unsqueeze(1)
    ages = newest - torch.arange(_padded(int(lengths.max())))
    # What lies in a page behind its tokens must not be read: not even a mask stops a NaN.
    positions = newest - ages.clamp(min=0)
    is_all = len(rows) == int(rows[-1]) + 1
    return _Steps(
        slice(0, len(rows)) if is_all else rows, _places(page_table[rows], positions, page_size), ages
    )


def _places(page_table: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return where in the pool the KV of positions ``[G, N]`` is, by the pages ``[G, P]`` of their sequences."""
    return page_table.long().gather(1, positions // page_size) * page_size + positions % page_size


def _by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return sequences, by place, in groups of which none is more than twice as long as another."""
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or lengths[place] > 2 * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(place)
    return groups


def _write(
    pool: KVPool, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the KV of a pass, ``[T, kv_heads, head_dim]``; return that of the whole pool, in the same form."""
    keys, values = pool.rows(layer)
    keys.index_copy_(0, slots, key)
    values.index_copy_(0, slots, value)
    return keys, values


def _by_head(part: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """Return ``[G * N, kv_heads, head_dim]`` as ``[G * kv_heads, N, head_dim]``, dense."""
    by_sequence = part.view(num_sequences, -1, *part.shape[1:])
    return by_sequence.transpose(1, 2).flatten(0, 1)


def _as_mask(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))


def _weights(
    queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, scaling: float, softcap: float | None
) -> torch.Tensor:
    """Return how much queries ``[B, M, head_dim]`` attend to keys ``[B, head_dim, N]``, ``[B, M, N]`` of their type.

    `mask` is added to the scores, which get its type, and with a softcap are bent to
    ``softcap * tanh(score / softcap)`` first. Softmax is computed in float32 in any case.
    """
    if softcap is not None:
        scores = torch.bmm(queries, keys).mul_(scaling / softcap).tanh_()
        scores = torch.add(mask, scores, alpha=softcap)
    elif mask.dtype is queries.dtype:
        scores = torch.baddbmm(mask, queries, keys, alpha=scaling)
    else:
        scores = torch.add(mask, torch.bmm(queries, keys), alpha=scaling)
    return scores.softmax(dim=-1).to(queries.dtype)
