"""Decoder layers of the form that most families share, computed with less traffic through the CPU's memory.

transformers' code makes eight tensors of a norm and fourteen of a rotary embedding, each of which is written and read
again. Here a norm is five passes in place, queries and keys are rotated together, and SiLU, its product and the
residual sums are done by the matrix products before them, on what is still in registers. Of the last layer, only the
rows of which somebody wants logits go on after attention.

Which layers are of this form is not read off their class: each is compared with what it computed as it was loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from worker.attention import PagedPass
from worker.packed import PackedLinear, is_packable
from worker.trial import Call, TrialPass, find_places, is_gated_alike, record_calls

_LAYER = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_HEAD_NORMS = frozenset({"q_norm", "k_norm"})
_MLP = frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"})


class FusedLayer(nn.Module):
    """A decoder layer. It owns the weights of the one that it is made of, packed."""

    def __init__(
        self, layer: nn.Module, attention: dict[str, Any], angles: _Angles, *, is_last: bool
    ) -> None:
        super().__init__()
        attn: Any = layer.self_attn
        mlp: Any = layer.mlp
        self._layer_idx = int(attn.layer_idx)
        self._attention = attention
        self._angles = angles
        self._is_last = is_last
        self._head_dim = int(attn.head_dim)
        self._num_heads = attn.q_proj.out_features // self._head_dim
        self._num_rotated = self._num_heads + attn.k_proj.out_features // self._head_dim
        self._head_norms = tuple(_norm_of(getattr(attn, n)) for n in ("q_norm", "k_norm") if hasattr(attn, n))
        self.qkv = PackedLinear(attn.q_proj, attn.k_proj, attn.v_proj)
        self.out = PackedLinear(attn.o_proj)
        self.gate, self.up, self.down = (
            PackedLinear(part) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        # A module finds its parts in Python code: at 16 tokens that takes as long as what is done with some of them.
        self._attention_parts = _norm_of(layer.input_layernorm), self.qkv.forward, self.out.plus
        self._mlp_parts = _norm_of(layer.post_attention_layernorm), self.down.plus
        self._gated_parts = self.gate.silu, self.up.times

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: PagedPass,
        kept: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return ``[1, T, hidden]`` for as much; the last layer returns the rows `kept`, ``[S]``, if there is such."""
        input_norm, project, project_out = self._attention_parts
        post_norm, down = self._mlp_parts
        hidden = hidden_states[0]
        qkv = project(input_norm(hidden))
        heads = qkv.view(len(hidden), -1, self._head_dim).transpose(0, 1)
        rotated = self._rotate(qkv, heads, position_embeddings)
        attended = paged.attend(
            self._layer_idx,
            rotated[: self._num_heads],
            rotated[self._num_heads :],
            heads[len(rotated) :],
            **self._attention,
        ).flatten(1)
        if self._is_last and kept is not None:
            hidden, attended = hidden[kept], attended[kept]
        hidden = project_out(attended, hidden)
        return down(self.gated(post_norm(hidden)), hidden).unsqueeze(0)

    def gated(self, normed: torch.Tensor) -> torch.Tensor:
        """Return what the last projection of the feed-forward part is of, for ``[T, hidden]``."""
        gate, up = self._gated_parts
        return up(normed, gate(normed))

    def _rotate(
        self,
        qkv: torch.Tensor,
        heads: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Return queries and keys, ``[heads, T, head_dim]``, rotated: the two halves of a head are coordinates.

        `qkv` is ``[T, all heads * head_dim]``, and `heads` the same as ``[all heads, T, head_dim]``.
        """
        num_rotated, head_dim = self._num_rotated, self._head_dim
        if self._head_norms:
            norm_query, norm_key = self._head_norms
            query, key = heads[: self._num_heads], heads[self._num_heads : num_rotated]
            qkv = torch.cat((norm_query(query), norm_key(key))).transpose(0, 1).flatten(1)
        flat = qkv[:, : num_rotated * head_dim]
        cos, signed_sin, crossing = self._angles.of(
            *position_embeddings, num_rotated, qkv.shape[1] // head_dim
        )
        crossed = qkv.view(-1, head_dim // 2).index_select(0, crossing).view(flat.shape)
        rotated = (flat * cos).addcmul_(crossed, signed_sin)
        return rotated.view(len(qkv), num_rotated, head_dim).transpose(0, 1)


def _norm_of(norm: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an RMS norm over the last dimension, which returns its input's type and computes in float32."""
    weight, eps = norm.weight.detach().float(), torch.tensor(_eps(norm))
    per_element = 1 / len(weight)

    def apply(inputs: torch.Tensor) -> torch.Tensor:
        wide = inputs.to(torch.float32, copy=True)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(eps, norm, norm, value=per_element).rsqrt_()
        return wide.mul_(scale).mul_(weight).to(inputs.dtype)

    return apply


class _Angles:
    """Holds what all layers of a pass need to rotate heads of size D, of which they have R to rotate and H in all."""

    def __init__(self) -> None:
        self._source: torch.Tensor | None = None
        self._made: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def of(
        self, cos: torch.Tensor, sin: torch.Tensor, num_rotated: int, num_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return cosines, and sines of which those for the first half of a head are negative, ``[T, R * D]``; and
        which half of a head, of ``T * H * 2``, is beside each that is rotated, ``[T * R * 2]``."""
        if self._source is not cos:
            self._source, self._made = cos, {}
        if (num_rotated, num_heads) not in self._made:
            signed_sin = sin[0].clone()
            signed_sin[:, : sin.shape[-1] // 2].neg_()
            halves = torch.arange(cos.shape[1] * num_heads * 2).view(-1, num_heads, 2)
            crossing = halves[:, :num_rotated].flip(2).flatten()
            self._made[num_rotated, num_heads] = (
                cos[0].repeat(1, num_rotated),
                signed_sin.repeat(1, num_rotated),
                crossing,
            )
        return self._made[num_rotated, num_heads]


@torch.inference_mode()
def fuse_layers(model: nn.Module, token_ids: torch.Tensor) -> frozenset[int]:
    """Replace the decoder layers of a model on the CPU whose fused form computes the same; return which, by index.

    `token_ids`, ``[1, T]``, is a sequence to try them with. Must come before other changes of the layers.
    """
    places = find_places(model, _has_usual_form)
    calls, trial = record_calls(model, [layer for _, _, layer in places], token_ids)
    last, angles, fused_layers = _last_layer(model), _Angles(), set()
    for parent, name, layer in places:
        if layer not in calls:
            continue
        layer_idx = int(layer.self_attn.layer_idx)  # type: ignore[union-attr,arg-type]
        fused = _fuse(calls[layer], layer, trial, angles, is_last=layer_idx == last)
        if fused is not None:
            setattr(parent, name, fused)
            fused_layers.add(layer_idx)
    return frozenset(fused_layers)


def _last_layer(model: nn.Module) -> int:
    indices = [getattr(module, "layer_idx", None) for module in model.modules()]
    return max((index for index in indices if isinstance(index, int)), default=-1)


def _has_usual_form(layer: nn.Module) -> bool:
    """Whether a layer has the parts, by name, that a `FusedLayer` is made of."""
    if {name for name, _ in layer.named_children()} != _LAYER:
        return False
    attn: Any = layer.self_attn
    mlp: Any = layer.mlp
    attn_parts, mlp_parts = ({name for name, _ in part.named_children()} for part in (attn, mlp))
    if attn_parts - _HEAD_NORMS != _ATTENTION or len(attn_parts & _HEAD_NORMS) == 1 or mlp_parts != _MLP:
        return False
    linears = [getattr(attn, name) for name in _ATTENTION] + [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attn, name) for name in attn_parts & _HEAD_NORMS]
    return (
        all(is_packable(linear) for linear in linears)
        and len({attn.q_proj.bias is None, attn.k_proj.bias is None, attn.v_proj.bias is None}) == 1
        and all(_eps(norm) is not None and hasattr(norm, "weight") for norm in norms)
        and isinstance(getattr(attn, "head_dim", None), int)
        and isinstance(getattr(attn, "layer_idx", None), int)
    )


def _eps(norm: Any) -> float | None:
    """Return what a family's norm adds to the variance, or None if it has no such setting under a usual name."""
    eps: float | None = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return eps


def _fuse(call: Call, layer: Any, trial: TrialPass, angles: _Angles, *, is_last: bool) -> FusedLayer | None:
    """Return the fused form of a layer, or None if it computes something else."""
    attn = layer.self_attn
    settings, positions = trial.settings.get(attn.layer_idx), call.settings.get("position_embeddings")
    if settings is None or positions is None:
        return None
    if positions[0].shape != (1, call.inputs.shape[1], attn.head_dim):
        return None  # Its angles are not those of all positions.
    fused = FusedLayer(layer, settings, angles, is_last=is_last)
    output = fused(call.inputs, position_embeddings=positions, paged=TrialPass())
    if not call.agrees(output):
        return None

    def feed_forward(normed: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = fused.down(fused.gated(normed[0]))
        return output.unsqueeze(0)

    # Also where it adds little.
    mlp = layer.mlp
    return fused if is_gated_alike(mlp, feed_forward, call.inputs, mlp.gate_proj.weight) else None
