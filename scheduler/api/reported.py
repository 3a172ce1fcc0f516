"""How much one answer may report of a request's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.api.params import GenerationParams
from scheduler.errors import InvalidRequestError

MAX_REPORTED_LOGPROBS = 2**20
"""In one answer, which is in memory as a whole: some 200 MB."""


def check_reported(body: GenerationParams, prompt_lengths: Sequence[int], max_model_len: int) -> None:
    """Raise InvalidRequestError if the answer would hold too many logprobs. Those of a stream's tokens are not kept.

    `prompt_lengths`: tokens of each prompt.
    """
    of_prompt, of_output = body.prompt_logprobs, body.num_top_logprobs
    if of_prompt is None and of_output is None:
        return
    asked = body.default_max_tokens if body.asked_max_tokens is None else body.asked_max_tokens
    wants_prompt = of_prompt is not None or body.wants_echo
    wants_output = of_output is not None and not body.stream
    num_tokens = sum(
        wants_prompt * length + wants_output * min(asked, max_model_len - length) for length in prompt_lengths
    )
    num = body.n * num_tokens * (max(of_prompt or 0, of_output or 0) + 1)
    if num > MAX_REPORTED_LOGPROBS:
        param = "logprobs" if of_prompt is None else "prompt_logprobs"
        raise InvalidRequestError(
            f"{param} must not ask for more than {MAX_REPORTED_LOGPROBS} logprobs in one answer, got {num}: tokens of "
            "all choices, times their likeliest ones and themselves",
            param=param,
        )
