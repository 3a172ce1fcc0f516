from __future__ import annotations

import pytest

from scheduler.config import ServeConfig
from scheduler.errors import ConfigError
from scheduler.groups import plan_groups, plan_ranks


def test_each_rank_has_a_gpu_where_there_are_enough() -> None:
    plan = plan_ranks({"prefill-0": 2, "decode-0": 2, "decode-1": 1}, num_gpus=8)
    assert plan.bundles == {"decode-0": (0, 1), "decode-1": (2,), "prefill-0": (3, 4)}
    assert plan.num_bundles == 5
    assert (plan.gpus.gpus_per_worker, plan.gpus.workers_per_gpu, plan.gpus.pools_per_gpu) == (1.0, 1, 1)


@pytest.mark.parametrize("num_gpus", [2, 3])
def test_ranks_of_one_worker_never_share_a_gpu(num_gpus: int) -> None:
    plan = plan_ranks({"prefill-0": 2, "prefill-1": 1, "decode-0": 2}, num_gpus)
    assert all(len(set(bundles)) == len(bundles) for bundles in plan.bundles.values())
    used = [bundle for bundles in plan.bundles.values() for bundle in bundles]
    most = max(used.count(bundle) for bundle in range(plan.num_bundles))
    assert plan.gpus.workers_per_gpu == most
    assert most * plan.gpus.gpus_per_worker <= 1


def test_a_group_needs_a_gpu_for_each_rank() -> None:
    with pytest.raises(
        ConfigError, match="tensor_parallel_size must be <= 2, the free GPUs that Ray sees, got 4"
    ):
        plan_ranks({"prefill-0": 1, "decode-0": 4}, num_gpus=2)


def test_nothing_is_planned_for_single_processes_and_for_one_host_without_gpus() -> None:
    assert plan_groups(ServeConfig(), num_gpus=4, num_nodes=3) is None
    groups = ServeConfig(decode_tensor_parallel_size=2, prefill_workers=2)
    assert plan_groups(groups, num_gpus=0, num_nodes=1) is None
    for num_gpus, num_nodes in ((4, 1), (0, 2)):
        plan = plan_groups(groups, num_gpus, num_nodes=num_nodes)
        assert plan is not None
        assert plan.bundles == {"decode-0": (0, 1), "prefill-0": (2,), "prefill-1": (3,)}
