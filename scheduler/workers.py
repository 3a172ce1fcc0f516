"""How worker actors are started: what each is told, and on which host it lands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any, Literal

from scheduler.errors import ConfigError
from scheduler.messages import WorkerConfig

WorkerKind = Literal["prefill", "decode"]

_PLACEMENT_TIMEOUT_S = 10.0
"""A placement group that the cluster cannot hold within this time is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTemplate:
    """What all workers of a service have in common."""

    config: WorkerConfig
    """The name is filled in for each."""
    num_gpus: float = 0.0
    """GPUs of each worker, or of each of its ranks: 1, or a fraction where workers share one."""
    num_ranks: Mapping[WorkerKind, int] = field(default_factory=dict)
    """Processes of each worker of a kind, if not one; each has `num_gpus`."""
    resources: Mapping[WorkerKind, Mapping[str, float]] = field(default_factory=dict)
    """Custom resources of Ray that each worker of a kind takes up: it lands on nodes that have them."""


def create_worker(
    kind: WorkerKind,
    name: str,
    template: WorkerTemplate,
    *,
    rank_bundles: tuple[int, ...] = (),
    **options: Any,
) -> Any:
    """Start a worker actor and return its handle; it loads nothing yet. `options` are Ray's.

    Of a worker of several ranks this is rank 0, which starts the others when it loads: in `rank_bundles` of its
    placement group, else anywhere on its host. Raises `ConfigError` if an actor has that name.
    """
    (entry_point,) = entry_points(group="purefill.workers", name=kind)
    if kind == "decode":
        # Its `run` occupies a thread for good, the other calls come and go.
        options["max_concurrency"] = 4
    else:
        # Threads that wait for pages to arrive, and one for `live`, beside the one that computes.
        options["groups"] = {"handoff": 8, "life": 1}
    num_ranks, num_gpus = template.num_ranks.get(kind, 1), template.num_gpus
    if num_ranks > 1 and num_gpus and not rank_bundles:
        num_gpus = 1.0  # Two ranks must not come to one GPU.
    config = replace(
        template.config,
        name=name,
        tensor_parallel_size=num_ranks,
        gpus_per_rank=num_gpus,
        rank_bundles=rank_bundles,
    )
    return create_actor(
        entry_point.load(),
        name,
        config,
        num_gpus=num_gpus,
        resources=dict(template.resources.get(kind, {})),
        max_restarts=-1,
        **options,
    )


def create_actor(
    actor_class: type, name: str, config: Any, *, groups: dict[str, int] | None = None, **options: Any
) -> Any:
    """Start a named actor with so many threads in each concurrency group. Raises `ConfigError` if the name is taken."""
    import ray

    remote_class = ray.remote(concurrency_groups=groups or {})(actor_class)  # type: ignore[call-overload]

    # Actors share the machine's cores as processes do; Ray's CPU slots would only stand in the way.
    try:
        return remote_class.options(name=name, num_cpus=0, **options).remote(config)
    except ValueError as error:
        raise ConfigError(f"this Ray cluster runs a purefill service already: {error}") from error


def group_workers(num_prefill: int, num_decode: int) -> list[list[str]]:
    """Return the names of the workers that should share a host: each group has some of both kinds."""
    num_groups = min(num_prefill, num_decode)
    return [
        [f"decode-{i}" for i in range(group, num_decode, num_groups)]
        + [f"prefill-{i}" for i in range(group, num_prefill, num_groups)]
        for group in range(num_groups)
    ]


def place_workers(num_prefill: int, num_decode: int, num_gpus: float) -> dict[str, Any]:
    """Reserve places in the cluster, and return Ray's scheduling strategy of each worker by name.

    Workers of one group come to one host where they fit (a placement group that packs). On a single host, and for
    groups that the cluster cannot hold, nothing is reserved, and Ray chooses.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    if sum(bool(node["Alive"]) for node in nodes) < 2:
        return {}
    resources = {"GPU": num_gpus} if num_gpus else {"CPU": 1.0}
    strategies: dict[str, Any] = {}
    for names in group_workers(num_prefill, num_decode):
        group = placement_group([dict(resources) for _ in names], strategy="PACK")
        if not group.wait(_PLACEMENT_TIMEOUT_S):
            remove_placement_group(group)
            continue
        for index, name in enumerate(names):
            strategies[name] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return strategies
