"""Choosing the next token. All slots at once, each with its own settings and its own random stream.

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

_MIN_TEMPERATURE = 1e-5
"""Below this a draw is greedy in all but name, and dividing by it would overflow."""


def choose_tokens(logits: torch.Tensor, inputs: BatchInputs) -> torch.Tensor:
    """Return the chosen token of each slot, ``[S]`` int64, from `logits`, ``[S, vocab]`` of any float type.

    Temperature 0, or next to it, is greedy; otherwise top-k, then top-p, as in transformers, then one draw.
    """
    logits = _ban(logits.float(), inputs.banned_ids)
    greedy = logits.argmax(dim=-1)
    sampled = inputs.temperature >= _MIN_TEMPERATURE
    if not bool(sampled.any()):
        return greedy
    temperature = torch.where(sampled, inputs.temperature, 1.0).unsqueeze(1)
    probs = torch.softmax(_filter(logits / temperature, inputs.top_k, inputs.top_p), dim=-1)
    # Exponential race: argmax(p / e) with e ~ Exp(1) draws from p, and needs no sum over the vocabulary.
    drawn = (probs / _exponential(inputs.seed, inputs.output_index, logits.shape[1])).argmax(dim=-1)
    return torch.where(sampled, drawn, greedy)


def _ban(logits: torch.Tensor, banned_ids: torch.Tensor) -> torch.Tensor:
    """Return logits with each slot's banned tokens at minus infinity; id -1 bans nothing."""
    vocab_size = logits.shape[1]
    # A spare column takes the writes of id -1, so that the shape never depends on how many are banned.
    padded = torch.nn.functional.pad(logits, (0, 1))
    index = torch.where(banned_ids >= 0, banned_ids, vocab_size).long()
    return padded.scatter(1, index, float("-inf"))[:, :vocab_size]


def _filter(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return logits with everything outside each slot's top-k and top-p at minus infinity."""
    if not bool(((top_k > 0) | (top_p < 1)).any()):
        return logits
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


def _exponential(seed: torch.Tensor, output_index: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return Exp(1) numbers ``[S, vocab]``, float32, the same for the same (seed, output index, token id)."""
    stream = _mix(seed + (output_index.long() + 1) * _GAMMA).unsqueeze(1)
    token = torch.arange(1, vocab_size + 1, device=seed.device).unsqueeze(0)
    # 23 bits and a half are exact in float32: with more, the largest number would round to 1, and its logarithm
    # be a zero to divide by.
    bits = (_mix(stream + token * _GAMMA) >> 41) & 0x7FFFFF
    uniform = (bits.float() + 0.5) * 2.0**-23
    return -torch.log(uniform)


def _mix(state: torch.Tensor) -> torch.Tensor:
    """Return the output function of splitmix64 of int64 `state`, element by element."""
    state = (state ^ ((state >> 30) & ((1 << 34) - 1))) * _MIX_1
    state = (state ^ ((state >> 27) & ((1 << 37) - 1))) * _MIX_2
    return state ^ ((state >> 31) & ((1 << 33) - 1))
