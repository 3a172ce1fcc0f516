"""The operators by which the ranks of a group combine what they computed. They can be captured and compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from worker.parallel.group import ShardGroup

_groups: list[ShardGroup] = []
"""That of this process, if it is in one: operators take no objects."""


def enter(group: ShardGroup | None) -> None:
    """Let the operators of this process work on a group, in place of any before."""
    _groups[:] = [] if group is None else [group]


@torch.library.custom_op("purefill::all_reduce", mutates_args=("tensor",))
def all_reduce(tensor: torch.Tensor) -> None:
    """Replace a dense tensor by the sum of those of all ranks; all get the same bits."""
    _groups[0].all_reduce(tensor)


@all_reduce.register_fake
def _(tensor: torch.Tensor) -> None:
    return None


@torch.library.custom_op("purefill::gather", mutates_args=())
def gather(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return the tensors of all `size` ranks, ``[size, *shape]``."""
    gathered = tensor.new_empty((size, *tensor.shape))
    _groups[0].gather(gathered, tensor.contiguous())
    return gathered


@gather.register_fake
def _(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return tensor.new_empty((size, *tensor.shape))
