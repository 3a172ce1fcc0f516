from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from worker.merge import merge_projections


class Attention(nn.Module):
    """Calls its projections in a given order, as families differ in it."""

    def __init__(self, *, bias: bool, order: Sequence[str] = ("q_proj", "k_proj", "v_proj")) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 16, bias=bias)
        self.k_proj = nn.Linear(8, 4, bias=bias)
        self.v_proj = nn.Linear(8, 4, bias=bias)
        self._order = order

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name)(inputs) for name in self._order}


class Mlp(nn.Module):
    def __init__(self, up: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(8, 12, bias=False)
        self.up_proj = up or nn.Linear(8, 12, bias=False)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": torch.relu(self.gate_proj(inputs)) * self.up_proj(inputs)}


@pytest.mark.parametrize(
    "module",
    [
        Attention(bias=False),
        Attention(bias=True),
        Attention(bias=True, order=("v_proj", "k_proj", "q_proj")),
        Mlp(),
    ],
    ids=["plain", "bias", "other order", "mlp"],
)
def test_a_merged_module_computes_the_same(module: nn.Module) -> None:
    model = nn.Sequential(module)
    merged = copy.deepcopy(model)
    assert merge_projections(merged) == 1
    with torch.no_grad():
        for _ in range(2):  # each time with a new input
            inputs = torch.randn(1, 5, 8)
            for name, expected in model[0](inputs).items():
                torch.testing.assert_close(merged[0](inputs)[name], expected)
    assert sum(p.numel() for p in merged.parameters()) == sum(p.numel() for p in model.parameters())


class Scaled(nn.Linear):
    """A layer that is a linear layer by name only."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(inputs)


@pytest.mark.parametrize("up", [Scaled(8, 12, bias=False), nn.Linear(8, 12, bias=True), nn.Identity()])
def test_layers_that_are_not_alike_are_left_alone(up: nn.Module) -> None:
    module = Mlp(up)
    assert merge_projections(module) == 0
    assert module.up_proj is up
