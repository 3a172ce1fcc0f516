"""Padding, poison and leases of the prefill engine, on a tiny random model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config

from graphs.layout import SCRATCH_PAGE
from scheduler.messages import DecodeStart, SamplingParams
from tests.unit.worker.tiny_models import SHAPE, Engines, LoadTiny, prompts_of
from worker.model import Model

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny(Qwen3Config(**SHAPE, head_dim=16))[0]


def first_tokens(engines: Engines, prompts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[int]:
    items = [engines.item(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    return [outcome.token_id for outcome in engines.run_prefill(items).outcomes]


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(max_tokens=4, temperature=1.5, seed=9, top_p=0.9)]
)
def test_a_prompts_token_is_the_same_in_any_batch_and_bucket(model: Model, sampling: SamplingParams) -> None:
    prompts = prompts_of(5, 17, 2, 30, 9, 12)
    alone = [first_tokens(Engines(model), [prompt], sampling)[0] for prompt in prompts]
    for capture_tokens, capture_slots in (((128,), (8,)), ((8, 16), (2,)), ((7,), (3,))):
        engines = Engines(model, capture_tokens=capture_tokens, capture_slots=capture_slots)
        assert first_tokens(engines, prompts, sampling) == alone
    assert len(set(alone)) > 3


def test_nan_in_pages_that_a_prompt_does_not_own_or_has_not_filled_changes_nothing(model: Model) -> None:
    prompts = prompts_of(5, 17, 40)
    expected = Engines(model).generate(prompts, GREEDY)
    engines = Engines(model)
    for layer in range(len(model.kv_spec.layers)):
        for part in engines.pool.layer(layer):
            part.fill_(math.nan)
    assert engines.generate(prompts, GREEDY) == expected


def test_pads_write_to_the_scratch_page_and_to_no_other(model: Model) -> None:
    engines = Engines(model, capture_tokens=(32,), capture_slots=(4,))
    keys, values = engines.pool.layer(0)
    for part in (keys, values):
        part.fill_(math.nan)
    item = engines.item("r", prompts_of(10)[0], GREEDY)
    result = engines.run_prefill([item])
    assert (result.num_tokens, result.padding_tokens) == (10, 22)
    for part in (keys, values):
        written = ~part.isnan().all(dim=(2, 3))  # [pages, page_size]
        pages, offsets = written.nonzero(as_tuple=True)
        own = {(page, offset) for page, offset in zip(pages.tolist(), offsets.tolist(), strict=True)}
        own -= {(SCRATCH_PAGE, offset) for offset in range(engines.pool.page_size)}
        first, second = item.lease.page_ids[:2]
        assert own == {(first, i) for i in range(8)} | {(second, i) for i in range(2)}


def test_replays_and_padding_are_counted(model: Model) -> None:
    engines = Engines(model, capture_tokens=(8, 32), capture_slots=(2,))
    items = [engines.item(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts_of(40, 3, 20))]
    result = engines.run_prefill(items)
    # 32 | 8 + 3 | 20: the second pass has two slots, the third prompt finds no place in it.
    assert dict(result.replays) == {"32x2": 3}
    assert result.num_tokens == 63
    assert result.padding_tokens == 21 + 12
    assert dict(result.eager_steps) == {}


def test_a_stale_lease_fails_alone(model: Model) -> None:
    prompts = prompts_of(6, 11)
    expected = first_tokens(Engines(model), prompts)
    engines = Engines(model)
    items = [engines.item(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    assert not engines.pool.claim([replace(items[0].lease, epoch=items[1].lease.epoch + 1)])
    before = [part.clone() for part in engines.pool.layer(0)]
    stale, fresh = engines.run_prefill(items).outcomes
    assert (stale.token_id, stale.error_label) == (None, "stale_lease")
    assert fresh.token_id == expected[1]
    for part, old in zip(engines.pool.layer(0), before, strict=True):
        assert torch.equal(part[list(items[0].lease.page_ids)], old[list(items[0].lease.page_ids)])


def test_a_request_computed_again_goes_on_where_it_was(model: Model) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=4)
    prompt = prompts_of(12)[0]
    (tokens,) = Engines(model).generate([prompt], sampling)
    engines = Engines(model)
    item = engines.item("r", prompt, sampling)
    again = replace(item, request=replace(item.request, output_token_ids=tuple(tokens[:3])))
    (outcome,) = engines.run_prefill([again]).outcomes
    assert outcome.token_id == tokens[3]


def test_an_item_that_cannot_be_computed_fails_alone(model: Model) -> None:
    """A token id that the model does not have raises in the middle of the pass that all share."""
    prompts = prompts_of(6, 11)
    expected = first_tokens(Engines(model), prompts)
    engines = Engines(model)
    items = [engines.item(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    bad = engines.item("bad", [1, 10**6, 2], GREEDY)
    outcomes = engines.run_prefill([items[0], bad, items[1]]).outcomes
    assert [outcome.request_id for outcome in outcomes] == ["r0", "bad", "r1"]
    assert [outcomes[0].token_id, outcomes[2].token_id] == expected
    assert (outcomes[1].token_id, outcomes[1].error_label) == (None, "worker_failed")


def test_tokens_are_the_same_with_several_batches_in_flight(model: Model) -> None:
    prompts = prompts_of(*range(3, 15))
    expected: list[int | None] = [*first_tokens(Engines(model), prompts)]
    engines = Engines(model)
    pipeline = engines.pipeline()
    items = [engines.item(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    items[5] = engines.item("bad", [1, 10**6, 2], GREEDY)
    assert not engines.pool.claim([replace(items[8].lease, epoch=100)])
    answers = [pipeline.submit(engines.batch(items[i : i + 2])) for i in range(0, len(items), 2)]
    outcomes = [outcome for answer in answers for outcome in answer.result(60).outcomes]
    assert [outcome.request_id for outcome in outcomes] == [item.request.request_id for item in items]
    assert [outcomes[i].error_label for i in (5, 8)] == ["worker_failed", "stale_lease"]
    expected[5] = expected[8] = None
    assert [outcome.token_id for outcome in outcomes] == expected


def test_a_batch_for_a_decode_worker_that_is_gone_is_refused(model: Model) -> None:
    engines = Engines(model)
    item = engines.item("r", prompts_of(6)[0], GREEDY)
    engines.prefill.detach("decode-0")
    (outcome,) = engines.run_prefill([item]).outcomes
    assert outcome.error_label == "stale_lease"


def test_after_a_reset_and_a_fence_only_newer_leases_count(model: Model) -> None:
    prompt = prompts_of(12)[0]
    (expected,) = Engines(model).generate([prompt], GREEDY)
    engines = Engines(model)
    old = engines.item("old", prompt, GREEDY)
    (outcome,) = engines.run_prefill([old]).outcomes
    start = DecodeStart(request=old.request, lease=old.lease, first_token_id=outcome.token_id or 0)
    engines.decode.add(start)
    engines.decode.step()
    engines.decode.reset()
    engines.pool.fence(old.lease.epoch + 1)
    assert not engines.decode.has_work
    engines.decode.add(start)  # a message of the scheduler that died
    assert engines.decode.step().events == []
    (late,) = engines.run_prefill([old]).outcomes
    assert late.error_label == "stale_lease"
    engines.item("skips an epoch", prompt, GREEDY)
    assert engines.generate([prompt], GREEDY) == [expected]
