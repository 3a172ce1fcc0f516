"""Feed-forward parts whose gate and up projections, SiLU and their product are one operator.

On a Hopper GPU it is one kernel (`worker.triton_products`), where that is faster than a matrix product and a kernel
behind it. Which parts of a model are of that form is not read off their class: each is compared with what it computed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from worker.gated_kernels import gated_product
from worker.merge import MergedPart
from worker.trial import Call, gate_inputs, record_calls


class GatedMlp(nn.Module):
    """A feed-forward part, ``down(silu(gate(x)) * up(x))``, made of the layers of the one whose place it takes."""

    def __init__(self, gate_up: nn.Linear, down: nn.Module) -> None:
        """`gate_up` has the rows of gate first, and no bias."""
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return ``[..., hidden]`` for as much."""
        gated = gated_product(hidden_states.flatten(0, -2), self.gate_up.weight)
        output: torch.Tensor = self.down(gated.unflatten(0, hidden_states.shape[:-1]))
        return output


@torch.inference_mode()
def fuse_gated_mlps(model: nn.Module, token_ids: torch.Tensor) -> int:
    """Make the feed-forward parts of a model `GatedMlp`s where that computes the same; return how many.

    Projections must be merged before. `token_ids`, ``[1, T]``, is a sequence to try them with.
    """
    places = [
        (parent, name, child, gate_up)
        for parent in list(model.modules())
        for name, child in list(parent.named_children())
        if hasattr(child, "down_proj") and (gate_up := _gate_up(child)) is not None
    ]
    calls, _ = record_calls(model, [child for _, _, child, _ in places], token_ids) if places else ({}, None)
    count = 0
    for parent, name, mlp, gate_up in places:
        if mlp not in calls:
            continue
        fused = GatedMlp(gate_up, mlp.down_proj)  # type: ignore[arg-type]
        if all(call.agrees(fused(call.inputs), adds=False) for call in _calls(mlp, gate_up, calls[mlp])):
            setattr(parent, name, fused)
            count += 1
    return count


def compile_gated_ahead(model: nn.Module) -> None:
    """Compile, in the background, the kernels that a model's gated parts need for more tokens than a step has."""
    gated = next((module for module in model.modules() if isinstance(module, GatedMlp)), None)
    if gated is not None:
        from worker.triton_gated import compile_ahead  # Triton comes with CUDA only.

        compile_ahead(gated.gate_up.weight)


def _calls(mlp: nn.Module, gate_up: nn.Linear, call: Call) -> Iterator[Call]:
    """Yield how a part was called, and calls in other sizes."""
    yield call
    for inputs in gate_inputs(call.inputs, gate_up.weight[: gate_up.out_features // 2]):
        yield Call(inputs, {}, mlp(inputs))


def _gate_up(mlp: nn.Module) -> nn.Linear | None:
    """Return the layer that projects to gate and up at once, if there is one without a bias."""
    gate = getattr(mlp, "gate_proj", None)
    whole = gate.merged.whole if isinstance(gate, MergedPart) else getattr(mlp, "gate_up_proj", None)
    return whole if type(whole) is nn.Linear and whole.bias is None else None
