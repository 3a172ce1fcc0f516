"""What Ray reads from the environment, some of it as it is imported."""

from __future__ import annotations

import os

from scheduler.config import ServeConfig

_SECRETS = ("PUREFILL_API_KEYS", "PUREFILL_JOURNAL")


def set_ray_environment(config: ServeConfig) -> None:
    """Set Ray's variables for this service. Must be called before the first import of Ray.

    What the user has set stays, except for usage statistics, which have an option.
    """
    for name in _SECRETS:  # they have been read, and every process of Ray would have them too
        os.environ.pop(name, None)
    # Nothing is reported to anyone unless the user asks for it.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "1" if config.usage_stats else "0"
    if config.ray_address is None:
        # Ray's own ports let in whoever has its token. For an instance that nobody joins they need not be open to
        # others at all: told that it cannot form a cluster, Ray keeps to the loopback interface, on any system.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Prefill and decode compute on the same cores. By default an OpenMP thread that waits for the others spins,
    # and holds up the one that it waits for: five times slower, measured with both busy on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Ray starts its workers at niceness 15: anything else on the machine would be served before requests are.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Of lines that differ in numbers only, as those of two requests, Ray would show the first.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
