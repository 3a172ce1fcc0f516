"""Penalties and logprobs through prefill and decode, against transformers' own generate and log-softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config

from scheduler.messages import DecodeStart, PrefillItem, PrefillOutcome, SamplingParams, TokenLogprobs
from tests.unit.worker.tiny_models import SHAPE, VOCAB_SIZE, Engines, LoadTiny, prompts_of
from worker.model import Model

GREEDY = SamplingParams(max_tokens=10, temperature=0.0)
SHAPED = replace(
    GREEDY,
    repetition_penalty=1.2,
    presence_penalty=0.7,
    frequency_penalty=0.5,
    logit_bias=((5, 1.5), (77, -100.0)),
)
DRAWN = replace(SHAPED, temperature=1.3, min_p=0.02, top_p=0.95, seed=6)
Chosen = tuple[int, TokenLogprobs | None]


@pytest.fixture
def models(load_tiny: LoadTiny) -> tuple[Model, PreTrainedModel]:
    return load_tiny(Qwen3Config(**SHAPE, head_dim=16))


@pytest.fixture
def model(models: tuple[Model, PreTrainedModel]) -> Model:
    return models[0]


def run(engines: Engines, items: Sequence[PrefillItem]) -> tuple[list[PrefillOutcome], list[list[Chosen]]]:
    """Prefill items as one batch and decode them together; return all that was said of each."""
    outcomes = engines.run_prefill(items).outcomes
    chosen: dict[str, list[Chosen]] = {o.request_id: [] for o in outcomes}
    for item, outcome in zip(items, outcomes, strict=True):
        assert outcome.token_id is not None, outcome.error_message
        chosen[outcome.request_id].append((outcome.token_id, outcome.logprobs))
        if outcome.finish_reason is None:
            start = DecodeStart(request=item.request, lease=item.lease, first_token_id=outcome.token_id)
            engines.decode.add(start)
    while engines.decode.has_work:
        for _, event in engines.decode.step().events:
            assert event.token_id is not None, event.error_message
            chosen[event.request_id].append((event.token_id, event.logprobs))
    return list(outcomes), list(chosen.values())


def tokens_of(engines: Engines, items: Sequence[PrefillItem]) -> list[list[int]]:
    return [[token for token, _ in chosen] for chosen in run(engines, items)[1]]


def test_repetition_penalty_gives_the_tokens_of_transformers_generate(
    models: tuple[Model, PreTrainedModel],
) -> None:
    model, own = models
    # 70 tokens are three chunks.
    prompts = prompts_of(5, 70, 17, 1)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = own.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=10,
            do_sample=False,
            repetition_penalty=1.5,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(made[0, len(prompt) :].tolist())
    sampling = replace(GREEDY, repetition_penalty=1.5)
    assert Engines(model).generate(prompts, sampling) == expected
    assert Engines(model).generate(prompts, GREEDY) != expected


@pytest.mark.parametrize("sampling", [SHAPED, DRAWN], ids=["greedy", "drawn"])
def test_tokens_are_the_same_in_any_company(model: Model, sampling: SamplingParams) -> None:
    prompts = prompts_of(5, 40, 9)
    alone = [Engines(model).generate([prompt], sampling)[0] for prompt in prompts]
    plain = Engines(model).generate([prompts[0]], GREEDY)[0]
    engines = Engines(model, capture_tokens=(16, 64), capture_slots=(4,))
    items = [engines.item(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    items.append(engines.item("plain", prompts[0], GREEDY))
    assert tokens_of(engines, items) == [*alone, plain]
    assert alone[0] != plain


@pytest.mark.parametrize("sampling", [SHAPED, DRAWN], ids=["greedy", "drawn"])
def test_a_request_computed_again_goes_on_where_it_was(model: Model, sampling: SamplingParams) -> None:
    prompt = prompts_of(12)[0]
    (tokens,) = Engines(model).generate([prompt], sampling)
    engines = Engines(model)
    items = []
    for done in (1, 4, 9):
        item = engines.item(str(done), prompt, sampling)
        items.append(replace(item, request=replace(item.request, output_token_ids=tuple(tokens[:done]))))
    assert tokens_of(engines, items) == [tokens[1:], tokens[4:], tokens[9:]]


@torch.inference_mode()
def own_logprobs(own: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Transformers' log-softmax after each token, [T, V]."""
    return torch.log_softmax(own(torch.tensor([token_ids])).logits[0].float(), dim=-1)


def check(got: TokenLogprobs | None, token: int, expected: torch.Tensor, num_top: int) -> None:
    assert got is not None
    assert got.token_id == token
    assert got.logprob == pytest.approx(float(expected[token]), abs=1e-3)
    # Not the ids: two whose logprobs are next to equal may stand in either order.
    values = [logprob for _, logprob in got.top]
    assert values == pytest.approx(expected.topk(num_top).values.tolist(), abs=1e-3)
    assert values == pytest.approx([float(expected[i]) for i, _ in got.top], abs=1e-3)
    assert len({i for i, _ in got.top}) == num_top


@pytest.mark.parametrize("num_top", [0, 3, 20])
def test_logprobs_are_transformers_log_softmax_before_any_setting(
    models: tuple[Model, PreTrainedModel], num_top: int
) -> None:
    model, own = models
    prompts = prompts_of(5, 70, 1)
    engines = Engines(model)
    sampling = replace(DRAWN, num_logprobs=num_top, prompt_logprobs=True)
    items = [engines.item(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    items.append(engines.item("plain", prompts[0], GREEDY))
    outcomes, chosen = run(engines, items)
    assert outcomes[-1].prompt_logprobs is None
    assert all(logprobs is None for _, logprobs in chosen[-1])
    for prompt, outcome, pairs in zip(prompts, outcomes, chosen, strict=False):
        expected = own_logprobs(own, [*prompt, *(token for token, _ in pairs)])
        for i, (token, logprobs) in enumerate(pairs):
            check(logprobs, token, expected[len(prompt) - 1 + i], num_top)
        assert outcome.prompt_logprobs is not None
        first, *others = outcome.prompt_logprobs
        assert first is None
        for i, (token, logprobs) in enumerate(zip(prompt[1:], others, strict=True)):
            check(logprobs, token, expected[i], num_top)


def test_passes_for_prompt_logprobs_are_counted_and_change_nothing(model: Model) -> None:
    prompt = prompts_of(70)[0]
    expected = Engines(model).generate([prompt], DRAWN)
    engines = Engines(model)
    item = engines.item("r", prompt, replace(DRAWN, prompt_logprobs=True))
    result = engines.run_prefill([item])
    # 69 tokens have one to predict after them, and the largest bucket has 32.
    assert result.eager_steps == {"prompt_logprobs": 3}
    assert result.replays == {"32x2": 2, "8x2": 1}
    assert tokens_of(Engines(model), [item]) == expected
    # The first token was reported with the prompt's logprobs already.
    again = replace(item, request=replace(item.request, output_token_ids=tuple(expected[0][:2])))
    result = engines.run_prefill([again])
    assert result.eager_steps == {}
    assert result.outcomes[0].prompt_logprobs is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logit_bias": ((VOCAB_SIZE, 1.0),)}, "logit_bias must be of tokens >= 0 and < 128, got 128"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias must be of tokens >= 0 and < 128, got -1"),
        ({"logit_bias": tuple((i, 1.0) for i in range(301))}, "logit_bias must have at most 300 tokens"),
        ({"num_logprobs": 21}, "logprobs must be 0 to 20, got 21"),
        ({"min_tokens": 1, "stop_token_ids": (999,)}, "stop_token_ids must be of tokens"),
        ({"min_tokens": 1, "stop_token_ids": tuple(range(17))}, "stop_token_ids must be at most 16"),
    ],
)
def test_a_setting_that_cannot_be_computed_fails_its_request_alone(
    model: Model, settings: dict[str, object], message: str
) -> None:
    prompts = prompts_of(6, 11)
    engines = Engines(model)
    expected = engines.generate([prompts[1]], GREEDY)[0]
    wrong = replace(GREEDY, **settings)  # type: ignore[arg-type]
    items = [engines.item("wrong", prompts[0], wrong), engines.item("right", prompts[1], GREEDY)]
    failed, right = engines.run_prefill(items).outcomes
    assert (failed.token_id, failed.error_label) == (None, "invalid")
    assert message in (failed.error_message or "")
    assert right.token_id == expected[0]
    engines.decode.add(DecodeStart(request=items[0].request, lease=items[0].lease, first_token_id=1))
    engines.decode.add(
        DecodeStart(request=items[1].request, lease=items[1].lease, first_token_id=expected[0])
    )
    events = [event for _, event in engines.decode.step().events]
    assert [(e.request_id, e.error_label, e.token_id) for e in events] == [
        ("wrong", "invalid", None),
        ("right", None, expected[1]),
    ]
