"""Which parameters of a model are cut over the ranks of a group, and along which dimension.

What transformers says of a family decides: its tensor-parallel plan. Of the plans' styles those are done that dense
decoders use; a model whose plan has others is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from scheduler.errors import ConfigError
from worker.parallel.layers import GatheredLinear, RowParallelLinear

_REPLICATED = frozenset({"replicated_with_grad_allreduce", "embedding_rowwise"})
"""Each rank holds the whole. Of an embedding too: looking a token up costs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What one rank holds of a parameter."""

    source: str
    """Its name in the whole model, and in a checkpoint."""
    dim: int | None = None
    """The dimension that is cut; None: each rank holds all of it."""
    whole_size: int = 0
    """The size of that dimension in the whole model. Where it does not divide, zeros follow."""


@dataclass(slots=True, kw_only=True)
class ShardPlan:
    """How the parameters of a model whose layers were replaced are cut, by their present name."""

    size: int
    cuts: dict[str, Cut] = field(default_factory=dict)

    def cut(self, name: str) -> Cut:
        """Return the cut of a parameter."""
        return self.cuts.get(name, Cut(source=name))


def shard_layers(model: PreTrainedModel, size: int, name: str) -> ShardPlan:
    """Replace the layers of a model without memory (``meta``) by those of one of `size` ranks.

    Raises `ConfigError`, with the reason, if the model cannot be cut so.
    """
    plan = ShardPlan(size=size)
    if size == 1:
        return plan
    _check_heads(model, size, name)
    styles = _styles(model, name, size)
    for module_name, style in styles.items():
        parent = model.get_submodule(module_name.rpartition(".")[0])
        layer = model.get_submodule(module_name)
        assert isinstance(layer, nn.Linear)
        setattr(parent, module_name.rpartition(".")[2], _shard(plan, module_name, layer, style, name))
    return plan


def _styles(model: PreTrainedModel, name: str, size: int) -> dict[str, str]:
    """Return the style of each layer that is cut. Raises `ConfigError` if the plan has one that is not done."""
    patterns: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    kind = model.config.get_text_config().model_type
    head = model.get_output_embeddings()
    found: dict[str, str] = {}
    names = [n for n, _ in model.named_modules()] + [n for n, _ in model.named_parameters()]
    for pattern, style in patterns.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        for matched in filter(expression.fullmatch, names):
            if style in _REPLICATED:
                continue
            layer = dict(model.named_modules()).get(matched)
            is_head = layer is head and style == "colwise_gather_output"
            if not (is_head or style in ("colwise", "rowwise")) or type(layer) is not nn.Linear:
                raise ConfigError(
                    f"tensor_parallel_size must be 1 for model {name}: {kind} has {matched}, which transformers' plan "
                    f"cuts by {style}, and that is not supported, got {size}"
                )
            found[matched] = style
    if not {"colwise", "rowwise"} <= set(found.values()):
        raise ConfigError(
            f"tensor_parallel_size must be 1 for model {name}: transformers has no tensor-parallel plan for "
            f"{kind}, got {size}"
        )
    return found


def _check_heads(model: PreTrainedModel, size: int, name: str) -> None:
    text = model.config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", None)
    counts = {
        "KV heads": getattr(text, "num_key_value_heads", None) or num_heads,
        "attention heads": num_heads,
    }
    for what, count in counts.items():
        if count is not None and count % size:
            raise ConfigError(
                f"tensor_parallel_size must divide the {count} {what} of model {name}, got {size}"
            )


def _shard(plan: ShardPlan, module_name: str, layer: nn.Linear, style: str, name: str) -> nn.Module:
    """Return the part of a layer that one rank has, and note how its parameters are cut."""
    size = plan.size
    if style == "colwise_gather_output":
        inner = f"{module_name}.linear"
        for parameter in ("weight", "bias"):
            plan.cuts[f"{inner}.{parameter}"] = Cut(
                source=f"{module_name}.{parameter}", dim=0, whole_size=layer.out_features
            )
        return GatheredLinear(layer, size)
    features = layer.out_features if style == "colwise" else layer.in_features
    if features % size:
        raise ConfigError(
            f"tensor_parallel_size must divide the {features} features of {module_name} of model {name}, got {size}"
        )
    if style == "rowwise":
        plan.cuts[f"{module_name}.linear.weight"] = Cut(
            source=f"{module_name}.weight", dim=1, whole_size=features
        )
        return RowParallelLinear(layer, size)
    for parameter in ("weight", "bias"):
        plan.cuts[f"{module_name}.{parameter}"] = Cut(
            source=f"{module_name}.{parameter}", dim=0, whole_size=features
        )
    return nn.Linear(
        layer.in_features,
        features // size,
        bias=layer.bias is not None,
        device=layer.weight.device,
        dtype=layer.weight.dtype,
    )
