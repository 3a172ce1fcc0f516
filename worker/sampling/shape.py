"""Choosing tokens from logits that penalties, biases, min-p and grammars have changed first.

The order is vLLM's: banned tokens and bias, repetition, frequency and presence penalty, the grammar's mask,
temperature, min-p, top-k, top-p. Slots without such settings choose exactly as in `worker.sampling.choose`.
"""

from __future__ import annotations

import torch

from graphs.layout import BatchInputs
from graphs.shaping import ShapingInputs
from worker.sampling.choose import ban, draw_or_best, heat, keep_top


def choose_shaped(logits: torch.Tensor, inputs: BatchInputs) -> torch.Tensor:
    """Like `choose_sampled`, from shaped logits."""
    logits = _shape(logits.float(), inputs)
    return draw_or_best(_keep_likely(heat(logits, inputs), _shaping(inputs).min_p), logits, inputs)


def choose_shaped_filtered(logits: torch.Tensor, inputs: BatchInputs) -> torch.Tensor:
    """Like `choose_filtered`, from shaped logits."""
    logits = _shape(logits.float(), inputs)
    likely = _keep_likely(heat(logits, inputs), _shaping(inputs).min_p)
    return draw_or_best(keep_top(likely, inputs.top_k, inputs.top_p), logits, inputs)


def _shaping(inputs: BatchInputs) -> ShapingInputs:
    assert inputs.shaping is not None
    return inputs.shaping


def _shape(logits: torch.Tensor, inputs: BatchInputs) -> torch.Tensor:
    """Return float32 logits ``[S, vocab]`` after all settings that also matter to greedy choice."""
    shaping = _shaping(inputs)
    logits = _add_bias(ban(logits, inputs.banned_ids), shaping)
    logits = _penalise(logits, inputs, shaping)
    return logits.masked_fill(~_allowed(shaping, logits.shape[1]), float("-inf"))


def _add_bias(logits: torch.Tensor, shaping: ShapingInputs) -> torch.Tensor:
    """Add each slot's biases; id -1 stands for none."""
    vocab_size = logits.shape[1]
    # A spare column takes the writes of id -1, as in `ban`.
    index = torch.where(shaping.bias_ids >= 0, shaping.bias_ids, vocab_size).long()
    padded = torch.nn.functional.pad(logits, (0, 1)).scatter_add(1, index, shaping.bias_values)
    return padded[:, :vocab_size]


def _penalise(logits: torch.Tensor, inputs: BatchInputs, shaping: ShapingInputs) -> torch.Tensor:
    """Apply repetition, frequency and presence penalties."""
    seen, counts = _count_tokens(inputs, shaping, logits.shape)
    repetition = shaping.repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    logits = logits - shaping.frequency.unsqueeze(1) * counts
    return logits - shaping.presence.unsqueeze(1) * (counts > 0)


def _count_tokens(
    inputs: BatchInputs, shaping: ShapingInputs, shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether prompt or output holds each token, bool ``[S, vocab]``, and how often the output does, int32.

    The tokens are those of the history, and those that the pass itself computes.
    """
    num_slots, vocab_size = shape
    old_slot, old_place = _locate(shaping.starts, shaping.history.shape[0])
    new_slot, new_place = _locate(inputs.query_starts, inputs.token_ids.shape[0])
    new_place = new_place + inputs.num_cached[new_slot.clamp(max=num_slots - 1)]
    slot, place = torch.cat((old_slot, new_slot)), torch.cat((old_place, new_place))
    token = torch.cat((shaping.history, inputs.token_ids)).long()
    is_output = place >= shaping.num_prompt[slot.clamp(max=num_slots - 1)]
    # One spare element takes what belongs to no slot.
    spare = num_slots * vocab_size
    index = torch.where(slot < num_slots, slot * vocab_size + token, spare)
    seen = torch.zeros(spare + 1, dtype=torch.bool, device=token.device).scatter_(0, index, True)
    counts = torch.zeros(spare + 1, dtype=torch.int32, device=token.device)
    counts.scatter_add_(0, index, is_output.int())
    return seen[:spare].view(shape), counts[:spare].view(shape)


def _locate(starts: torch.Tensor, num_items: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slot of each of `num_items` that lie slot by slot, and its place within; slot S is none.

    `starts` are the S + 1 places where the slots begin and the last one ends.
    """
    index = torch.arange(num_items, dtype=torch.int32, device=starts.device)
    slot = torch.searchsorted(starts[1:].contiguous(), index, right=True)
    return slot, index - starts[slot.clamp(max=starts.shape[0] - 2)]


def _allowed(shaping: ShapingInputs, vocab_size: int) -> torch.Tensor:
    """Return which tokens the grammars allow, bool ``[S, vocab]``."""
    bit = torch.arange(32, dtype=torch.int32, device=shaping.mask.device)
    bits = (shaping.mask.unsqueeze(2) >> bit) & 1
    return (bits.flatten(1)[:, :vocab_size] == 1) | (shaping.is_masked == 0).unsqueeze(1)


def _keep_likely(heated: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return logits with every token less likely than `min_p` ``[S]`` times the likeliest at minus infinity."""
    least = heated.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(1)
    return heated.masked_fill(heated < least, float("-inf"))
