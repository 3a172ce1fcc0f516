"""What a Ray cluster of several nodes needs beyond one machine: who runs where, and how many places there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.fleet import end
from scheduler.messages import SCHEDULER_NAME
from scheduler.workers import WorkerKind

_CHECK_S = 0.5
_SAY_S = 30.0
_ANSWER_S = 5.0
_ORPHANS_S = 90.0
"""Ray takes a node for dead after some 30 s without a sign of life."""
_OURS = (SCHEDULER_NAME, "api-", "prefill-", "decode-")

Resources = Mapping[str, float]
"""Of a node, or of one worker, by Ray's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A living node of the cluster."""

    node_id: str
    resources: Resources
    """All that it has, in use or not."""


def num_places(nodes: Sequence[Node], need: Resources, leaving: Collection[str] = ()) -> int:
    """Return how many workers that need so much the nodes hold; the ids in `leaving` hold none."""
    return sum(
        min(int(node.resources.get(name, 0.0) / amount + 1e-6) for name, amount in need.items())
        for node in nodes
        if node.node_id not in leaving
    )


def living_nodes() -> list[Node]:
    """Return the cluster's nodes. Blocks for a call to Ray's GCS."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [Node(node_id=node["NodeID"], resources=node["Resources"]) for node in nodes if node["Alive"]]


def on_this_node() -> dict[str, Any]:
    """Return Ray's options for an actor that must be where this process is: at the port that it holds."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)}


def wait_for_places(
    wanted: Mapping[WorkerKind, int], needs: Mapping[WorkerKind, Resources], say: Callable[[str], None]
) -> None:
    """Return once the cluster has a place for each worker. Nodes start one after the other, and take long to.

    How GPUs are shared is planned from all of them, so none may be missing then.
    """
    next_say_s = 0.0
    while True:
        nodes = living_nodes()
        missing = {kind: count - num_places(nodes, needs[kind]) for kind, count in wanted.items()}
        if all(count <= 0 for count in missing.values()):
            return
        if time.monotonic() >= next_say_s:
            words = " and ".join(f"{count} {kind}" for kind, count in missing.items() if count > 0)
            say(f"waiting for nodes with places for {words} workers")
            next_say_s = time.monotonic() + _SAY_S
        time.sleep(_CHECK_S)


def end_orphans() -> None:
    """End what is left of a service whose process is gone: it holds names and places, and nobody else ends it.

    Ray ends most of it by itself, once it has noticed; that is waited for. Of a service that lives nothing is ended.
    """
    import ray

    ends_at = time.monotonic() + _ORPHANS_S
    names: list[str] = ray.util.list_named_actors()
    while any(name.startswith(_OURS) for name in names) and time.monotonic() < ends_at:
        if SCHEDULER_NAME not in names:
            for name in names:
                if name.startswith(("prefill-", "decode-")):
                    end(name)
        elif _answers(SCHEDULER_NAME):
            return
        time.sleep(_CHECK_S)
        names = ray.util.list_named_actors()


def _answers(name: str) -> bool:
    import ray
    from ray.exceptions import RayError

    try:
        actor: Any = ray.get_actor(name)
        ray.get(actor.__ray_ready__.remote(), timeout=_ANSWER_S)
    except (RayError, ValueError):  # ValueError: Ray knows it no more
        return False
    return True
