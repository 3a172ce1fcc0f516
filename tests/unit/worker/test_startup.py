from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from scheduler.errors import ConfigError
from scheduler.messages import WorkerConfig
from tests.unit.worker.tiny_models import MAX_MODEL_LEN, SHAPE, LoadTiny
from worker.model import Model
from worker.startup import (
    choose_cuda_kv_bytes,
    choose_device,
    choose_ladder,
    choose_num_pages,
    page_size,
    steady_count,
)

CONFIG = WorkerConfig(
    name="prefill-0",
    model_name="tiny",
    model_folder="",
    dtype="float32",
    device="cpu",
    load_format="auto",
    max_model_len=None,
    max_num_seqs=8,
    kv_memory_bytes=None,
    capture_tokens=None,
    max_capture_tokens=None,
    capture_slots=(4,),
    use_graphs=True,
    compile_cache_folder="",
    num_threads=1,
)


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny(LlamaConfig(**SHAPE))[0]


def test_configured_buckets_are_taken_as_they_are(model: Model) -> None:
    ladder = choose_ladder(model, replace(CONFIG, capture_tokens=(100, 7), max_capture_tokens=32))
    assert ladder.capture_tokens == (7, 100)
    assert ladder.capture_slots == (4,)


def test_the_ladder_ends_at_the_configured_tokens(model: Model) -> None:
    assert choose_ladder(model, replace(CONFIG, max_capture_tokens=100)).max_tokens == 100


def test_the_ladder_ends_where_all_slots_hold_a_whole_context(model: Model) -> None:
    assert choose_ladder(model, CONFIG).max_tokens == 4 * MAX_MODEL_LEN
    # Beyond that, at what a CPU computes in a reasonable time.
    assert choose_ladder(model, replace(CONFIG, capture_slots=(64,))).max_tokens == 512


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_is_refused_where_there_is_none() -> None:
    assert choose_device("auto") == choose_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="device must be cpu"):
        choose_device("cuda")


def test_a_gpu_is_left_what_its_other_workers_need(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    total = 100 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total - model.weights_bytes, total))

    def kv_bytes(**changes: int) -> int:
        return choose_cuda_kv_bytes(model, replace(CONFIG, **changes))

    alone = kv_bytes()
    beside_prefill = kv_bytes(workers_per_device=2)
    two_of_four = kv_bytes(workers_per_device=4, pools_per_device=2)
    # A context is 1 GiB, and one prefill worker's passes and weights are next to nothing here.
    assert 94 << 30 < alone < 96 << 30
    assert (1 << 30) + model.weights_bytes < alone - beside_prefill < (1 << 30) + (64 << 20)
    assert 45 << 30 < two_of_four < 46 << 30
    with pytest.raises(ConfigError, match="more GPUs"):
        kv_bytes(workers_per_device=120)


def test_a_little_more_or_less_free_memory_makes_a_pool_of_the_same_size() -> None:
    assert [steady_count(n) for n in (1, 100, 127, 12_950, 12_900, 12_800)] == [
        1,
        100,
        127,
        12_928,
        12_800,
        12_800,
    ]
    assert all(n - steady_count(n) <= n / 64 for n in range(1, 5000))


def test_the_configured_memory_is_that_of_all_ranks(model: Model) -> None:
    alone = replace(CONFIG, kv_memory_bytes=1 << 20)
    ranks = replace(alone, tensor_parallel_size=2)
    assert choose_num_pages(model, ranks) == choose_num_pages(model, alone) // 2


def test_too_little_memory_is_told_with_what_all_ranks_need(model: Model) -> None:
    least = 2 * model.kv_spec.pool_bytes(1, page_size(model))
    for num_ranks in (1, 2):
        config = replace(CONFIG, kv_memory_bytes=num_ranks * least, tensor_parallel_size=num_ranks)
        assert choose_num_pages(model, config) == 2
        too_little = num_ranks * least - 1
        with pytest.raises(ConfigError, match=f"must be >= {num_ranks * least} bytes, .*, got {too_little}$"):
            choose_num_pages(model, replace(config, kv_memory_bytes=too_little))
