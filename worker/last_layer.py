"""The last decoder layer, which after its attention goes on with those rows only of which somebody wants logits.

Of a prompt that is the last token's. All tokens need the keys and values of the last layer, but nothing reads what
else it makes of them: of a model of 36 layers 2.4 % of all products are saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from worker.trial import Call, TrialPass, find_places, record_calls


class LastLayer(nn.Module):
    """A decoder layer whose code stays the family's own, around an attention that is computed before."""

    def __init__(self, layer: Any) -> None:
        """Take the layer apart. `restore` undoes that."""
        super().__init__()
        self.attention: Any = layer.self_attn
        self.out: Any = self.attention.o_proj
        self.attention.o_proj = nn.Identity()
        layer.self_attn = _Attended()
        self.layer: Any = layer

    def __getattr__(self, name: str) -> Any:
        """Return what the model's own code looks up in its layers, such as an attention's type."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def restore(self) -> None:
        """Put the layer together again. This module must not be used afterwards."""
        self.attention.o_proj = self.out
        self.layer.self_attn = self.attention

    def forward(
        self, hidden_states: torch.Tensor, *, kept: torch.Tensor | None = None, **settings: Any
    ) -> torch.Tensor:
        """Return ``[1, T, hidden]`` for as much, or the rows `kept`, ``[S]``, of it."""
        attended, _ = self.attention(hidden_states=self.layer.input_layernorm(hidden_states), **settings)
        if kept is not None:
            hidden_states, attended = hidden_states[:, kept], attended[:, kept]
        output: torch.Tensor = self.layer(hidden_states, attended=self.out(attended), **settings)
        return output


class _Attended(nn.Module):
    """Stands where a layer has its attention, and returns what came of it."""

    def forward(self, *_: Any, attended: torch.Tensor, **__: Any) -> tuple[torch.Tensor, None]:
        """Return what an attention module returns."""
        return attended, None


@torch.inference_mode()
def cut_last_layer(model: nn.Module, token_ids: torch.Tensor) -> bool:
    """Make the last decoder layer a `LastLayer` if that computes the same; return whether it does.

    `token_ids`, ``[1, T]``, is a sequence to try it with.
    """
    places = find_places(model, _has_parts)
    if not places:
        return False
    parent, name, layer = places[-1]
    calls, _ = record_calls(model, [layer], token_ids)
    if layer not in calls:
        return False
    whole = _logits(model, token_ids)
    last = LastLayer(layer)
    setattr(parent, name, last)
    try:
        agrees = _is_alike(last, calls[layer]) and _goes_on_alike(model, token_ids, whole)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError):
        agrees = False  # A layer of another form may not even take what it is given here.
    if not agrees:
        last.restore()
        setattr(parent, name, layer)
    return agrees


def _has_parts(layer: nn.Module) -> bool:
    return hasattr(layer, "input_layernorm") and hasattr(getattr(layer, "self_attn", None), "o_proj")


def _is_alike(last: LastLayer, call: Call) -> bool:
    # In another order: a layer that mixes tokens outside its attention would show.
    kept = torch.arange(call.inputs.shape[1], device=call.inputs.device).flip(0)
    return call.agrees(last(call.inputs, kept=kept, **call.settings), kept)


def _goes_on_alike(model: nn.Module, token_ids: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether what follows the layer is content with fewer rows: no other layer, nor anything of all tokens."""
    kept = torch.arange(token_ids.shape[1], device=token_ids.device).flip(0)[::2]
    return Call(whole, {}, whole).agrees(_logits(model, token_ids, kept=kept), kept, adds=False)


def _logits(model: nn.Module, token_ids: torch.Tensor, **settings: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(
        input_ids=token_ids, use_cache=False, logits_to_keep=0, paged=TrialPass(), **settings
    ).logits
    return logits
