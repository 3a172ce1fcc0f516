"""The kernels against float64: on a GPU, or with TRITON_INTERPRET=1 wherever Triton is installed."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or Triton and TRITON_INTERPRET=1", allow_module_level=True)

from worker.kernels import prefill_attention, rotate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_PAGES = 120


@dataclass(frozen=True, kw_only=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    window: int = 0
    softcap: float = 0.0


SHAPES = [
    Shape(heads=8, kv_heads=2, head_dim=64, page_size=16),
    Shape(heads=4, kv_heads=4, head_dim=32, page_size=256),
    Shape(heads=6, kv_heads=2, head_dim=48, page_size=32, window=20),
    Shape(heads=7, kv_heads=1, head_dim=128, page_size=64, softcap=3.0),
    Shape(heads=4, kv_heads=2, head_dim=256, page_size=16, window=9, softcap=1.0),
]
BATCHES = [
    # (tokens of each sequence, cached tokens of each, pads); a slot of 0 tokens is unused
    ([17, 5, 130, 0], [0, 0, 0, 0], 0),
    ([1, 70, 1, 0], [100, 33, 0, 0], 7),
    ([0, 64, 0, 16], [0, 64, 0, 3], 40),
    ([40, 3, 0, 0], [200, 128, 0, 0], 5),
]


def expected(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cached: int, shape: Shape
) -> torch.Tensor:
    """Causal attention of the last tokens of one sequence in float64."""
    group = shape.heads // shape.kv_heads
    keys = keys.double().repeat_interleave(group, dim=1)
    values = values.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * shape.head_dim**-0.5
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    query_pos = cached + torch.arange(query.shape[0], device=query.device).unsqueeze(1)
    key_pos = torch.arange(keys.shape[0], device=query.device)
    seen = key_pos <= query_pos
    if shape.window:
        seen &= key_pos > query_pos - shape.window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(dim=-1), values)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_sequence_attends_to_its_own_pages_and_writes_only_its_own(
    shape: Shape, batch: tuple[list[int], list[int], int]
) -> None:
    torch.manual_seed(0)
    lengths, cached, pads = batch
    num_tokens = sum(lengths) + pads
    row = (shape.kv_heads, shape.head_dim)
    query = torch.randn(num_tokens, shape.heads, shape.head_dim, device=DEVICE)
    # Slices of one projection, as a merged model has them; NaN where the pads are.
    both = torch.randn(num_tokens, 2, *row, device=DEVICE)
    both[sum(lengths) :] = math.nan
    query[sum(lengths) :] = math.nan
    key, value = both[:, 0], both[:, 1]
    pool = torch.full((2 * NUM_PAGES * shape.page_size * math.prod(row),), math.nan, device=DEVICE)
    values_offset = pool.numel() // 2
    pages_shape = (NUM_PAGES * shape.page_size, *row)
    pool_keys, pool_values = pool[:values_offset].view(pages_shape), pool[values_offset:].view(pages_shape)

    free = (torch.randperm(NUM_PAGES - 1) + 1).tolist()
    table = torch.zeros(len(lengths), 20, dtype=torch.int32)
    places: list[torch.Tensor] = []  # of each sequence's tokens in the pool
    full: list[tuple[torch.Tensor, torch.Tensor]] = []
    starts = [0]
    for i, (length, num_cached) in enumerate(zip(lengths, cached, strict=True)):
        num_pages = -(-(length + num_cached) // shape.page_size)
        table[i, :num_pages] = torch.tensor([free.pop() for _ in range(num_pages)], dtype=torch.int32)
        positions = torch.arange(length + num_cached)
        pages = table[i, positions // shape.page_size].long()
        places.append((pages * shape.page_size + positions % shape.page_size).to(DEVICE))
        old_keys, old_values = torch.randn(2, num_cached, *row, device=DEVICE)
        pool_keys[places[i][:num_cached]] = old_keys
        pool_values[places[i][:num_cached]] = old_values
        own = slice(starts[-1], starts[-1] + length)
        full.append((torch.cat([old_keys, key[own]]), torch.cat([old_values, value[own]])))
        starts.append(own.stop)

    out = prefill_attention(
        query,
        key,
        value,
        pool,
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        torch.tensor(cached, dtype=torch.int32, device=DEVICE),
        table.to(DEVICE),
        0,
        values_offset,
        shape.page_size,
        shape.head_dim**-0.5,
        shape.window,
        shape.softcap,
    )
    for i, length in enumerate(lengths):
        if length:
            own = slice(starts[i], starts[i + 1])
            torch.testing.assert_close(
                out[own].double(), expected(query[own], *full[i], cached[i], shape), atol=1e-5, rtol=1e-5
            )
            assert torch.equal(pool_keys[places[i]], full[i][0])
            assert torch.equal(pool_values[places[i]], full[i][1])
    assert not out[sum(lengths) :].any()
    num_written = sum(len(tokens) for tokens in places)
    assert (~pool_keys.isnan()).all(dim=(1, 2)).sum() == num_written
    assert (~pool_values.isnan()).all(dim=(1, 2)).sum() == num_written


@pytest.mark.parametrize(
    "weight_offset", [None, 0.0, 1.0], ids=["no norm", "norm", "norm by one plus weight"]
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (7, 1, 96), (3, 3, 16)])
def test_heads_are_normed_and_rotated(
    heads: int, kv_heads: int, head_dim: int, weight_offset: float | None
) -> None:
    torch.manual_seed(0)
    num_tokens, half, eps = 5, head_dim // 2, 1e-5
    # Neighbours in one projection, as a merged model has them.
    both = torch.randn(num_tokens, heads + kv_heads, head_dim, device=DEVICE)
    cos, sin = torch.randn(2, num_tokens, head_dim, device=DEVICE)
    weights = torch.randn(2, head_dim, device=DEVICE)

    def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.double()
        if weight_offset is not None:
            x = x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (weight.double() + weight_offset)
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * cos.double().unsqueeze(1) + turned * sin.double().unsqueeze(1)

    query, key = both[:, :heads], both[:, heads:]
    norm = (None, None) if weight_offset is None else (weights[0], weights[1])
    out_query, out_key = rotate(query, key, *norm, cos, sin, eps, weight_offset or 0.0)
    for out, x, weight in ((out_query, query, weights[0]), (out_key, key, weights[1])):
        torch.testing.assert_close(out.double(), expected(x, weight), atol=1e-5, rtol=1e-5)
