"""One choice: from the tokens of its sequence to text, logprobs and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.api.stop import StopMatcher
from scheduler.api.timings import Timings
from scheduler.api.tokenizer import Detokenizer
from scheduler.messages import FinishReason, TokenEvent, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLogprobs:
    """How likely a token was, and where its text begins in that of its choice, in characters."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None
    """None for the first token of a prompt, which nothing predicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one event adds to a choice."""

    position: int
    """Number of the choice."""
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PlacedLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token of the request that ended it."""
    is_first: bool = False
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """With the first delta only."""
    timings: Timings | None = None
    """With the last delta only, if they are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as it is computed."""

    token_ids: tuple[int, ...]
    text: str | None = None
    """Only if it is to be echoed."""
    offsets: tuple[int, ...] = ()
    """Where each token begins in `text`, only if it is to be echoed with logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRules:
    """What ends a text and what is part of it."""

    stops: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    """The request's own, without the model's."""
    include_stop: bool = False
    min_tokens: int = 0
    prompt_only: bool = False
    """No token is wanted: one is computed, and dropped."""
    logprobs: bool = False
    """Whether the output's tokens are reported with their logprobs."""


class ChoiceOutput:
    """Makes the deltas of one choice out of the events of its sequence, and knows when it ends. Does no I/O."""

    def __init__(self, position: int, detokenizer: Detokenizer, rules: OutputRules, prompt: Prompt) -> None:
        self._position = position
        self._detokenizer = detokenizer
        self._rules = rules
        self._matcher = StopMatcher(rules.stops, include=rules.include_stop)
        self._prompt = prompt
        self._num_chars = len(prompt.text or "")
        """Characters of the text, those that are held back and an echoed prompt included."""
        self.num_tokens = 0
        """Tokens of the output: those of a stop string and the end token count."""
        self.num_cached_tokens = 0
        """Tokens of the prompt that were not computed."""
        self.finish_reason: FinishReason | None = None

    def push(self, event: TokenEvent) -> Delta:
        """Take the next event and return what it adds; the last one sets `finish_reason`."""
        if event.index == 0:
            self.num_cached_tokens = event.num_cached_tokens
        if self._rules.prompt_only:
            self.finish_reason = "length"
            return self._delta(event, "", (), None)
        offset, text = self._num_chars, ""
        token_ids: tuple[int, ...] = ()
        if event.token_id is not None:
            self.num_tokens += 1
            token_ids = (event.token_id,)
            # A token that ended the sequence is not part of its text.
            if event.finish_reason != "stop" or self._rules.include_stop:
                text = self._detokenizer.push(event.token_id)
        if event.finish_reason is not None:
            text += self._detokenizer.flush()
        self._num_chars += len(text)
        text = self._matcher.feed(text, armed=self.num_tokens >= self._rules.min_tokens)
        stop_reason: str | int | None = None
        if self._matcher.matched is not None:
            self.finish_reason, stop_reason = "stop", self._matcher.matched
        elif event.finish_reason is not None:
            text += self._matcher.flush()
            self.finish_reason = event.finish_reason
            if event.finish_reason == "stop" and event.token_id in self._rules.stop_token_ids:
                stop_reason = event.token_id
        return self._delta(event, text, token_ids, stop_reason, offset)

    def _delta(
        self,
        event: TokenEvent,
        text: str,
        token_ids: tuple[int, ...],
        stop_reason: str | int | None,
        offset: int = 0,
    ) -> Delta:
        logprobs: tuple[PlacedLogprobs, ...] = ()
        if self._rules.logprobs:
            logprobs = tuple(
                PlacedLogprobs(token_id=token_id, offset=offset, logprobs=event.logprobs)
                for token_id in token_ids
            )
        is_first = event.index == 0
        if is_first and self._prompt.text is not None:
            text = self._prompt.text + text
            logprobs = (*self._echoed_logprobs(event), *logprobs)
        return Delta(
            position=self._position,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
            is_first=is_first,
            prompt_logprobs=event.prompt_logprobs,
        )

    def _echoed_logprobs(self, event: TokenEvent) -> tuple[PlacedLogprobs, ...]:
        if not self._rules.logprobs:
            return ()
        entries = event.prompt_logprobs or (None,) * len(self._prompt.token_ids)
        return tuple(
            PlacedLogprobs(token_id=token_id, offset=offset, logprobs=entry)
            for token_id, offset, entry in zip(
                self._prompt.token_ids, self._prompt.offsets, entries, strict=True
            )
        )


def token_offsets(detokenizer: Detokenizer, token_ids: Sequence[int], num_chars: int) -> tuple[int, ...]:
    """Return where each token begins in the text of `num_chars` characters that the tokens make together."""
    offsets, end = [], 0
    for token_id in token_ids:
        offsets.append(min(end, num_chars))
        end += len(detokenizer.push(token_id))
    return tuple(offsets)


def join(deltas: Sequence[Delta]) -> Delta:
    """Return the whole choice of which these are the parts."""
    first, last = deltas[0], deltas[-1]
    return Delta(
        position=last.position,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        is_first=True,
        prompt_logprobs=first.prompt_logprobs,
        timings=last.timings,
    )
