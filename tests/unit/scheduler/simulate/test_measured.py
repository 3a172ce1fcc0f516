from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.errors import ConfigError
from scheduler.messages import DecodeWorkerInfo, ModelInfo, PoolHandle, PrefillWorkerInfo
from scheduler.simulate.fleet_costs import FleetCosts, read_costs
from scheduler.simulate.measured import measured_costs, without_hiccups, write_costs

MODEL = ModelInfo(
    name="tiny", max_model_len=512, vocab_size=9, eos_token_ids=(0,), dtype="float32", num_parameters=1
)


def of_workers(*, is_device_shared: bool = False) -> FleetCosts:
    pool = PoolHandle(
        decode_worker="decode-0",
        transport="shm",
        address="",
        incarnation=1,
        num_pages=65,
        page_size=32,
        size_bytes=1,
    )
    decode = DecodeWorkerInfo(
        name="decode-0",
        model=MODEL,
        pool=pool,
        max_num_seqs=4,
        device="cpu",
        load_seconds=1.0,
        weights_bytes=1,
        bucket_seconds={"4x4": 0.02, "2x2": 0.01},
    )
    prefill = PrefillWorkerInfo(
        name="prefill-0",
        model=MODEL,
        buckets=("16x8",),
        graph_bytes=1,
        uses_cuda_graphs=False,
        bucket_seconds={"64x8": 0.05, "16x8": 0.02},
        device="cpu",
        load_seconds=1.0,
        warmup_seconds=1.0,
    )
    return measured_costs(prefill, decode, is_device_shared=is_device_shared)


def test_what_workers_measured_is_read_again_from_the_file(tmp_path: Path) -> None:
    costs = of_workers(is_device_shared=True)
    write_costs(tmp_path / "costs.json", costs)
    assert read_costs(str(tmp_path / "costs.json")) == costs
    assert (costs.num_pages, costs.page_size, costs.max_model_len) == (64, 32, 512)
    assert costs.prefill([10], max_slots=8) == (0.02, 6)
    assert costs.step(3) == 0.02
    assert costs.shared_slowdown > 1
    assert costs.sources["decode_seconds_per_context_token"].startswith("not measured")


def test_a_small_batch_is_never_taken_to_last_longer_than_a_large_one() -> None:
    measured = {"128x8": 0.4, "64x8": 0.3, "32x8": 0.9, "16x8": 0.1}
    assert without_hiccups(measured) == {"16x8": 0.1, "32x8": 0.3, "64x8": 0.3, "128x8": 0.4}


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"write_cost_model: .* cannot be written"):
        write_costs(tmp_path, of_workers())
