"""The ranks of a worker as Ray actors. Rank 0 is the worker's own actor, which starts the others when it loads.

The others have no names and are not started again by Ray: they end with rank 0, and rank 0 ends with any of them. When
Ray has started rank 0 again, that starts new ones. So nobody else need know of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from scheduler.errors import ConfigError
from scheduler.messages import WorkerConfig
from worker.failures import end_process

if TYPE_CHECKING:
    from worker.model import Model
    from worker.parallel.link import Meeting


class ShardFollower:
    """A rank other than 0 of a worker."""

    # torch and the model are imported in `run`, for the reason given in prefill_actor.

    def __init__(self, config: WorkerConfig, rank: int) -> None:
        self._config = config
        self._name = f"{config.name} rank {rank}"
        self._rank = rank

    def __repr__(self) -> str:
        return f"ShardFollower({self._name}, {self._config.model_name})"

    def run(self, meeting: Meeting) -> None:
        """Follow rank 0 until it is gone, and end this process; an error ends it too, and with it rank 0."""
        from worker.parallel.follower import follow

        try:
            follow(self._config, meeting, self._rank)
        except Exception as error:
            end_process(self._name, error)


def load(config: WorkerConfig) -> Model:
    """Load the model of a worker, in its other ranks too. Raises `ConfigError` if it cannot be served."""
    from worker import startup

    if config.tensor_parallel_size == 1:
        return startup.load(config)
    import torch

    from worker.parallel.group import lead_group

    group = lead_group(
        config.tensor_parallel_size,
        torch.device(startup.choose_device(config.device)),
        partial(_start, config),
        partial(end_process, config.name),
    )
    try:
        return startup.load(config, group)
    except ConfigError:
        # This process lives on, to say so.
        group.close()
        raise


def _start(config: WorkerConfig, rank: int, meeting: Meeting) -> Any:
    """Start the actor of a rank; return what must be kept for it to live."""
    strategy: Any = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    if config.rank_bundles:
        placement: PlacementGroup | None = ray.util.get_current_placement_group()
        assert placement is not None, "rank 0 is in a placement group"
        strategy = PlacementGroupSchedulingStrategy(
            placement, placement_group_bundle_index=config.rank_bundles[rank]
        )
    remote_class: Any = ray.remote(ShardFollower)
    actor = remote_class.options(
        num_cpus=0, num_gpus=config.gpus_per_rank, scheduling_strategy=strategy
    ).remote(config, rank)
    return actor, actor.run.remote(meeting)
