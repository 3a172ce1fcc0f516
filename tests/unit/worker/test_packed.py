"""Packed linear layers against torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from worker.packed import PackedLinear, pack_linears


class _Block(nn.Module):
    def __init__(self, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(96, 160, bias=bias, dtype=dtype)
        self.down = nn.Linear(160, 96, bias=bias, dtype=dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(torch.relu(self.up(inputs)))
        return output


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_packed_layers_compute_what_plain_ones_do(dtype: torch.dtype, bias: bool) -> None:
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 products, and such layers stay as they are")
    torch.manual_seed(0)
    plain = _Block(bias, dtype)
    packed = copy.deepcopy(plain)
    assert pack_linears(packed) == 2
    for num_rows in (1, 8, 200):
        inputs = torch.randn(1, num_rows, 96, dtype=dtype)
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(packed(inputs), plain(inputs), rtol=tolerance, atol=tolerance)


@torch.inference_mode()
def test_a_weight_that_is_also_the_embedding_stays_usable_as_such() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)})
    model["head"].weight = model["embedding"].weight
    ids = torch.tensor([3, 9])
    rows = model["embedding"](ids)
    expected = model["head"](rows)
    pack_linears(model)
    assert isinstance(model["head"], PackedLinear)
    assert torch.equal(model["embedding"](ids), rows)
    torch.testing.assert_close(model["head"](rows), expected)


def test_what_cannot_be_packed_stays() -> None:
    class Scaled(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) * 2

    model = nn.Sequential(Scaled(8, 8), nn.Linear(8, 8, dtype=torch.float64))
    assert pack_linears(model) == 0
