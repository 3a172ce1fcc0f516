"""`purefill leave`: takes this node's workers out of service before the node goes."""

from __future__ import annotations

import logging

from scheduler.errors import ConfigError
from scheduler.messages import RAY_NAMESPACE, SCHEDULER_NAME


def leave_cluster(address: str, timeout_s: float) -> None:
    """Return once nothing is left at the workers of this node; what runs moves on after `timeout_s`.

    Raises `ConfigError` if there is no Ray node here. Where no service runs, there is nothing to leave.
    """
    import ray

    try:
        ray.init(address=address, namespace=RAY_NAMESPACE, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"Ray cannot be joined at {address}: {error}") from error
    try:
        scheduler = ray.get_actor(SCHEDULER_NAME)
    except ValueError:
        return
    ray.get(scheduler.leave_node.remote(ray.get_runtime_context().get_node_id(), timeout_s=timeout_s))
