"""Which kernel of a compiled graph is told of which weight, and which products become ours. Nothing is compiled."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch.fx import Graph, Node

import worker.compiled
import worker.model
from graphs.buckets import Bucket
from graphs.layout import BatchInputs, BatchLayout, HostBatch
from tests.unit.worker.tiny_models import FAMILIES, SHAPE, LoadTiny
from worker.graph_matching import call
from worker.kv_pool import KVPool
from worker.product_fusion import use_products, weight_of
from worker.rotary_fusion import fuse_rotations
from worker.weight_prefetch import prefetch_weights

# What inductor imports uses torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")

LAYERS = SHAPE["num_hidden_layers"]
PURE = torch.ops.purefill
ROTATE, NORMED = PURE.rotate.default, PURE.product_norm.default
GraphOf = Callable[[str], Graph]


class SeenError(Exception):
    """Ends the compilation."""


@pytest.fixture
def graph_of(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch, unfused: None) -> GraphOf:
    """Return a function that makes the graph of a family's pass for a GPU, with its rotations fused."""
    seen: list[Graph] = []

    def fuse_and_stop(graph: Graph) -> int:
        fuse_rotations(graph)
        graph.eliminate_dead_code()
        seen.append(graph)
        raise SeenError

    def make(family: str) -> Graph:
        model, _ = load_tiny(FAMILIES[family])
        # A pool that is not on the CPU, so that the pass is the one that is captured.
        pool = KVPool.on_device(model.kv_spec, num_pages=4, page_size=16, device=torch.device("meta"))
        layout = BatchLayout(bucket=Bucket(32, 2), pages_per_slot=4, page_size=16)
        inputs = BatchInputs.of(layout, HostBatch(layout).tensor)
        with torch.inference_mode(), pytest.raises(Exception, match="SeenError"):
            model.compiled_logits(inputs, pool)
        return seen[-1]

    monkeypatch.setattr(worker.compiled, "fuse_rotations", fuse_and_stop)
    # On the CPU other products would take the place of torch's.
    monkeypatch.setattr(worker.model, "pack_linears", lambda *_, **__: 0)
    return make


def is_attention(node: Node) -> bool:
    return bool(node.args) and node.args[0] is PURE.prefill_attention.default


def size_of(weight: Node) -> int:
    return int(weight.meta["val"].numel() * weight.meta["val"].element_size())


def test_each_kernel_is_told_of_the_product_behind_it(graph_of: GraphOf) -> None:
    graph = graph_of("qwen3")
    before = [node for node in graph.nodes if node.target is torch.ops.aten.mm.default]
    assert use_products(graph) == len(before)
    assert not [node for node in graph.nodes if node.target is torch.ops.aten.mm.default]
    # Two norms a layer follow a residual sum; the last layer's second one is the model's.
    assert sum(node.target is NORMED for node in graph.nodes) == 2 * LAYERS

    found = [node for node in graph.nodes if weight_of(node) is not None]
    assert len(found) == len(before)
    rotations = [node for node in graph.nodes if node.target is ROTATE]
    attentions = [node for node in graph.nodes if is_attention(node)]
    assert len(rotations) == len(attentions) == LAYERS
    assert prefetch_weights(graph) == 2 * LAYERS + len(found) - 1
    for rotation, attention in zip(rotations, attentions, strict=True):
        weight = weight_of(next(product for product in found if attention < product))
        assert weight is not None
        assert rotation.args[8] is attention.kwargs["next_weight"] is weight
        assert attention.meta["eager_input_vals"][1]["next_weight"] is weight.meta["val"]
        # Nobody asks for more than there is, and a tiny weight is the rotation's alone.
        assert rotation.args[9] == attention.kwargs["next_begin"] == size_of(weight)
        assert attention.kwargs["next_bytes"] == 0
    for product, following in pairwise(found):
        place = {NORMED: 6}.get(product.target, 2)
        assert product.args[place] is weight_of(following)
        assert product.args[place + 1] == size_of(weight_of(following))
    graph.lint()


def test_what_is_fused_computes_the_same() -> None:
    torch.manual_seed(0)
    x, weight, residual, norm_weight = (
        torch.randn(*shape) for shape in ((1, 5, 64), (32, 64), (1, 5, 32), (32,))
    )

    graph = Graph()
    values = {"x": x[0], "weight": weight, "residual": residual, "norm_weight": norm_weight}
    nodes = {}
    for name, value in values.items():
        nodes[name] = graph.placeholder(name)
        nodes[name].meta["val"] = value
    aten = torch.ops.aten
    turned = call(graph, aten.permute.default, (nodes["weight"], [1, 0]))
    product = call(graph, aten.mm.default, (nodes["x"], turned))
    total = call(
        graph, aten.add.Tensor, (nodes["residual"], call(graph, aten.view.default, (product, [1, 5, 32])))
    )
    squares = call(graph, aten.pow.Tensor_Scalar, (total, 2))
    variance = call(graph, aten.add.Tensor, (call(graph, aten.mean.dim, (squares, [-1], True)), 1e-6))
    scaled = call(graph, aten.mul.Tensor, (total, call(graph, aten.rsqrt.default, (variance,))))
    normed = call(graph, aten.mul.Tensor, (nodes["norm_weight"], scaled))
    graph.output((total, normed))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    before = module(*values.values())
    assert use_products(graph) == 1
    assert [node.target for node in graph.nodes if node.op == "call_function"].count(operator.getitem) == 2
    module.recompile()
    torch.testing.assert_close(module(*values.values()), before)
