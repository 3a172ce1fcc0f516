"""Workers of several ranks: which GPU each rank gets, and that all of them come to one host."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.config import ServeConfig
from scheduler.errors import ConfigError
from scheduler.gpus import GpuPlan

_RAY_STEPS = 10_000
"""Ray counts GPUs in steps of 0.0001."""
_PLACEMENT_TIMEOUT_S = 10.0
"""A placement group that the cluster cannot hold within this time is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Where the ranks of all workers go. A bundle is a GPU."""

    num_bundles: int
    gpus: GpuPlan
    """What each rank gets of a GPU."""
    bundles: Mapping[str, tuple[int, ...]]
    """Of each rank of a worker, by the worker's name."""


def plan_ranks(sizes: Mapping[str, int], num_gpus: int) -> RankPlan:
    """Share out `num_gpus` >= 1 to the ranks of workers, of which `sizes` says how many each has.

    No two ranks of a worker get the same GPU. Raises `ConfigError` if there are fewer GPUs than a worker has ranks.
    """
    largest = max(sizes.values())
    if largest > num_gpus:
        raise ConfigError(
            f"tensor_parallel_size must be <= {num_gpus}, the free GPUs that Ray sees, got {largest}"
        )
    num_bundles = min(num_gpus, sum(sizes.values()))
    bundles: dict[str, tuple[int, ...]] = {}
    counts, pools = [0] * num_bundles, [0] * num_bundles
    next_rank = 0
    # Decode workers first, as everywhere.
    for name in sorted(sizes, key=lambda name: not name.startswith("decode-")):
        bundles[name] = tuple((next_rank + rank) % num_bundles for rank in range(sizes[name]))
        next_rank += sizes[name]
        for bundle in bundles[name]:
            counts[bundle] += 1
            pools[bundle] += name.startswith("decode-")
    most = max(counts)
    return RankPlan(
        num_bundles=num_bundles,
        gpus=GpuPlan(
            gpus_per_worker=math.floor(_RAY_STEPS / most) / _RAY_STEPS,
            workers_per_gpu=most,
            pools_per_gpu=max(pools),
        ),
        bundles=bundles,
    )


def plan_groups(config: ServeConfig, num_gpus: int, *, num_nodes: int) -> RankPlan | None:
    """Return where the ranks of a service's workers go; None if nothing need be planned.

    That is so where workers are single processes, and for processes on the CPUs of one host, which share them all.
    """
    ranks = config.num_ranks
    if max(ranks.values()) == 1 or (num_gpus == 0 and num_nodes < 2):
        return None
    sizes = {f"decode-{i}": ranks["decode"] for i in range(config.decode_workers)}
    sizes |= {f"prefill-{i}": ranks["prefill"] for i in range(config.prefill_workers)}
    return plan_ranks(sizes, num_gpus or sum(sizes.values()))


def place_groups(plan: RankPlan, *, has_gpus: bool) -> dict[str, dict[str, Any]]:
    """Reserve GPUs of one host, or CPUs; return the options with which each worker is created, by name.

    Raises `ConfigError` if no host has them free.
    """
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    resource = "GPU" if has_gpus else "CPU"
    group = placement_group([{resource: 1.0} for _ in range(plan.num_bundles)], strategy="STRICT_PACK")
    if not group.wait(_PLACEMENT_TIMEOUT_S):
        remove_placement_group(group)
        raise ConfigError(
            f"tensor_parallel_size: no host of the Ray cluster has {plan.num_bundles} free {resource}s for all ranks"
        )
    return {
        name: {
            "rank_bundles": bundles,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundles[0]
            ),
        }
        for name, bundles in plan.bundles.items()
    }
