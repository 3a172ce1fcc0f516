"""Linear layers whose weights lie in the order in which the CPU's matrix product reads them."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import nn

_NUM_ROWS = 128
"""Rows for which oneDNN chooses the order. Products of 1 to 512 rows are fast in the order that it takes for 128."""


def pack_linears(model: nn.Module) -> int:
    """Replace the plain linear layers of a model on the CPU by packed ones; return how many were.

    Two cores with avx512_bf16, all products of SmolLM2-135M for 8 tokens: 24 ms instead of 42 in bfloat16, 48
    instead of 126 in float32; for 128 tokens 151 instead of 317, and 288 instead of 489.
    """
    count = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if _is_packable(layer):
                setattr(parent, name, PackedLinear(layer))
                count += 1
    return count


def _is_packable(layer: nn.Module) -> TypeGuard[nn.Linear]:
    # Exactly `nn.Linear`: a subclass may compute something else.
    if type(layer) is not nn.Linear or not torch.backends.mkldnn.is_available():
        return False
    if layer.weight.dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-any-return]
    return layer.weight.dtype is torch.float32


class PackedLinear(nn.Module):
    """A linear layer in oneDNN's own order. Where the weight is nobody else's, its old order is freed."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _NUM_ROWS)
        self.register_buffer("packed", packed, persistent=False)
        self.bias = layer.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out]`` for ``[..., in]``."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, self.packed, self.bias, "none", [], ""
        )
        return output
