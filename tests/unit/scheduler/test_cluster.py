"""How many workers the nodes of a cluster have places for."""

from __future__ import annotations

from scheduler.cluster import Node, num_places

NODES = [
    Node(node_id="head", resources={"CPU": 8.0}),
    Node(node_id="a", resources={"prefill": 2.0}),
    Node(node_id="b", resources={"prefill": 1.0, "decode": 3.0, "fast": 1.0}),
]


def test_each_node_holds_as_many_workers_as_its_scarcest_resource_allows() -> None:
    assert num_places(NODES, {"prefill": 1}) == 3
    assert num_places(NODES, {"decode": 2}) == 1
    assert num_places(NODES, {"decode": 1, "fast": 1}) == 1
    assert num_places(NODES, {"other": 1}) == 0


def test_fractions_are_counted_exactly() -> None:
    assert num_places([Node(node_id="a", resources={"decode": 0.3})], {"decode": 0.1}) == 3


def test_a_node_that_leaves_has_no_place() -> None:
    assert num_places(NODES, {"prefill": 1}, leaving={"a"}) == 1
