"""Linear layers that are cut over the ranks of a group and need the others' results."""

from __future__ import annotations

import torch
from torch import nn

from worker.parallel.ops import all_reduce, gather


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank holds the columns for its own inputs; the outputs are summed."""

    def __init__(self, linear: nn.Linear, size: int) -> None:
        """Make the layer of one of `size` ranks, with weights still to be filled in."""
        super().__init__()
        self.linear = nn.Linear(
            linear.in_features // size,
            linear.out_features,
            bias=False,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        self.bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the whole layer's output, ``[..., out]``, of this rank's inputs, ``[..., in / size]``."""
        output: torch.Tensor = self.linear(inputs)
        all_reduce(output)
        return output if self.bias is None else output + self.bias


class GatheredLinear(nn.Module):
    """A linear layer of which each rank holds the rows of some outputs; all ranks get all outputs.

    The rows are as many on each rank; behind the last output they are zero.
    """

    def __init__(self, linear: nn.Linear, size: int) -> None:
        """Make the layer of one of `size` ranks, with weights still to be filled in."""
        super().__init__()
        self._size = size
        self._num_outputs = linear.out_features
        self.linear = nn.Linear(
            linear.in_features,
            -(-linear.out_features // size),
            bias=linear.bias is not None,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return all outputs, ``[..., out]``."""
        parts: torch.Tensor = gather(self.linear(inputs), self._size)
        return parts.movedim(0, -2).flatten(-2)[..., : self._num_outputs]
