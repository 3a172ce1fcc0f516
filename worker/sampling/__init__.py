"""Choosing the next token, and saying how likely it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from graphs.layout import BatchInputs, SlotInput
from worker.sampling.choose import MIN_TEMPERATURE, choose_filtered, choose_greedy, choose_sampled
from worker.sampling.shape import choose_shaped, choose_shaped_filtered

CHOICES: Mapping[str, Callable[[torch.Tensor, BatchInputs], torch.Tensor]] = {
    "greedy": choose_greedy,
    "sampled": choose_sampled,
    "filtered": choose_filtered,
    "shaped": choose_shaped,
    "shaped_filtered": choose_shaped_filtered,
}
"""Ways to choose tokens. None of them waits for the device or has a shape that depends on values, so each can be
captured."""
COMPILABLE_CHOICES = frozenset({"greedy", "sampled"})
"""Those that inductor makes faster. Most of the filtered ones is a sort, and inductor fails at its cumulative sum.
`choose_shaped` would gain too, but is compiled anew for every bucket, and its searchsorted comes out wrong."""


def needed_choice(slots: Sequence[SlotInput]) -> str:
    """Return which of `CHOICES` a batch needs: the cheapest that does what its settings ask."""
    shaped = any(slot.shaping is not None for slot in slots)
    sampled = [slot for slot in slots if slot.temperature >= MIN_TEMPERATURE]
    if any(slot.top_k > 0 or slot.top_p < 1 for slot in sampled):
        return "shaped_filtered" if shaped else "filtered"
    if shaped:
        return "shaped"
    return "sampled" if sampled else "greedy"
