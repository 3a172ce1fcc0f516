"""Captured prefill on a GPU, with tiny models in float32, so that tokens can be compared exactly.

The same at full size is in benchmarks/prefill_graphs.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from scheduler.messages import SamplingParams
from tests.unit.worker.tiny_models import FAMILIES, MAX_MODEL_LEN, PAGE_SIZE, Engines, own_tokens, prompts_of
from worker.model import Model, ModelSource, load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # torch and inductor warn of much that is not ours.
    pytest.mark.filterwarnings("default"),
]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def load(family: str, folder: Path) -> tuple[Model, PreTrainedModel]:
    torch.manual_seed(0)
    own = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32, attn_implementation="eager")
    own.save_pretrained(folder)
    source = ModelSource(
        name=family, folder=folder, dtype="float32", device="cuda", max_model_len=MAX_MODEL_LEN
    )
    return load_model(source), own.eval().to("cuda")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, PreTrainedModel]:
    return load("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("family", ["llama_biases", "mistral_window", "phi3", "gemma2", "gemma3"])
def test_greedy_tokens_are_those_of_transformers_generate(family: str, tmp_path: Path) -> None:
    model, own = load(family, tmp_path)
    prompts = prompts_of(1, 13, 70, 7, 24, 3)
    engines = Engines(model)
    assert engines.generate(prompts, GREEDY) == [own_tokens(own, prompt, 6) for prompt in prompts]
    result = engines.run_prefill([engines.item("r", prompts[1], GREEDY)])
    assert result.replays
    assert not result.eager_steps


def test_passes_without_graphs_give_the_same_and_are_counted(qwen: tuple[Model, PreTrainedModel]) -> None:
    model, own = qwen
    prompts = prompts_of(5, 70)
    engines = Engines(model, use_graphs=False)
    items = [engines.item(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    result = engines.run_prefill(items)
    assert [outcome.token_id for outcome in result.outcomes] == [own_tokens(own, p, 1)[0] for p in prompts]
    assert (result.replays, result.eager_steps) == ({}, {"disabled": 4})


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(max_tokens=1, temperature=1.5, seed=3),
        SamplingParams(max_tokens=1, temperature=1.5, seed=3, top_p=0.8, top_k=20),
    ],
)
def test_tokens_do_not_depend_on_batch_or_bucket(
    qwen: tuple[Model, PreTrainedModel], sampling: SamplingParams
) -> None:
    prompts = prompts_of(5, 17, 2, 30, 9, 12)

    def tokens(engines: Engines, batch: list[list[int]]) -> list[int | None]:
        items = [engines.item(str(i), prompt, sampling) for i, prompt in enumerate(batch)]
        return [outcome.token_id for outcome in engines.run_prefill(items).outcomes]

    engines = Engines(qwen[0], capture_tokens=(8, 64), capture_slots=(2, 8))
    alone = [tokens(engines, [prompt])[0] for prompt in prompts]
    assert tokens(engines, prompts) == alone
    assert len(set(alone)) > 3


def test_batches_under_way_do_not_disturb_each_other(qwen: tuple[Model, PreTrainedModel]) -> None:
    prompts = prompts_of(3, 8, 20, 31, 4, 5, 6, 7)
    engines = Engines(qwen[0])
    items = [engines.item(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    one_by_one = [engines.run_prefill([item]).outcomes[0].token_id for item in items]
    # More than there are staging buffers, some of them in one bucket, taken in another order.
    under_way = [engines.prefill.submit(engines.batch([item])) for item in items]
    late = [submitted.result().outcomes[0].token_id for submitted in reversed(under_way)]
    assert late == one_by_one[::-1]


def test_one_thread_starts_batches_while_another_takes_their_results(
    qwen: tuple[Model, PreTrainedModel],
) -> None:
    prompts = prompts_of(*(3 + i % 29 for i in range(40)))
    engines = Engines(qwen[0], num_pages=400)
    items = [engines.item(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    one_by_one = [engines.run_prefill([item]).outcomes[0].token_id for item in items]
    pipeline = engines.pipeline()
    answers = [pipeline.submit(engines.batch([item])) for item in items]
    results = [answer.result(60) for answer in answers]
    assert [result.outcomes[0].token_id for result in results] == one_by_one
    assert all(result.seconds >= 0 for result in results)


@pytest.fixture
def little_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**30) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("little_memory")
def test_the_ladder_shrinks_if_memory_does_not_suffice(
    qwen: tuple[Model, PreTrainedModel], caplog: pytest.LogCaptureFixture
) -> None:
    prompts = prompts_of(20, 30)
    with caplog.at_level(logging.WARNING):
        engines = Engines(qwen[0], capture_tokens=(32, 2**23), capture_slots=(2,))
    assert "8388608x2" in caplog.text
    items = [engines.item(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    result = engines.run_prefill(items)
    assert result.replays == {"32x2": 2}
    assert [o.token_id for o in result.outcomes] == [own_tokens(qwen[1], p, 1)[0] for p in prompts]


def test_many_replays_take_no_memory(qwen: tuple[Model, PreTrainedModel]) -> None:
    engines = Engines(qwen[0], capture_tokens=(8, 32, 64), capture_slots=(2, 4))
    items = [engines.item(str(i), p, GREEDY) for i, p in enumerate(prompts_of(3, 8, 20, 31, 44))]
    expected = [engines.run_prefill([item]).outcomes[0].token_id for item in items]
    before = torch.cuda.memory_reserved()
    for i in range(500):
        item = items[i % 5]
        assert engines.run_prefill([item]).outcomes[0].token_id == expected[i % 5]
    assert torch.cuda.memory_reserved() == before


def test_prompts_behind_cached_pages_are_one_replay(qwen: tuple[Model, PreTrainedModel]) -> None:
    model, own = qwen
    shared, *ends = prompts_of(64, 3, 7, 5)
    engines = Engines(model, capture_tokens=(16, 64), capture_slots=(4,))
    first = engines.item("first", shared, GREEDY)
    engines.run_prefill([first])
    cached = first.lease.page_ids[: len(shared) // PAGE_SIZE]
    items = []
    for i, end in enumerate(ends):
        item = engines.item(str(i), end, GREEDY)
        lease = replace(
            item.lease,
            page_ids=(*cached, *item.lease.page_ids),
            shared_epochs=(first.lease.epoch,) * len(cached),
        )
        items.append(
            replace(item, lease=lease, request=replace(item.request, prompt_token_ids=(*shared, *end)))
        )
    result = engines.run_prefill(items)
    assert (result.num_tokens, dict(result.replays)) == (15, {"16x4": 1})
    assert [outcome.num_cached_tokens for outcome in result.outcomes] == [64] * 3
    tokens = [outcome.token_id for outcome in result.outcomes]
    assert tokens == [own_tokens(own, [*shared, *end], 1)[0] for end in ends]
