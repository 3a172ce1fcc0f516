"""How likely tokens were under the model's own softmax, and which were the likeliest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from graphs.programs import Report
from scheduler.messages import SamplingParams, TokenLogprobs

MAX_LOGPROBS = 20
"""Most of the likeliest tokens that are reported with one token."""


def make_report(vocab_size: int) -> Report:
    """Return the report of batches with logprobs: the chosen token's logprob, the likeliest tokens, theirs."""
    count = min(MAX_LOGPROBS, vocab_size)
    return Report(width=1 + 2 * count, compute=partial(_report, count=count))


def _report(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Return int32 ``[S, 1 + 2 count]``; logprobs are float32, bit by bit."""
    logits = logits.float()
    logprobs = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = logprobs.gather(1, tokens.unsqueeze(1))
    top = _likeliest(logits, count)
    return torch.cat((chosen.view(torch.int32), top.int(), logprobs.gather(1, top).view(torch.int32)), dim=1)


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` tokens of the largest logits, ``[S, count]`` int64, the first of equals first.

    Equals are common in 16 bits, and which of them `topk` finds is not said. So it is asked for the largest of
    integers that order as the logits do and differ by token.
    """
    vocab_size = logits.shape[1]
    # Adding zero makes +0 of -0. Of negative floats, the bits below the sign grow the other way.
    bits = (logits + 0.0).view(torch.int32)
    order = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    token = torch.arange(vocab_size, device=logits.device)
    keys = (order << 32) + (vocab_size - token)
    return vocab_size - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)


def read_report(row: NDArray[np.int32], token_id: int, num_top: int) -> TokenLogprobs:
    """Return what one row of a report says of `token_id` and `num_top` of the likeliest."""
    count = (len(row) - 1) // 2
    values = row.view(np.float32)
    ids = row[1 : 1 + min(num_top, count)].tolist()
    logprobs = values[1 + count : 1 + count + len(ids)].tolist()
    return TokenLogprobs(
        token_id=token_id, logprob=float(values[0]), top=tuple(zip(ids, logprobs, strict=True))
    )


def read_logprobs(
    sampling: SamplingParams, row: NDArray[np.int32] | None, token_id: int
) -> TokenLogprobs | None:
    """Return what a row of a batch's report says of a sequence's token, if its request wants to know."""
    if row is None or sampling.num_logprobs is None:
        return None
    return read_report(row, token_id, sampling.num_logprobs)


def read_prompt_report(
    rows: NDArray[np.int32], prompt: Sequence[int], num_top: int
) -> tuple[TokenLogprobs | None, ...]:
    """Return the logprobs of a prompt: ``rows[i]`` is of the token after ``prompt[i]``."""
    return (None, *(read_report(row, token, num_top) for row, token in zip(rows, prompt[1:], strict=True)))
