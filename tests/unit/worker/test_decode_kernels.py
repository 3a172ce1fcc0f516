"""The decode kernels against float64: on a GPU, or with TRITON_INTERPRET=1 wherever Triton is installed."""

from __future__ import annotations

import math
import os

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or Triton and TRITON_INTERPRET=1", allow_module_level=True)

from tests.unit.worker.test_kernels import DEVICE, SHAPES, Shape, expected
from worker.decode_kernels import decode_attention, decode_plan

NUM_PAGES = 160
BATCHES = [
    # tokens of each sequence whose KV is cached; -1 is a slot without a token
    [5],
    [0, 63, 64, 65, 1],
    [300, 7, 128, 1, 1, 1, 1, 1],
    [17, 200, -1, -1],
    [-1, -1],
]


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize(
    "shape", [*SHAPES, Shape(heads=8, kv_heads=1, head_dim=64, page_size=64, window=70)], ids=str
)
def test_a_new_token_attends_to_its_sequence_and_is_written_to_its_page(
    shape: Shape, batch: list[int]
) -> None:
    torch.manual_seed(0)
    num_slots, row = len(batch), (shape.kv_heads, shape.head_dim)
    # Slices of one projection, as a merged model has them; NaN in slots without a token.
    both = torch.randn(num_slots, 2, *row, device=DEVICE)
    query = torch.randn(num_slots, shape.heads, shape.head_dim, device=DEVICE)
    for i, cached in enumerate(batch):
        if cached < 0:
            both[i] = query[i] = math.nan
    key, value = both[:, 0], both[:, 1]
    pool = torch.full((2 * NUM_PAGES * shape.page_size * math.prod(row),), math.nan, device=DEVICE)
    values_offset = pool.numel() // 2
    pages_shape = (NUM_PAGES * shape.page_size, *row)
    pool_keys, pool_values = pool[:values_offset].view(pages_shape), pool[values_offset:].view(pages_shape)

    free = (torch.randperm(NUM_PAGES - 1) + 1).tolist()
    table = torch.zeros(num_slots, 24, dtype=torch.int32)
    full: list[tuple[torch.Tensor, torch.Tensor]] = []
    places: list[torch.Tensor] = []
    for i, cached in enumerate(batch):
        num_pages = -(-(cached + 1) // shape.page_size)
        table[i, :num_pages] = torch.tensor([free.pop() for _ in range(num_pages)], dtype=torch.int32)
        positions = torch.arange(cached + 1)
        pages = table[i, positions // shape.page_size].long()
        places.append((pages * shape.page_size + positions % shape.page_size).to(DEVICE))
        old_keys, old_values = torch.randn(2, max(cached, 0), *row, device=DEVICE)
        if cached > 0:
            pool_keys[places[i][:cached]] = old_keys
            pool_values[places[i][:cached]] = old_values
        own = slice(i, i + 1)
        full.append((torch.cat([old_keys, key[own]]), torch.cat([old_values, value[own]])))

    active = [cached >= 0 for cached in batch]
    starts = torch.tensor([0, *active]).cumsum(0).to(torch.int32).to(DEVICE)
    num_cached = torch.tensor(batch, dtype=torch.int32).clamp(min=0).to(DEVICE)
    plan = decode_plan(starts, num_cached, shape.window)
    out = decode_attention(
        query,
        key,
        value,
        pool,
        plan,
        num_cached,
        table.to(DEVICE),
        0,
        values_offset,
        shape.page_size,
        shape.head_dim**-0.5,
        shape.window,
        shape.softcap,
    )
    for i, cached in enumerate(batch):
        own = slice(i, i + 1)
        if cached < 0:
            assert not out[own].any()
            continue
        torch.testing.assert_close(
            out[own].double(), expected(query[own], *full[i], cached, shape), atol=1e-5, rtol=1e-5
        )
        assert torch.equal(pool_keys[places[i]], full[i][0])
        assert torch.equal(pool_values[places[i]], full[i][1])
    num_written = sum(cached + 1 for cached in batch if cached >= 0)
    assert (~pool_keys.isnan()).all(dim=(1, 2)).sum() == num_written
    assert (~pool_values.isnan()).all(dim=(1, 2)).sum() == num_written
