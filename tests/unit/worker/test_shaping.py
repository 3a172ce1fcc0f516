"""Penalties, bias and min-p against transformers' own processors, on the same logits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from graphs.buckets import Bucket
from graphs.layout import BatchInputs, BatchLayout, HostBatch, SlotInput
from graphs.shaping import ShapingBuffers, SlotShaping
from worker.sampling import CHOICES, needed_choice

VOCAB_SIZE = 50
PLAIN = SlotInput(token_ids=(0,), num_cached=0, page_ids=(1,))


class Choosing:
    """Chooses as a runner does: all batches go through one buffer, so that each finds what the last one left."""

    def __init__(self) -> None:
        self._buffers = ShapingBuffers(
            max_slots=5_000, vocab_size=VOCAB_SIZE, history_tokens=200_000, device=torch.device("cpu")
        )

    def __call__(self, logits: torch.Tensor, slots: list[SlotInput], num_slots: int = 0) -> torch.Tensor:
        num_slots = max(num_slots, len(slots))
        num_tokens = sum(len(slot.token_ids) for slot in slots) + num_slots - len(slots)
        layout = BatchLayout(bucket=Bucket(num_tokens, num_slots), pages_per_slot=1, page_size=16)
        host = HostBatch(layout)
        host.pack(slots)
        self._buffers.upload([slot.shaping for slot in slots], num_slots)
        inputs = BatchInputs.of(layout, host.tensor, self._buffers.inputs(num_slots))
        return CHOICES[needed_choice(slots)](logits, inputs)


@pytest.fixture
def choose() -> Choosing:
    return Choosing()


def slot_of(
    tokens: list[int], num_prompt: int, num_new: int, shaping: SlotShaping, **more: float
) -> SlotInput:
    """A pass over the last `num_new` of a sequence's tokens."""
    history = np.array(tokens[: len(tokens) - num_new], np.int32)
    return SlotInput(
        token_ids=tokens[len(tokens) - num_new :],
        num_cached=len(history),
        page_ids=(1,),
        shaping=replace(shaping, num_prompt=num_prompt, history=history),
        **more,  # type: ignore[arg-type]
    )


class OutputPenalties(LogitsProcessor):
    """Frequency and presence penalties by their definition; transformers has none."""

    def __init__(self, num_prompt: int, frequency: float, presence: float) -> None:
        self._num_prompt, self._frequency, self._presence = num_prompt, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, count in Counter(input_ids[0, self._num_prompt :].tolist()).items():
            scores[:, token] -= self._frequency * count + self._presence
        return scores


def reference(shaping: SlotShaping, num_prompt: int) -> LogitsProcessorList:
    processors = LogitsProcessorList()
    if len(shaping.bias_ids):
        bias = {(int(i),): float(v) for i, v in zip(shaping.bias_ids, shaping.bias_values, strict=True)}
        processors.append(SequenceBiasLogitsProcessor(bias))
    if shaping.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(shaping.repetition_penalty))
    processors.append(OutputPenalties(num_prompt, shaping.frequency_penalty, shaping.presence_penalty))
    return processors


SHAPINGS = {
    "repetition": SlotShaping(repetition_penalty=1.8),
    "repetition_below_one": SlotShaping(repetition_penalty=0.6),
    "frequency": SlotShaping(frequency_penalty=0.9),
    "frequency_negative": SlotShaping(frequency_penalty=-0.7),
    "presence": SlotShaping(presence_penalty=1.5),
    "bias": SlotShaping(bias_ids=(3, 7, 49), bias_values=(2.5, -100.0, 1.0)),
    "all": SlotShaping(
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=0.4,
        bias_ids=(0, 9),
        bias_values=(1.5, 3.0),
    ),
}


def random_batch(num_slots: int) -> tuple[torch.Tensor, list[tuple[list[int], int, int]]]:
    """Logits, and for each slot: its tokens, how many are prompt, and how many the pass computes."""
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(num_slots, VOCAB_SIZE, generator=generator)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    sequences = []
    for _ in range(num_slots):
        # Few different tokens, so that many come up several times.
        tokens = torch.randint(15, (draw(1, 40),), generator=generator).tolist()
        sequences.append((tokens, draw(1, len(tokens) + 1), draw(1, min(8, len(tokens)) + 1)))
    return logits, sequences


@pytest.mark.parametrize("name", SHAPINGS)
def test_the_best_token_is_that_of_transformers_processors(choose: Choosing, name: str) -> None:
    shaping = SHAPINGS[name]
    logits, sequences = random_batch(200)
    tokens = choose(logits, [slot_of(*sequence, shaping) for sequence in sequences])
    expected = [
        int(reference(shaping, num_prompt)(torch.tensor([ids]), row.unsqueeze(0).clone()).argmax())
        for row, (ids, num_prompt, _) in zip(logits, sequences, strict=True)
    ]
    assert tokens.tolist() == expected
    assert expected != logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    ("min_p", "temperature", "top_k", "top_p"),
    [(0.1, 1.0, 0, 1.0), (0.4, 1.7, 0, 1.0), (1.0, 1.0, 0, 1.0), (0.05, 1.4, 12, 0.9), (0.0, 0.9, 0, 0.8)],
)
def test_draws_follow_the_distribution_of_transformers_warpers(
    choose: Choosing, min_p: float, temperature: float, top_k: int, top_p: float
) -> None:
    num_draws = 5_000
    shaping = replace(SHAPINGS["all"], min_p=min_p)
    logits, ((ids, num_prompt, num_new),) = random_batch(1)
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    slot = slot_of(ids, num_prompt, num_new, shaping, **settings)
    slots = [replace(slot, seed=seed) for seed in range(num_draws)]
    tokens = choose(logits.expand(num_draws, -1), slots)

    warpers = reference(shaping, num_prompt)
    warpers += [TemperatureLogitsWarper(temperature), MinPLogitsWarper(min_p)]
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    probs = torch.softmax(warpers(torch.tensor([ids]), logits), dim=-1)[0]
    frequency = torch.bincount(tokens, minlength=VOCAB_SIZE) / num_draws
    assert (frequency[probs == 0] == 0).all()
    # Five standard deviations: the draws are the same in every run, so this either holds or it does not.
    assert ((frequency - probs).abs() <= 5 * (probs * (1 - probs) / num_draws).sqrt() + 1e-6).all()


def test_a_token_does_not_depend_on_what_else_is_in_the_batch(choose: Choosing) -> None:
    shapings = [*SHAPINGS.values(), replace(SHAPINGS["all"], min_p=0.3)]
    logits, sequences = random_batch(48)
    slots = []
    for i, sequence in enumerate(sequences):
        settings = {"temperature": (0.0, 0.8, 1.5)[i % 3], "top_p": (1.0, 0.7)[i % 2], "seed": i}
        slot = slot_of(*sequence, shapings[i % len(shapings)], **settings)
        slots.append(replace(slot, shaping=None) if i % 5 == 0 else slot)
    together = choose(logits, slots)
    order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(2)).tolist()
    assert choose(logits[order], [slots[i] for i in order]).tolist() == together[order].tolist()
    for i, slot in enumerate(slots):
        padded = torch.full((3, VOCAB_SIZE), float("nan"))
        padded[0] = logits[i]
        assert choose(padded, [slot], num_slots=3)[0] == together[i]


def test_only_tokens_that_the_mask_allows_are_chosen(choose: Choosing) -> None:
    allowed = [[4], [0, 31, 32, 49], [33]]
    slots = []
    for i, tokens in enumerate(allowed * 100):
        mask = np.zeros(2, np.uint32)
        for token in tokens:
            mask[token // 32] |= np.uint32(1 << token % 32)
        shaping = SlotShaping(allowed=mask.view(np.int32))
        slots.append(replace(PLAIN, shaping=shaping, temperature=i % 2 * 2.0, seed=i))
    slots.append(PLAIN)
    logits = random_batch(1)[0].expand(len(slots), -1)
    *tokens, plain = choose(logits, slots).tolist()
    for i, those in enumerate(allowed):
        assert set(tokens[i::3]) == set(those)
    assert plain == logits[0].argmax()


def test_banned_tokens_stay_banned_whatever_their_bias(choose: Choosing) -> None:
    shaping = SlotShaping(bias_ids=(5,), bias_values=(100.0,))
    logits = random_batch(1)[0]
    assert choose(logits, [replace(PLAIN, shaping=shaping)]) == 5
    assert choose(logits, [replace(PLAIN, shaping=shaping, banned_ids=(5,))]) != 5


def test_histories_beyond_the_buffer_are_refused() -> None:
    buffers = ShapingBuffers(max_slots=2, vocab_size=8, history_tokens=10, device=torch.device("cpu"))
    long = SlotShaping(history=np.zeros(6, np.int32))
    buffers.upload([long, None], 2)
    with pytest.raises(ValueError, match="<= 10 tokens a batch, got 12"):
        buffers.upload([long, long], 2)
