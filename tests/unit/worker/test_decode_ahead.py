"""Steps that are launched before the last one's tokens are known, on a tiny random model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import Qwen3Config

from scheduler.messages import DecodeStart, SamplingParams, SequenceRef
from tests.unit.worker.tiny_models import SHAPE, Engines, LoadTiny, prompts_of
from worker.model import Model

SAMPLINGS = [
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(max_tokens=9, temperature=1.2, seed=5, top_k=40),
]


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny(Qwen3Config(**SHAPE, head_dim=16))[0]


class Decoding:
    """Prefilled sequences that join, one of them after each step; what was reported of them."""

    def __init__(self, model: Model, samplings: list[SamplingParams], *, looks_ahead: bool) -> None:
        self.engine = (engines := Engines(model, looks_ahead=looks_ahead)).decode
        prompts = prompts_of(*range(3, 3 + len(samplings)))
        items = [engines.item(str(i), p, s) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True))]
        outcomes = [engines.run_prefill([item]).outcomes[0] for item in items]
        self.tokens: dict[str, list[int | None]] = {o.request_id: [o.token_id] for o in outcomes}
        self.refs = [SequenceRef(request_id=i.request.request_id, epoch=i.lease.epoch) for i in items]
        self.waiting = [
            DecodeStart(request=item.request, lease=item.lease, first_token_id=outcome.token_id or 0)
            for item, outcome in zip(items, outcomes, strict=True)
        ]
        self.released: list[SequenceRef] = []

    def step(self) -> None:
        outcome = self.engine.step()
        for _, event in outcome.events:
            assert event.index == len(self.tokens[event.request_id])
            assert event.request_id not in {ref.request_id for ref in self.released}
            self.tokens[event.request_id].append(event.token_id)
        self.released += outcome.released

    def run(self) -> None:
        while self.waiting or self.engine.has_work:
            if self.waiting:
                self.engine.add(self.waiting.pop(0))
            self.step()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_tokens_are_the_same_as_step_by_step(model: Model, sampling: SamplingParams) -> None:
    # Six sequences of different lengths in four places.
    samplings = [replace(sampling, max_tokens=n) for n in (9, 2, 5, 9, 1 + 1, 7)]
    expected = Decoding(model, samplings, looks_ahead=False)
    expected.run()
    decoding = Decoding(model, samplings, looks_ahead=True)
    decoding.run()
    assert decoding.tokens == expected.tokens
    assert [len(tokens) for tokens in decoding.tokens.values()] == [9, 2, 5, 9, 2, 7]
    assert sorted(decoding.released, key=str) == sorted(decoding.refs, key=str)


def test_a_sequence_that_stops_is_released_after_the_step_it_was_still_part_of(model: Model) -> None:
    sampling = SAMPLINGS[1]
    alone = Decoding(model, [sampling], looks_ahead=False)
    alone.run()
    tokens = alone.tokens["0"]
    num_tokens = next(i for i in range(2, 9) if tokens[i] not in tokens[:i]) + 1
    stop = tokens[num_tokens - 1]
    assert stop is not None
    decoding = Decoding(model, [replace(sampling, stop_token_ids=(stop,)), sampling], looks_ahead=True)
    decoding.engine.add(decoding.waiting.pop(0))
    while len(decoding.tokens["0"]) < num_tokens:
        assert decoding.released == []
        decoding.step()
    # Its next step is under way: what it writes must not meet the pages' next owner.
    assert decoding.released == []
    assert decoding.engine.num_running == 0
    decoding.run()
    assert decoding.tokens["0"] == tokens[:num_tokens]
    assert len(decoding.tokens["1"]) == 9
    assert sorted(decoding.released, key=str) == sorted(decoding.refs, key=str)


def test_a_cancelled_sequence_is_released_once_its_step_is_back(model: Model) -> None:
    decoding = Decoding(model, [SAMPLINGS[0]] * 2, looks_ahead=True)
    for _ in range(2):
        decoding.engine.add(decoding.waiting.pop(0))
    decoding.step()
    decoding.engine.cancel(decoding.refs[0])
    assert decoding.engine.has_work
    decoding.run()
    assert [len(tokens) for tokens in decoding.tokens.values()] == [2, 9]
    assert sorted(decoding.released, key=str) == sorted(decoding.refs, key=str)
