from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from graphs.buckets import Bucket
from graphs.layout import BatchInputs, BatchLayout, HostBatch, SlotInput
from worker.sampling import CHOICES, needed_choice

VOCAB_SIZE = 50
GREEDY = SlotInput(token_ids=(0,), num_cached=0, page_ids=(1,))


def inputs_of(slots: list[SlotInput], num_slots: int | None = None) -> BatchInputs:
    num_slots = num_slots or len(slots)
    layout = BatchLayout(bucket=Bucket(num_slots, num_slots), pages_per_slot=1, page_size=16)
    host = HostBatch(layout)
    host.pack(slots)
    return BatchInputs.of(layout, host.tensor)


def choose(logits: torch.Tensor, slots: list[SlotInput], num_slots: int | None = None) -> torch.Tensor:
    """Choose as a batch of these slots does."""
    return CHOICES[needed_choice(slots)](logits, inputs_of(slots, num_slots))


def random_logits(num_rows: int) -> torch.Tensor:
    return 2 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.6, 0, 1.0),
        (1.0, 5, 1.0),
        (1.3, 0, 0.7),
        (0.8, 12, 0.9),
        (1.0, 3, 0.2),
        (1.0, 500, 1.0),
    ],
)
def test_tokens_are_drawn_from_the_distribution_of_transformers_own_warpers(
    temperature: float, top_k: int, top_p: float
) -> None:
    num_draws = 20_000
    logits = random_logits(1)
    slots = [
        replace(GREEDY, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        for seed in range(num_draws)
    ]
    tokens = choose(logits.expand(num_draws, -1), slots)

    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    probs = torch.softmax(warpers(torch.zeros(1, 1, dtype=torch.int64), logits), dim=-1)[0]
    frequency = torch.bincount(tokens, minlength=VOCAB_SIZE) / num_draws
    assert (frequency[probs == 0] == 0).all()
    # Five standard deviations: the draws are the same in every run, so this either holds or it does not.
    assert ((frequency - probs).abs() <= 5 * (probs * (1 - probs) / num_draws).sqrt()).all()


def mixed_slots() -> list[SlotInput]:
    """Slots with every combination of settings next to each other."""
    return [
        replace(GREEDY, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, output_index=index)
        for seed, (temperature, top_k, top_p, index) in enumerate(
            (temperature, top_k, top_p, index)
            for temperature in (0.0, 0.7, 1.5)
            for top_k in (0, 4)
            for top_p in (0.5, 1.0)
            for index in (0, 3)
        )
    ]


def test_a_token_does_not_depend_on_what_else_is_in_the_batch() -> None:
    slots = mixed_slots()
    logits = random_logits(len(slots))
    together = choose(logits, slots)
    order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(2)).tolist()
    shuffled = choose(logits[order], [slots[i] for i in order])
    assert shuffled.tolist() == together[order].tolist()
    for i, slot in enumerate(slots):
        padded = torch.full((4, VOCAB_SIZE), float("nan"))
        padded[0] = logits[i]
        assert choose(padded, [slot], num_slots=4)[0] == together[i]


def test_temperature_zero_is_greedy_whatever_else_is_set() -> None:
    logits = random_logits(2)
    slots = [replace(GREEDY, top_k=3, top_p=0.1, seed=5), replace(GREEDY, temperature=1.0)]
    assert choose(logits, slots)[0] == logits[0].argmax()


def test_the_draw_follows_seed_and_output_index() -> None:
    num_draws = 64
    logits = torch.zeros(num_draws, VOCAB_SIZE)

    def draw(**settings: int) -> list[int]:
        slots = [
            replace(GREEDY, temperature=1.0, **{"seed": i, "output_index": i, **settings})
            for i in range(num_draws)
        ]
        return choose(logits, slots).tolist()

    assert draw() == draw()
    # One seed, many places in the output; one place, many seeds: both give many different tokens.
    assert len(set(draw(seed=2**62))) > 20
    assert len(set(draw(output_index=7))) > 20
    assert len(set(draw(seed=3, output_index=7))) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_never_chosen(temperature: float) -> None:
    logits = random_logits(1).expand(200, -1)
    best = logits[0].topk(3).indices.tolist()
    slots = [replace(GREEDY, temperature=temperature, seed=i, banned_ids=best) for i in range(200)]
    chosen = set(choose(logits, slots).tolist())
    assert not chosen & set(best)


def test_top_p_zero_keeps_the_most_probable_token() -> None:
    logits = random_logits(50)
    slots = [replace(GREEDY, temperature=1.0, top_p=0.0, seed=i) for i in range(50)]
    assert torch.equal(choose(logits, slots), logits.argmax(dim=-1))


@pytest.mark.parametrize(
    ("seed", "token_id"), [(2037251, 3), (3465117, 1), (6547939, 1), (11072529, 2)], ids=str
)
def test_the_largest_random_number_is_below_one(seed: int, token_id: int) -> None:
    """For these seeds the hash of a token is all ones. It must not win against the top-k of which it is not."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 10:20] = 1.0
    slots = [replace(GREEDY, temperature=1.0, top_k=10, seed=seed)]
    assert 10 <= int(choose(logits, slots)[0]) < 20
    # Where it may win, it does: its number is the largest of the race.
    slots = [replace(GREEDY, temperature=1.0, seed=seed)]
    assert int(choose(logits, slots)[0]) == token_id
