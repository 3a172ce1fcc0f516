"""What the settings of one sequence must know of its tokens, and how its next pass is put together."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graphs.layout import MAX_BANNED_IDS, SlotInput
from graphs.shaping import MAX_LOGIT_BIAS, SlotShaping
from scheduler.errors import InvalidRequestError
from scheduler.messages import Request, SamplingParams
from scheduler.token_ids import TokenIds
from worker.grammar import GrammarMatcher, Grammars
from worker.sampling.logprobs import MAX_LOGPROBS

_HAS_WORDS_ORDER = sys.byteorder == "little"


class OutputState:
    """Follows the tokens of a sequence with penalties, biases, min-p or a grammar.

    The sequence's owner calls `accept` with each token as soon as the host has it. Without a grammar, a pass may be
    started when the token that it begins with is not known here yet: that one is taken from where the device put it.
    """

    def __init__(self, request: Request, matcher: GrammarMatcher | None = None) -> None:
        """`matcher` is at the beginning of the output. Raises `InvalidRequestError` if no token can follow."""
        sampling = request.sampling
        self._matcher = matcher
        self._num_outputs = len(request.output_token_ids)
        self._sampling = sampling
        self._num_prompt = len(request.prompt_token_ids)
        self._bias_ids = np.array([token for token, _ in sampling.logit_bias], np.int32)
        self._bias_values = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self._tokens: NDArray[np.int32] | None = None
        self._num_tokens = 0
        if _is_penalised(sampling):
            known = (*request.prompt_token_ids, *request.output_token_ids)
            self._tokens = np.empty(max(request.max_total_tokens, len(known)), np.int32)
            self._tokens[: len(known)] = known
            self._num_tokens = len(known)
        self._allowed: NDArray[np.int32] | None = None
        if matcher is not None:
            self._follow(matcher, request.output_token_ids)

    def accept(self, token_id: int) -> None:
        """Take note of the next token of the output, after which there will be another.

        Raises `InvalidRequestError` if no token can follow.
        """
        self._num_outputs += 1
        if self._tokens is not None:
            self._tokens[self._num_tokens] = token_id
            self._num_tokens += 1
        if self._matcher is not None:
            self._follow(self._matcher, (token_id,))

    def _follow(self, matcher: GrammarMatcher, token_ids: Sequence[int]) -> None:
        if token_ids:
            matcher.accept(token_ids)
        allowed = matcher.allowed()
        if self._num_outputs < self._sampling.min_tokens:
            longer = allowed.copy()
            bits = longer.view(np.uint32)
            for token in self._sampling.stop_token_ids:
                bits[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
            # What is complete ends, however short it is.
            allowed = longer if longer.any() else allowed
        self._allowed = allowed

    def shaping(self, num_cached: int) -> SlotShaping:
        """Return the shaping of a pass over what follows the first `num_cached` tokens."""
        sampling = self._sampling
        history = None
        if self._tokens is not None:
            assert num_cached <= self._num_tokens, "only the newest token may be missing"
            history = self._tokens[:num_cached]
        return SlotShaping(
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            bias_ids=self._bias_ids,
            bias_values=self._bias_values,
            num_prompt=self._num_prompt,
            history=history,
            allowed=self._allowed,
        )


def track(request: Request, grammars: Grammars, *, vocab_size: int) -> OutputState | None:
    """Return what must be known of a sequence's tokens, those in the request included; None if nothing.

    Raises `InvalidRequestError` that names the field if a setting is none that can be computed.
    """
    sampling = request.sampling
    _check(sampling, vocab_size)
    if sampling.grammar is not None:
        return OutputState(request, grammars.matcher(sampling.grammar))
    is_shaped = _is_penalised(sampling) or bool(sampling.logit_bias) or sampling.min_p > 0
    return OutputState(request) if is_shaped else None


def needs_host_tokens(sampling: SamplingParams) -> bool:
    """Return whether a step of such a sequence can be put together only when the token before is on the host."""
    return sampling.grammar is not None


def slot_input(
    request: Request,
    token_ids: Sequence[int],
    *,
    num_cached: int,
    page_ids: Sequence[int],
    output_index: int,
    state: OutputState | None = None,
) -> SlotInput:
    """Make the input of one sequence: `token_ids` after `num_cached` tokens, choosing output `output_index`.

    `state` is that of the sequence, if it has one and the pass's choice is wanted.
    """
    sampling = request.sampling
    # A grammar's mask has it in already, where the grammar lets the output go on.
    is_too_short = output_index < sampling.min_tokens and sampling.grammar is None
    return SlotInput(
        token_ids=token_ids,
        num_cached=num_cached,
        page_ids=page_ids,
        words=token_ids.words if _HAS_WORDS_ORDER and type(token_ids) is TokenIds else None,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        output_index=output_index,
        banned_ids=sampling.stop_token_ids if is_too_short else (),
        shaping=None if state is None else state.shaping(num_cached),
        reported=sampling.num_logprobs is not None,
    )


def _is_penalised(sampling: SamplingParams) -> bool:
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    return penalties != (0.0, 0.0, 1.0)


def _check(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidRequestError` for what would hurt the other sequences of a batch, or be ignored."""
    if sampling.min_tokens > 0:
        if len(sampling.stop_token_ids) > MAX_BANNED_IDS:
            raise InvalidRequestError(
                f"stop_token_ids must be at most {MAX_BANNED_IDS} with min_tokens > 0, "
                f"got {len(sampling.stop_token_ids)}",
                param="stop_token_ids",
            )
        _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    if sampling.logit_bias:
        if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias must have at most {MAX_LOGIT_BIAS} tokens, got {len(sampling.logit_bias)}",
                param="logit_bias",
            )
        _check_ids("logit_bias", [token for token, _ in sampling.logit_bias], vocab_size)
    if sampling.num_logprobs is not None and not 0 <= sampling.num_logprobs <= MAX_LOGPROBS:
        raise InvalidRequestError(
            f"logprobs must be 0 to {MAX_LOGPROBS}, got {sampling.num_logprobs}", param="logprobs"
        )


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{field} must be of tokens >= 0 and < {vocab_size}, got {token}", param=field
            )
