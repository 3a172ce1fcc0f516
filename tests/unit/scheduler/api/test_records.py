"""What is written into the journal is read as what it was."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.api.output import Prompt
from scheduler.api.records import (
    AcceptedRequest,
    RecordError,
    decode_accepted,
    decode_error,
    decode_events,
    encode_accepted,
    encode_error,
    encode_events,
)
from scheduler.errors import WorkerFailedError
from scheduler.messages import Grammar, SamplingParams, TokenEvent, TokenLogprobs

LOGPROBS = st.builds(
    TokenLogprobs,
    token_id=st.integers(0, 9),
    logprob=st.floats(max_value=0, allow_nan=False),
    top=st.lists(st.tuples(st.integers(0, 9), st.floats(max_value=0, allow_nan=False)), max_size=2).map(
        tuple
    ),
)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, TokenEvent]]:
    """Events of three choices, each in order, from any index on, some to their end."""
    events: list[tuple[int, TokenEvent]] = []
    for choice in range(3):
        start, has_logprobs = draw(st.integers(0, 3)), draw(st.booleans())
        token_ids = draw(st.lists(st.integers(0, 2**31), max_size=4))
        end = draw(st.sampled_from([None, "with the last token", "after it"]))
        for i, token_id in enumerate(token_ids):
            is_last = end == "with the last token" and i == len(token_ids) - 1
            event = TokenEvent(
                request_id="",
                index=start + i,
                token_id=token_id,
                finish_reason="stop" if is_last else None,
                logprobs=draw(LOGPROBS) if has_logprobs else None,
                prompt_logprobs=(None, draw(LOGPROBS)) if has_logprobs and i == 0 else None,
            )
            events.append((choice, event))
        if end == "after it":
            last = TokenEvent(request_id="", index=start + len(token_ids), finish_reason="length")
            events.append((choice, last))
    return events


@given(histories())
def test_events_come_back(events: list[tuple[int, TokenEvent]]) -> None:
    decoded = decode_events(encode_events(events))
    for choice in range(3):
        assert [e for c, e in decoded if c == choice] == [e for c, e in events if c == choice]


ACCEPTED = AcceptedRequest(
    path="/v1/completions",
    body='{"prompt":"\\ud800"}',
    key_digest="d",
    is_keyed=True,
    answer_id="cmpl-1",
    created=5,
    prompts=(Prompt(token_ids=(1, 2), text="a\u2028\u00e9", offsets=(0, 1)),),
    samplings=(
        SamplingParams(
            max_tokens=3,
            temperature=0.1,
            seed=2**63 - 1,
            logit_bias=((1, -0.3),),
            grammar=Grammar(kind="regex", text="a+"),
        ),
    ),
)


def test_a_request_comes_back() -> None:
    assert decode_accepted(encode_accepted(ACCEPTED)) == ACCEPTED


def test_an_error_comes_back() -> None:
    error = decode_error(encode_error(WorkerFailedError("broken", param="prompt")))
    assert (type(error), error.message, error.param) == (WorkerFailedError, "broken", "prompt")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encode_accepted(replace(ACCEPTED, version=2)), "version 2, this purefill reads version 1"),
        (b"{}", "version None"),
        (b"[1]", "version None"),
        (b"\x80pickle", "cannot be read"),
        (b'{"version":1}', "cannot be read"),
    ],
)
def test_what_cannot_be_read_says_why(data: bytes, reason: str) -> None:
    for decode in (decode_accepted, decode_events):
        with pytest.raises(RecordError, match=reason):
            decode(data)


def test_a_token_that_is_ruled_out_has_no_number_in_json() -> None:
    logprobs = TokenLogprobs(token_id=1, logprob=-math.inf)
    event = TokenEvent(request_id="", index=0, token_id=1, logprobs=logprobs)
    data = encode_events([(0, event)])
    assert b'"-Infinity"' in data
    assert decode_events(data) == [(0, event)]
