"""Merging of linear layers that read the same input, so that one matrix product does the work of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names under which transformers' families keep layers that read the same input."""


def merge_projections(model: nn.Module) -> int:
    """Merge the query, key and value, and the gate and up projections of every module that has them as plain
    linear layers. The module's own code is untouched: it finds parts in their places.

    Returns how many modules' layers were merged. Each merge frees the old weights before the next.
    """
    count = 0
    for module in list(model.modules()):
        for names in _SIBLINGS:
            layers = _mergeable(module, names)
            if layers:
                merged = MergedLinear(layers)
                for index, name in enumerate(names):
                    setattr(module, name, MergedPart(merged, index))
                count += 1
    return count


def _mergeable(module: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """Return the module's layers of these names if they can be merged, else nothing."""
    # Exactly `nn.Linear`: a subclass may compute something else.
    layers = [layer for name in names if type(layer := getattr(module, name, None)) is nn.Linear]
    kinds = {(layer.in_features, layer.bias is None, layer.weight.dtype) for layer in layers}
    return layers if len(layers) == len(names) and len(kinds) == 1 else []


class MergedLinear(nn.Module):
    """Several linear layers as one. The first part that is asked for an input computes it for all."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self._sizes = [layer.out_features for layer in layers]
        has_bias = layers[0].bias is not None
        self.whole = nn.Linear(layers[0].in_features, sum(self._sizes), bias=has_bias, device="meta")
        weights = torch.cat([layer.weight.data for layer in layers])
        self.whole.weight = nn.Parameter(weights, requires_grad=False)
        if has_bias:
            biases = torch.cat([layer.bias.data for layer in layers])
            self.whole.bias = nn.Parameter(biases, requires_grad=False)
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    def part(self, inputs: torch.Tensor, index: int) -> torch.Tensor:
        """Return what layer `index` makes of `inputs`, ``[..., in]``: a view, ``[..., out of the layer]``."""
        if self._input is not inputs:
            self._input = inputs
            self._outputs = list(self.whole(inputs).split(self._sizes, dim=-1))
        output = self._outputs[index]
        assert output is not None, "a part was asked twice for one input"
        self._outputs[index] = None
        if all(other is None for other in self._outputs):
            # Everything is handed out: keep no tensor alive.
            self._input, self._outputs = None, []
        return output


class MergedPart(nn.Module):
    """One of the layers of a `MergedLinear`, in the place where the model expects it."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self.merged = merged
        self._index = index

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this layer's output."""
        return self.merged.part(inputs, self._index)
