"""How a model's forward pass is compiled for a GPU: one kernel between two matrix products wherever that is possible.

Left alone, inductor computes again in every layer what all layers share (the cosines and sines of the positions),
and lets each norm add up the outputs of several layers before it, because no sum of them is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import ParamSpec, TypeVar

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from graphs.layout import BatchInputs
from worker import (
    decode_kernels,
    gated_kernels,
    graph_matching,
    kernels,
    launching,
    product_fusion,
    product_kernels,
    rotary_fusion,
    weight_prefetch,
)
from worker.product_fusion import use_products
from worker.rotary_fusion import fuse_rotations
from worker.weight_prefetch import prefetch_weights

P = ParamSpec("P")
R = TypeVar("R")
Choose = Callable[[torch.Tensor, BatchInputs], torch.Tensor]

OWN_PRODUCTS = False
"""Whether products of few tokens are computed by our own kernels. Off until that was measured."""
PREFETCHES_WEIGHTS = False
"""Whether kernels ask for the next product's weight while they run. Off until that was measured."""
_MANY_USERS = 8
"""What has so many users is better read than computed again."""
_MAX_VERSIONS = 64
"""Most compiled versions of one function in a process. torch stops at 8."""
_VIEWS = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.expand.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.select.int,
        torch.ops.aten.transpose.int,
    }
)


def compile_forward(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a model's forward pass as one graph. Raises a `RuntimeError` when called if that cannot be done."""
    # All models of a process share the code of `function`, and each has up to three versions of it: one for many
    # tokens and slots, and others for one slot and for one token.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_VERSIONS)
    return torch.compile(
        function,
        fullgraph=True,
        options={
            # Where a rotary embedding is not fused: it concatenates halves, which would be a kernel of its own.
            "force_pointwise_cat": True,
            "post_grad_custom_post_pass": _Improve(),
            "triton.enable_pdl": launching.OVERLAPS,
        },
    )


class _Improve(CustomGraphPass):
    """What is changed in the graph before inductor makes kernels of it."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        fuse_rotations(graph)
        graph.eliminate_dead_code()
        if OWN_PRODUCTS:
            use_products(graph)
        if PREFETCHES_WEIGHTS:
            prefetch_weights(graph)
        self._write_down_shared(graph)

    def uuid(self) -> bytes:
        modules = (
            decode_kernels,
            gated_kernels,
            graph_matching,
            kernels,
            product_fusion,
            product_kernels,
            rotary_fusion,
            weight_prefetch,
        )
        switches = f"{OWN_PRODUCTS} {PREFETCHES_WEIGHTS}"
        return get_hash_for_files((__file__, *(str(module.__file__) for module in modules)), switches)

    def _write_down_shared(self, graph: torch.fx.Graph) -> None:
        """Mark what several layers read, so that it is written to memory once instead of computed in each."""
        for node in graph.nodes:
            if node.op != "call_function" or node.target in _VIEWS:
                continue
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            is_residual = (
                node.target is torch.ops.aten.add.Tensor and value.dim() == 3 and len(node.users) > 1
            )
            if is_residual or _num_users(node) >= _MANY_USERS:
                node.meta["inductor_realize_to_strides"] = True


def _num_users(node: torch.fx.Node) -> int:
    """Count the users of a node's value, also through views of it."""
    return sum(_num_users(user) if user.target in _VIEWS else 1 for user in node.users)


def compile_choice(choose: Choose, *, any_slots: bool) -> Choose:
    """Compile a function that chooses tokens from logits: once for each number of slots, or with `any_slots` once for
    all numbers of two or more."""
    # The random numbers come from products of 64 bits, which this pass would turn into an index of 32.
    compiled = torch.compile(choose, fullgraph=True, options={"constant_and_index_propagation": False})
    if not any_slots:
        return compiled

    def choose_for_any(logits: torch.Tensor, inputs: BatchInputs) -> torch.Tensor:
        num_slots = logits.shape[0]
        if num_slots > 1:
            tensors = (logits, *(getattr(inputs, field.name) for field in fields(inputs)))
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.shape[0] == num_slots:
                    torch._dynamo.mark_dynamic(tensor, 0)
        return compiled(logits, inputs)

    return choose_for_any
