"""What an ApiServer writes into the journal, as JSON with the version of its form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from scheduler.api.output import Prompt
from scheduler.errors import PurefillError, RequestError, request_error
from scheduler.messages import FinishReason, SamplingParams, TokenEvent, TokenLogprobs

VERSION = 1

T = TypeVar("T")


class RecordError(PurefillError):
    """The journal holds something that this version of purefill cannot read."""

    label = "record"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedRequest:
    """All that it takes to compute a request, and to answer it, at another time in another process."""

    version: int = VERSION
    path: str
    """Of its route."""
    body: str
    """The JSON that the client sent; empty if it goes into no journal."""
    key_digest: str
    """Stands for the API key that it was sent with."""
    is_keyed: bool
    """Whether its client chose the key, and so may come back for the result."""
    answer_id: str
    created: int
    """Unix time in seconds."""
    prompts: tuple[Prompt, ...]
    samplings: tuple[SamplingParams, ...]
    """Of each choice of the first prompt, then of the second..., with the seeds that were drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Events of one choice that follow each other. Names are short as there are many of them."""

    c: int
    """Number of the choice."""
    i: int
    """Index of the first event."""
    t: tuple[int, ...] = ()
    """Token ids; none: one event without a token."""
    f: FinishReason | None = None
    """With the last event."""
    l: tuple[TokenLogprobs, ...] = ()  # noqa: E741
    """Of each token, if they were asked for."""
    p: tuple[TokenLogprobs | None, ...] | None = None
    """Of the prompt, with the first event."""
    h: int = 0
    """Cached tokens of the prompt, with the first event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGroup:
    """What is written at once."""

    # A token that a grammar rules out has the logprob -inf, which JSON has no number for.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="strings")

    version: int
    runs: tuple[TokenRun, ...]


_ACCEPTED = TypeAdapter(AcceptedRequest)
_GROUP = TypeAdapter(TokenGroup)


def encode_accepted(accepted: AcceptedRequest) -> bytes:
    """Return a request as it is written."""
    return _ACCEPTED.dump_json(accepted)


def decode_accepted(data: bytes) -> AcceptedRequest:
    """Return a request as it was. Raises RecordError."""
    return _decode(_ACCEPTED, data)


def encode_events(events: Iterable[tuple[int, TokenEvent]]) -> bytes:
    """Return events, each with the number of its choice, as they are written."""
    runs: dict[int, list[TokenEvent]] = {}
    done: list[TokenRun] = []
    for choice, event in events:
        run = runs.setdefault(choice, [])
        if run and (event.token_id is None or event.index != run[0].index + len(run)):
            done.append(_run(choice, run))
            run.clear()
        run.append(event)
        if event.token_id is None:
            done.append(_run(choice, run))
            run.clear()
    done += [_run(choice, run) for choice, run in runs.items() if run]
    return _GROUP.dump_json(TokenGroup(version=VERSION, runs=tuple(done)), exclude_defaults=True)


def decode_events(data: bytes) -> list[tuple[int, TokenEvent]]:
    """Return events, each with the number of its choice; request ids are empty. Raises RecordError."""
    events = []
    for run in _decode(_GROUP, data).runs:
        last = max(len(run.t), 1) - 1
        for offset in range(last + 1):
            event = TokenEvent(
                request_id="",
                index=run.i + offset,
                token_id=run.t[offset] if run.t else None,
                finish_reason=run.f if offset == last else None,
                logprobs=run.l[offset] if run.l else None,
                prompt_logprobs=run.p if offset == 0 else None,
                num_cached_tokens=run.h if offset == 0 else 0,
            )
            events.append((run.c, event))
    return events


def encode_error(error: RequestError) -> str:
    """Return an error as it is written."""
    return json.dumps([error.label, error.message, error.param])


def decode_error(text: str) -> RequestError:
    """Return an error as it was. Raises RecordError."""
    try:
        label, message, param = json.loads(text)
    except (ValueError, TypeError, RecursionError) as problem:
        raise RecordError(f"the error in the journal's entry cannot be read: {problem}") from problem
    error = request_error(label, message)
    error.param = param
    return error


def _run(choice: int, events: Sequence[TokenEvent]) -> TokenRun:
    return TokenRun(
        c=choice,
        i=events[0].index,
        t=tuple(event.token_id for event in events if event.token_id is not None),
        f=events[-1].finish_reason,
        l=tuple(event.logprobs for event in events if event.logprobs is not None),
        p=events[0].prompt_logprobs,
        h=events[0].num_cached_tokens,
    )


def _decode(adapter: TypeAdapter[T], data: bytes) -> T:
    try:
        value: Any = json.loads(data)
        version = value.get("version") if isinstance(value, dict) else None
        if version != VERSION:
            raise RecordError(
                f"the journal's entry has version {version}, this purefill reads version {VERSION}"
            )
        return adapter.validate_json(data)
    except (ValueError, ValidationError, RecursionError) as error:
        raise RecordError(f"the journal's entry cannot be read: {error}") from error
