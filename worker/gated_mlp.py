"""Feed-forward parts whose gate and up projections, SiLU and their product are one operator.

On a Hopper GPU it is one kernel (`worker.triton_products`), where that is faster than a matrix product and a kernel
behind it. Which parts of a model are of that form is not read off their class: each is compared with what it computed.
"""

from __future__ import annotations

import torch
from torch import nn

from worker.gated_kernels import gated_product
from worker.merge import MergedPart
from worker.trial import find_places, is_gated_alike, record_calls


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
    places = find_places(model, lambda module: _gate_up(module) is not None)
    calls, _ = record_calls(model, [mlp for _, _, mlp in places], token_ids)
    count = 0
    for parent, name, mlp in places:
        call, gate_up = calls.get(mlp), _gate_up(mlp)
        if call is None or gate_up is None:
            continue
        fused = GatedMlp(gate_up, mlp.down_proj)  # type: ignore[arg-type]
        gate_weight = gate_up.weight[: gate_up.out_features // 2]
        if call.agrees(fused(call.inputs), adds=False) and is_gated_alike(
            mlp, fused, call.inputs, gate_weight
        ):
            setattr(parent, name, fused)
            count += 1
    return count


def compile_gated_ahead(model: nn.Module) -> None:
    """Compile, in the background, the kernels that a model's gated parts need for more tokens than a step has."""
    gated = next((module for module in model.modules() if isinstance(module, GatedMlp)), None)
    if gated is not None:
        from worker.triton_gated import compile_ahead  # Triton comes with CUDA only.

        compile_ahead(gated.gate_up.weight)


def _gate_up(mlp: nn.Module) -> nn.Linear | None:
    """Return the layer of a feed-forward part that projects to gate and up at once, if there is one without a bias."""
    if not hasattr(mlp, "down_proj"):
        return None
    gate = getattr(mlp, "gate_proj", None)
    whole = gate.merged.whole if isinstance(gate, MergedPart) else getattr(mlp, "gate_up_proj", None)
    return whole if type(whole) is nn.Linear and whole.bias is None else None
