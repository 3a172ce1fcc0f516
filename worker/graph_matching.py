"""What the passes over a compiled graph share: the matching of operators and of norms, and the insertion of calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

_ATEN = torch.ops.aten
_TO_DTYPE = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: of what, scaled by a weight plus an offset."""

    source: Node
    weight: Node
    eps: float
    weight_offset: float


def call(graph: Graph, target: Callable[..., Any], args: tuple[Any, ...]) -> Node:
    """Insert a call, with the fake value of its result, which inductor needs."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*torch.fx.node.map_arg(args, lambda argument: argument.meta["val"]))
    return node


def match_norm(node: object) -> Norm | None:
    """Match an RMS norm over the last dimension, scaled by a weight or by one plus a weight."""
    for normed, scale in _both_ways(*inputs_of(without_cast(node), _ATEN.mul.Tensor)):
        weight, offset = inputs_of(without_cast(scale), _ATEN.add.Tensor)
        if weight is None:
            weight, offset = scale, 0.0
        weight = without_cast(weight)
        if not has_dims(weight, 1) or not isinstance(offset, int | float):
            continue
        for inputs, factor in _both_ways(*inputs_of(without_cast(normed), _ATEN.mul.Tensor)):
            variance, eps = inputs_of(input_of(factor, _ATEN.rsqrt.default), _ATEN.add.Tensor)
            squares = input_of(variance, _ATEN.mean.dim)
            if squares is None or tuple(variance.args[1:]) != ([-1], True) or not isinstance(eps, float):
                continue
            if inputs_of(squares, _ATEN.pow.Tensor_Scalar) == (inputs, 2):
                return Norm(without_cast(inputs), weight, eps, float(offset))
    return None


def input_of(node: object, target: object) -> Any:
    """Return the first argument of a node that calls `target`, or None."""
    return node.args[0] if isinstance(node, Node) and node.target is target else None


def inputs_of(node: object, target: object) -> tuple[Any, Any]:
    """Return the two arguments of a node that calls a binary `target`, or None twice."""
    if isinstance(node, Node) and node.target is target and len(node.args) == 2:
        return node.args[0], node.args[1]
    return None, None


def _both_ways(left: object, right: object) -> tuple[tuple[object, object], tuple[object, object]]:
    return (left, right), (right, left)


def without_cast(node: object) -> Any:
    """Return what a node converts to another type, or the node itself."""
    return node.args[0] if isinstance(node, Node) and node.target is _TO_DTYPE else node


def has_dims(node: object, num_dims: int) -> bool:
    """Whether a node is a tensor of so many dimensions."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == num_dims
