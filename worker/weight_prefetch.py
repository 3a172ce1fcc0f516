"""Tells the kernels of a compiled graph which weight the next product reads, so that they ask for it ahead.

While attention, a rotation or a norm runs, the memory is idle, and with few tokens a product waits for its weight. So
each kernel of ours that can has a part of the next weight come to the L2 cache. Of how many tokens that is of use, the
kernels decide. What is computed does not depend on it.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

import worker.gated_kernels
import worker.kernels  # noqa: F401  (registers the operators)
from worker.product_fusion import weight_of

ROTATION_BYTES = 8 << 20
"""What the memory delivers in some 2 of the 3 us that a rotation takes."""
ATTENTION_BYTES = 20 << 20
"""The same for attention's 7 us. With the rotation's this is a little more than half of an H200's L2 cache."""
PRODUCT_BYTES = 12 << 20
"""The same for a norm of 2.7 us and the starts of two kernels; a product asks for it when it ends."""
_ROTATE = torch.ops.purefill.rotate.default
_ROTATE_ARGS = 8
_PRODUCTS = {
    # How many arguments come before the next weight.
    torch.ops.purefill.gated_product.default: 2,
    torch.ops.purefill.product.default: 2,
    torch.ops.purefill.product_norm.default: 6,
}


def prefetch_weights(graph: Graph) -> int:
    """Hand the weight of the next product that depends on it to each kernel that can ask for it; return to how many."""
    count = 0
    rotated_bytes: dict[Node, int] = {}
    for node in graph.nodes:
        is_attention = _is_attention(node)
        if not is_attention and node.target is not _ROTATE and node.target not in _PRODUCTS:
            continue
        weight = _next_weight(node)
        if weight is None:
            continue
        count += 1
        if is_attention:
            begin = rotated_bytes.get(weight, 0)
            _tell_attention(node, weight, begin, _most(weight, begin + ATTENTION_BYTES) - begin)
        elif node.target is _ROTATE:
            rotated_bytes[weight] = _most(weight, ROTATION_BYTES)
            node.args = (*node.args[:_ROTATE_ARGS], weight, rotated_bytes[weight])
        else:
            node.args = (*node.args[: _PRODUCTS[node.target]], weight, _most(weight, PRODUCT_BYTES))
    return count


def _is_attention(node: Node) -> bool:
    return (
        node.target is torch.ops.higher_order.auto_functionalized_v2
        and node.args[0] is torch.ops.purefill.prefill_attention.default
    )


def _tell_attention(attention: Node, weight: Node, begin: int, num_bytes: int) -> None:
    attention.kwargs = {
        **attention.kwargs,
        "next_weight": weight,
        "next_begin": begin,
        "next_bytes": num_bytes,
    }
    # Inductor makes the operator's call of these, and would leave out a tensor that is not among them.
    args, kwargs = attention.meta["eager_input_vals"]
    attention.meta["eager_input_vals"] = (args, {**kwargs, "next_weight": weight.meta["val"]})


def _next_weight(node: Node) -> Node | None:
    """Return the weight of the first product after a node that depends on it."""
    dependent = {node}
    later = node.next
    while later.op != "output":
        if not dependent.isdisjoint(later.all_input_nodes):
            weight = weight_of(later)
            if weight is not None:
                return weight
            dependent.add(later)
        later = later.next
    return None


def _most(weight: Node, num_bytes: int) -> int:
    """Return so many bytes, or what a weight has, as a multiple of 16."""
    value = weight.meta["val"]
    return int(min(num_bytes, value.numel() * value.element_size())) // 16 * 16
