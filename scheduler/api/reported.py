"""How much one answer may report of a request's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.api.prompts import GenerationRequest
from scheduler.errors import InvalidRequestError
from scheduler.messages import Request

MAX_REPORTED_LOGPROBS = 2**20
"""In one answer, which is in memory as a whole: some 200 MB."""


def check_reported(body: GenerationRequest, requests: Sequence[Request]) -> None:
    """Raise InvalidRequestError if the answer would hold too many logprobs. Those of a stream's tokens are not kept."""
    num = 0
    for request in requests:
        sampling = request.sampling
        if sampling.num_logprobs is not None:
            num_tokens = len(request.prompt_token_ids) if sampling.prompt_logprobs else 0
            if body.num_top_logprobs is not None and not body.stream:
                num_tokens += sampling.max_tokens
            num += num_tokens * (sampling.num_logprobs + 1)
    if num > MAX_REPORTED_LOGPROBS:
        param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequestError(
            f"{param} must not ask for more than {MAX_REPORTED_LOGPROBS} logprobs in one answer, got {num}: tokens of "
            "all choices, times their likeliest ones and themselves",
            param=param,
        )
