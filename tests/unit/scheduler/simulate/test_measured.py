from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from scheduler.errors import ConfigError
from scheduler.messages import DecodeWorkerInfo, ModelInfo, PoolHandle, PrefillWorkerInfo
from scheduler.simulate.calibrate import Answer, Calibration, calibrate
from scheduler.simulate.fleet_costs import FleetCosts, read_costs
from scheduler.simulate.measured import measured_costs, without_hiccups, write_costs

MODEL = ModelInfo(
    name="tiny", max_model_len=512, vocab_size=9, eos_token_ids=(0,), dtype="float32", num_parameters=1
)


def of_workers(*, is_device_shared: bool = False, **changes: float) -> FleetCosts:
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
    calibration = Calibration(
        prefill_seconds={16: 0.03},
        step_seconds={2: 0.012},
        seconds_per_context_token=1e-6,
        attention_seconds_per_pair=1e-7,
        around_s=0.008,
        start_s=0.004,
    )
    return measured_costs(
        prefill,
        decode,
        replace(calibration, **changes),
        is_device_shared=is_device_shared,
        when=datetime(2026, 11, 30, tzinfo=UTC),
    )


def answer(*token_at_s: float, prefill_s: float = 0.0, sent_s: float = 0.0) -> Answer:
    timing = {"queued_s": 0.0, "held_s": 0.02, "prefill_s": prefill_s}
    return Answer(sent_s=sent_s, token_at_s={0: token_at_s}, timings=[timing])


def test_what_the_idle_service_took_wins_over_what_workers_measured_at_their_start(tmp_path: Path) -> None:
    costs = of_workers(is_device_shared=True)
    write_costs(tmp_path / "costs.json", costs)
    assert read_costs(str(tmp_path / "costs.json")) == costs
    assert (costs.num_pages, costs.page_size, costs.max_model_len) == (64, 32, 512)
    assert costs.prefill_seconds == {"16x8": 0.03, "64x8": pytest.approx(0.05 * 1.5)}
    assert costs.decode_seconds == {"2x2": 0.012, "4x4": pytest.approx(0.02 * 1.2)}
    assert costs.message_s == 0.002
    assert costs.http_s == pytest.approx(0.006)
    assert (costs.prefill_slowdown, costs.decode_slowdown) == (2.0, 2.0)
    assert costs.sources["prefill_slowdown"].startswith("not measured")
    assert not of_workers().is_device_shared
    assert "2026-11-30" in costs.sources["prefill_seconds"]


def test_times_of_a_shorter_way_than_a_message_are_none() -> None:
    assert of_workers(around_s=0.001).http_s == 0.0


def test_the_way_to_a_first_token_is_what_is_left_of_it() -> None:
    one = answer(1.1, 1.16, 1.21, 1.26, prefill_s=0.07, sent_s=1.0)
    assert one.first_token_s == pytest.approx(0.1)
    assert one.around_s == pytest.approx(0.01)
    assert one.first_gaps_s == [pytest.approx(0.06)]
    assert one.gaps_s == [pytest.approx(0.05), pytest.approx(0.05)]


def test_an_idle_service_is_asked_for_everything() -> None:
    def ask(num_prompts: int, num_tokens: int, max_tokens: int) -> Answer:
        prefill_s = 0.01 + 0.001 * num_prompts * num_tokens + 1e-6 * num_prompts * num_tokens**2 / 2
        step_s = 0.005 + 0.001 * num_prompts + 2e-6 * num_tokens
        first = 0.02 + 0.006 + prefill_s
        times = [first + (i > 0) * 0.004 + i * step_s for i in range(max_tokens)]
        return Answer(
            sent_s=0.0,
            token_at_s=dict.fromkeys(range(num_prompts), times),
            timings=[{"queued_s": 0.0, "held_s": 0.02, "prefill_s": prefill_s}] * num_prompts,
        )

    found = calibrate(
        ask,
        prefill_tokens=(16, 64, 8192),
        max_slots=8,
        step_sizes=(2, 8),
        max_model_len=512,
    )
    assert found.prefill_seconds == {
        16: pytest.approx(0.01 + 0.016 + 1e-6 * 8 * 2),
        64: pytest.approx(0.01 + 0.064 + 1e-6 * 8 * 32),
    }
    assert found.step_seconds == {2: pytest.approx(0.007 + 8e-6), 8: pytest.approx(0.013 + 8e-6)}
    assert found.attention_seconds_per_pair == pytest.approx(1e-6)
    assert found.around_s == pytest.approx(0.006)
    assert found.start_s == pytest.approx(0.004)


def test_a_small_batch_is_never_taken_to_last_longer_than_a_large_one() -> None:
    measured = {"128x8": 0.4, "64x8": 0.3, "32x8": 0.9, "16x8": 0.1}
    assert without_hiccups(measured) == {"16x8": 0.1, "32x8": 0.3, "64x8": 0.3, "128x8": 0.4}


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"write_cost_model: .* cannot be written"):
        write_costs(tmp_path, of_workers())
