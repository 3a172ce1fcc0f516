"""Finds rotary embeddings, with the norm before them, in a compiled graph and makes one kernel of each pair.

Inductor makes up to six kernels of the queries' and the keys' norm and rotation, and reads them twice. The graph is
of a kind that transformers' families share; where one differs, nothing is found and inductor's kernels stay.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

import worker.decode_kernels
import worker.kernels  # noqa: F401  (registers the operators)
from worker.graph_matching import Norm, call, has_dims, input_of, inputs_of, match_norm

_ATEN = torch.ops.aten
_END = 2**63 - 1
_ATTENTIONS = (torch.ops.purefill.prefill_attention.default, torch.ops.purefill.decode_attention.default)


@dataclass(frozen=True, slots=True)
class _Rotated:
    """Where rotated queries or keys come from."""

    source: Node
    """Before norm and rotation, ``[1, T, heads, head_dim]``."""
    norm: Norm | None
    cos: Node
    """``[1, T, head_dim]``"""
    sin: Node


def fuse_rotations(graph: Graph) -> int:
    """Replace what rotates the queries and keys of each attention by `purefill::rotate`; return how many."""
    return sum(
        _fuse(graph, node)
        for node in list(graph.nodes)
        if node.target is torch.ops.higher_order.auto_functionalized_v2 and node.args[0] in _ATTENTIONS
    )


def _fuse(graph: Graph, attention: Node) -> bool:
    query, key = _match_rotated(attention.kwargs["query"]), _match_rotated(attention.kwargs["key"])
    if query is None or key is None or (query.cos, query.sin) != (key.cos, key.sin):
        return False
    norms = (query.norm, key.norm)
    eps, weight_offset = (norms[0].eps, norms[0].weight_offset) if norms[0] else (0.0, 0.0)
    if (norms[0] is None) != (norms[1] is None) or (norms[1] and norms[1].eps != eps):
        return False
    with graph.inserting_before(attention):
        tensors = [
            call(graph, _ATEN.select.int, (node, 0, 0))
            for node in (query.source, key.source, query.cos, query.sin)
        ]
        weights = [norm.weight if norm else None for norm in norms]
        rotated = call(
            graph,
            torch.ops.purefill.rotate.default,
            (tensors[0], tensors[1], *weights, tensors[2], tensors[3], eps, weight_offset),
        )
        attention.update_kwarg("query", call(graph, operator.getitem, (rotated, 0)))
        attention.update_kwarg("key", call(graph, operator.getitem, (rotated, 1)))
    return True


def _match_rotated(node: object) -> _Rotated | None:
    """Match a ``[T, heads, head_dim]`` that is ``x * cos + cat(-x[half:], x[:half]) * sin``, and a norm before it.

    `x` is ``[1, heads, T, head_dim]``; its norm may come before or after its two middle dimensions change places.
    """
    straight, crossed = inputs_of(
        input_of(input_of(node, _ATEN.permute.default), _ATEN.select.int), _ATEN.add.Tensor
    )
    x, cos = inputs_of(straight, _ATEN.mul.Tensor)
    halves, sin = inputs_of(crossed, _ATEN.mul.Tensor)
    if not (isinstance(x, Node) and _is_cat_of_halves(halves, x)):
        return None
    angles = [input_of(factor, _ATEN.unsqueeze.default) for factor in (cos, sin)]
    norm = match_norm(x)
    source = input_of(norm.source if norm else x, _ATEN.permute.default)
    if norm is None:
        norm = match_norm(source)
        source = norm.source if norm else source
    if not (has_dims(source, 4) and has_dims(angles[0], 3) and has_dims(angles[1], 3)):
        return None
    return _Rotated(source, norm, angles[0], angles[1])


def _is_cat_of_halves(node: object, x: Node) -> bool:
    parts: Any = input_of(node, _ATEN.cat.default)
    half = x.meta["val"].shape[-1] // 2
    return (
        parts is not None
        and len(parts) == 2
        and _is_slice(input_of(parts[0], _ATEN.neg.default), x, half, _END)
        and _is_slice(parts[1], x, 0, half)
    )


def _is_slice(node: object, source: Node, start: int, end: int) -> bool:
    """Whether a node is ``source[..., start:end]`` of four dimensions."""
    return (
        isinstance(node, Node)
        and node.target is _ATEN.slice.Tensor
        and node.args[0] is source
        and tuple(node.args[1:]) == (3, start, end)
    )
