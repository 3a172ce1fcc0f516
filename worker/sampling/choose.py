"""Choosing tokens: the best one, or a draw. All slots at once, each with its own random stream.

The random number for a candidate token is a hash of (request seed, place in the output, token id), so it does
not depend on the batch, the slot or the worker: a request computed again chooses the same tokens.
"""

from __future__ import annotations

import torch

from graphs.layout import BatchInputs

# Constants of splitmix64 (Steele, Lea and Flood, 2014), as signed 64-bit numbers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

MIN_TEMPERATURE = 1e-5
"""Below this a draw is greedy in all but name, and dividing by it would overflow."""


def choose_greedy(logits: torch.Tensor, inputs: BatchInputs) -> torch.Tensor:
    """Return the best token of each slot, ``[S]`` int64, from `logits`, ``[S, vocab]`` of any float type."""
    return best(ban(logits.float(), inputs.banned_ids))


def choose_sampled(logits: torch.Tensor, inputs: BatchInputs) -> torch.Tensor:
    """Like `choose_greedy` where the temperature is 0 or next to it; draws from the whole vocabulary elsewhere."""
    logits = ban(logits.float(), inputs.banned_ids)
    return draw_or_best(heat(logits, inputs), logits, inputs)


def choose_filtered(logits: torch.Tensor, inputs: BatchInputs) -> torch.Tensor:
    """Like `choose_sampled`, but draws from each slot's top-k, then top-p, as transformers does."""
    logits = ban(logits.float(), inputs.banned_ids)
    return draw_or_best(keep_top(heat(logits, inputs), inputs.top_k, inputs.top_p), logits, inputs)


def draw_or_best(heated: torch.Tensor, logits: torch.Tensor, inputs: BatchInputs) -> torch.Tensor:
    """Draw a token from the softmax of `heated`, or take the best of `logits` where the temperature says so."""
    drawn = draw(heated, inputs)
    return torch.where(inputs.temperature >= MIN_TEMPERATURE, drawn, best(logits))


def _is_host(tensor: torch.Tensor) -> bool:
    """Whether this is computed on the CPU, now: what is compiled must not depend on values."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def best(scores: torch.Tensor) -> torch.Tensor:
    """Return the place of the largest score of each row of ``[S, vocab]``, the first of equals; ``[S]`` int64.

    In two steps, because a compiled argmax gives a whole row to one multiprocessor.
    """
    num_slots, vocab_size = scores.shape
    num_parts = next(parts for parts in (64, 32, 16, 8, 4, 2, 1) if vocab_size % parts == 0)
    parts = scores.view(num_slots, num_parts, -1)
    if _is_host(scores):
        # Maxima without their places take a seventh of the time there.
        part = parts.amax(dim=-1).argmax(dim=-1)
        place = parts[torch.arange(num_slots), part].argmax(dim=-1)
        return part * (vocab_size // num_parts) + place
    best, place = parts.max(dim=-1)
    part = best.argmax(dim=-1, keepdim=True)
    return (part * (vocab_size // num_parts) + place.gather(1, part)).squeeze(1)


def ban(logits: torch.Tensor, banned_ids: torch.Tensor) -> torch.Tensor:
    """Return logits with each slot's banned tokens at minus infinity; id -1 bans nothing.

    They may be the same tensor, where nothing is banned.
    """
    if _is_host(logits) and not bool((banned_ids >= 0).any()):
        return logits
    vocab_size = logits.shape[1]
    # A spare column takes the writes of id -1, so that the shape never depends on how many are banned.
    padded = torch.nn.functional.pad(logits, (0, 1))
    index = torch.where(banned_ids >= 0, banned_ids, vocab_size).long()
    return padded.scatter(1, index, float("-inf"))[:, :vocab_size].contiguous()


def heat(logits: torch.Tensor, inputs: BatchInputs) -> torch.Tensor:
    """Return logits divided by each slot's temperature; greedy slots as they are."""
    return logits / torch.where(inputs.temperature >= MIN_TEMPERATURE, inputs.temperature, 1.0).unsqueeze(1)


def draw(logits: torch.Tensor, inputs: BatchInputs) -> torch.Tensor:
    """Draw a token of each slot, ``[S]``, from the softmax of its logits."""
    # Gumbel-max: the largest of logit + Gumbel noise is a draw from the softmax, and needs no sum over the vocabulary.
    return best(logits + _gumbel(inputs.seed, inputs.output_index, logits.shape[1]))


def keep_top(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return logits with everything outside each slot's top-k and top-p at minus infinity."""
    vocab_size = logits.shape[1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=logits.device).unsqueeze(0)
    kept_by_k = torch.where(top_k > 0, top_k, vocab_size).unsqueeze(1)
    ordered = ordered.masked_fill(rank >= kept_by_k, float("-inf"))
    probs = torch.softmax(ordered, dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    # The most probable token always stays, also with top_p = 0.
    cut = (mass_before >= top_p.unsqueeze(1)) & (rank > 0) & (top_p.unsqueeze(1) < 1)
    ordered = ordered.masked_fill(cut, float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, ordered)


def _gumbel(seed: torch.Tensor, output_index: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return Gumbel noise ``[S, vocab]``, float32, the same for the same (seed, output index, token id)."""
    stream = _mix(seed + (output_index.long() + 1) * _GAMMA).unsqueeze(1)
    token = torch.arange(1, vocab_size + 1, device=seed.device).unsqueeze(0)
    # 23 bits and a half are exact in float32: with more, the largest number would round to 1, and its noise be
    # infinite.
    bits = (_mix(stream + token * _GAMMA) >> 41) & 0x7FFFFF
    uniform = (bits.float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _mix(state: torch.Tensor) -> torch.Tensor:
    """Return the output function of splitmix64 of int64 `state`, element by element."""
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * _MIX_1
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * _MIX_2
    return state ^ ((state >> 31) & ((1 << 33) - 1))
