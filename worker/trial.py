"""Trying a layer: what it was called with in one pass of its model, and what it made of it.

A family's layers are not judged by their class. What is to take a layer's place must compute what the layer did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""How far another module's result may be from the original's, in parts of that, or of what it adds to its input."""
_GATE_SIZES = (1.0, 20.0)
"""Standard deviations of gate with which a feed-forward part is tried. At the first, SiLU and GELU differ most; the
second is beyond the limits that families set."""


class TrialPass:
    """A pass whose attention is no attention, but whose result depends on queries, keys and values alike."""

    def __init__(self) -> None:
        self.settings: dict[int, dict[str, Any]] = {}
        """By layer, what `attend` was told besides tensors."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any
    ) -> torch.Tensor:
        """Do as `PagedPass` says, but for the result."""
        self.settings[layer] = settings
        groups = query.shape[0] // key.shape[0]
        mixed = query * key.repeat_interleave(groups, 0) + value.repeat_interleave(groups, 0)
        return mixed.transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Call:
    """What a decoder layer, or a part of one, was called with, and what it returned."""

    inputs: torch.Tensor  # [1, T, hidden]
    settings: dict[str, Any]
    """Its keywords, `paged` among them."""
    output: torch.Tensor  # [1, T, hidden]

    def agrees(
        self, output: torch.Tensor, rows: slice | torch.Tensor = slice(None), *, adds: bool = True
    ) -> bool:
        """Whether another module's output, of these rows, is the same but for rounding.

        `adds` says that the original adds something to its input, of which the limit is a part.
        """
        inputs, expected = self.inputs[:, rows], self.output[:, rows]
        if output.shape != expected.shape:
            return False
        size = (expected - inputs if adds else expected).float().norm(dim=-1)
        error = (output - expected).float().norm(dim=-1) / size
        # Few tokens, the first of a text among them, have inputs so large that the rounding of the sum hides the rest.
        return bool(error.median() <= _LIMITS[self.inputs.dtype])


def find_places(
    model: nn.Module, is_wanted: Callable[[nn.Module], bool]
) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return where a model has such modules: the one that holds it, its name there, and the module itself."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_wanted(child)
    ]


@torch.inference_mode()
def record_calls(
    model: nn.Module, layers: Sequence[nn.Module], token_ids: torch.Tensor
) -> tuple[dict[nn.Module, Call], TrialPass]:
    """Run a model over ``[1, T]`` with a trial's attention; return how the layers were called, and the trial.

    Calls of another form than a `Call` has are left out.
    """
    trial = TrialPass()
    calls: dict[nn.Module, Call] = {}
    if not layers:
        return calls, trial

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if len(args) == 1 and isinstance(output, torch.Tensor) and output.shape == args[0].shape:
            calls[layer] = Call(args[0], kwargs, output)

    handles = [layer.register_forward_hook(record, with_kwargs=True) for layer in layers]
    try:
        model(input_ids=token_ids, use_cache=False, logits_to_keep=1, paged=trial)
    finally:
        for handle in handles:
            handle.remove()
    return calls, trial


def is_gated_alike(
    original: Callable[[torch.Tensor], torch.Tensor],
    other: Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    gate_weight: torch.Tensor,
) -> bool:
    """Whether a feed-forward part and another form of it agree, with inputs, ``[1, T, hidden]``, of telling sizes.

    In 16 bits SiLU passes for GELU where gate is small, and where it is large: both are half, and all, of what is
    positive. A limit passes for none where nothing reaches it.
    """
    size = torch.nn.functional.linear(inputs, gate_weight).float().std()
    parts = [(inputs.float() * (wanted / size)).to(inputs.dtype) for wanted in _GATE_SIZES]
    return all(Call(part, {}, original(part)).agrees(other(part), adds=False) for part in parts)
