from __future__ import annotations

import pytest

from scheduler.gpus import plan_gpus


@pytest.mark.parametrize(
    ("num_gpus", "prefill", "decode", "expected"),
    [
        (2, 1, 1, (1.0, 1, 1)),
        (8, 3, 2, (1.0, 1, 1)),
        (1, 1, 1, (0.5, 2, 1)),
        (1, 2, 1, (0.3333, 3, 1)),
        (2, 1, 2, (0.5, 2, 2)),
        (2, 6, 1, (0.25, 4, 1)),
    ],
)
def test_workers_share_gpus_in_equal_parts(
    num_gpus: int, prefill: int, decode: int, expected: tuple[float, int, int]
) -> None:
    plan = plan_gpus(num_gpus, prefill_workers=prefill, decode_workers=decode)
    assert (plan.gpus_per_worker, plan.workers_per_gpu, plan.pools_per_gpu) == expected
    assert (prefill + decode) * plan.gpus_per_worker <= num_gpus
