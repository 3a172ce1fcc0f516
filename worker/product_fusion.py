"""Makes our own operators of a compiled graph's matrix products, one with the residual sum and the norm behind it.

Left to cuBLAS, few tokens' products do not read their weights at the memory's rate. Which kernel computes an operator
is chosen by the number of tokens when it runs, so one compiled graph serves all. Where a graph is of another form, its
products stay as they are.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

import worker.gated_kernels
import worker.product_kernels  # noqa: F401  (registers the operators)
from worker.graph_matching import Norm, call, has_dims, inputs_of, match_norm

_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default, _ATEN.unsqueeze.default)
_OPERATORS = (
    torch.ops.purefill.gated_product.default,
    torch.ops.purefill.product.default,
    torch.ops.purefill.product_norm.default,
)
_NORM_NODES = 12
"""So many nodes after a sum its norm has ended."""


def use_products(graph: Graph) -> int:
    """Replace products with weights by `purefill::product`, or with sum and norm by `product_norm`; return how many."""
    count = 0
    for node in list(graph.nodes):
        weight = weight_of(node) if node.target is _ATEN.mm.default else None
        if weight is None:
            continue
        if not _fuse_norm(graph, node, weight):
            with graph.inserting_before(node):
                product = call(graph, torch.ops.purefill.product.default, (node.args[0], weight))
            node.replace_all_uses_with(product)
        count += 1
    graph.eliminate_dead_code()
    return count


def weight_of(node: Node) -> Node | None:
    """Return the weight ``[N, K]`` of a node that is a product with one, or None."""
    if node.target in _OPERATORS:
        weight = node.args[1]
    elif node.target is _ATEN.mm.default and isinstance(node.args[1], Node):
        turned = node.args[1]
        is_turned = turned.target is _ATEN.t.default or (
            turned.target is _ATEN.permute.default and turned.args[1] == [1, 0]
        )
        weight = turned.args[0] if is_turned else None
    else:
        return None
    return weight if isinstance(weight, Node) and weight.op in ("placeholder", "get_attr") else None


def _fuse_norm(graph: Graph, product: Node, weight: Node) -> bool:
    """Replace a product, the sum of it and a residual ``[1, T, N]``, and the sum's norm."""
    found = _sum_and_norm(product)
    if found is None:
        return False
    total, residual, normed, norm = found
    with graph.inserting_before(total):
        rows = _rows_of(residual) or call(graph, _ATEN.select.int, (residual, 0, 0))
        both = call(
            graph,
            torch.ops.purefill.product_norm.default,
            (product.args[0], weight, rows, norm.weight, norm.eps, norm.weight_offset),
        )
        for index, replaced in enumerate((total, normed)):
            part = call(graph, operator.getitem, (both, index))
            # Inductor does not hand an operator's result to another through views.
            for user in list(replaced.users):
                if user.target in _VIEWS and has_dims(user, 2):
                    user.replace_all_uses_with(part)
            replaced.replace_all_uses_with(call(graph, _ATEN.unsqueeze.default, (part, 0)))
    return True


def _rows_of(value: Node) -> Node | None:
    """Return the ``[T, N]`` of which a ``[1, T, N]`` is a view, if one is at hand."""
    source = value.args[0] if value.target is _ATEN.unsqueeze.default else None
    return source if has_dims(source, 2) else None


def _sum_and_norm(product: Node) -> tuple[Node, Node, Node, Norm] | None:
    """Return the sum of a product and a residual, the residual, and the sum's norm: its node, and of what it is."""
    view = next(iter(product.users))
    if len(product.users) != 1 or view.target not in _VIEWS or len(view.users) != 1:
        return None
    total = next(iter(view.users))
    residual = next((node for node in inputs_of(total, _ATEN.add.Tensor) if node is not view), None)
    if residual is None or not (has_dims(residual, 3) and has_dims(total, 3)):
        return None
    value, result = residual.meta["val"], total.meta["val"]
    if value.shape[0] != 1 or value.dtype != result.dtype or not value.is_contiguous():
        return None
    node = total
    for _ in range(_NORM_NODES):
        node = node.next
        norm = match_norm(node)
        if norm is not None and norm.source is total and node.meta["val"].dtype == result.dtype:
            return total, residual, node, norm
    return None
