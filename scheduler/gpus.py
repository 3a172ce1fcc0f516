"""How workers share GPUs. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

_RAY_STEPS = 10_000
"""Ray counts GPUs in steps of 0.0001."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """What each worker gets of a GPU."""

    gpus_per_worker: float
    """1, or a fraction where workers share GPUs."""
    workers_per_gpu: int
    """Most workers that run on one GPU."""
    pools_per_gpu: int
    """Most decode workers among them."""


def plan_gpus(num_gpus: int, *, prefill_workers: int, decode_workers: int) -> GpuPlan:
    """Share out `num_gpus` >= 1: a GPU for each worker, or equal parts if there are more workers.

    Ray fills one GPU before it takes the next, and decode workers are started first.
    """
    workers_per_gpu = math.ceil((prefill_workers + decode_workers) / num_gpus)
    return GpuPlan(
        gpus_per_worker=_RAY_STEPS // workers_per_gpu / _RAY_STEPS,
        workers_per_gpu=workers_per_gpu,
        pools_per_gpu=min(workers_per_gpu, decode_workers),
    )
