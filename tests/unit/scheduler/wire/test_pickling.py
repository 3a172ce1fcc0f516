from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import pytest

from scheduler.errors import InvalidRequestError
from scheduler.messages import (
    Grammar,
    Lease,
    PrefillBatch,
    PrefillItem,
    PrefillResult,
    Request,
    SamplingParams,
    TokenEvent,
    TokenEvents,
    TokenLogprobs,
)
from scheduler.wire.frames import Failure
from scheduler.wire.pickling import dumps


@dataclass(frozen=True, slots=True)
class One:
    value: object


@dataclass(frozen=True, slots=True)
class More(One):
    other: int = 3


@dataclass
class WithoutSlots:
    value: list[int] = field(default_factory=list)


REQUEST = Request(
    request_id="r0",
    api_server="api-0",
    prompt_token_ids=(1, 2),
    sampling=SamplingParams(
        max_tokens=4, stop_token_ids=(3,), grammar=Grammar(kind="json_object"), logit_bias=((1, 0.5),)
    ),
)
LEASE = Lease(decode_worker="decode-0", epoch=7, page_ids=(1, 2))


@pytest.mark.parametrize(
    "message",
    [
        PrefillBatch(
            batch_id=1, decode_worker="decode-0", items=(PrefillItem(request=REQUEST, lease=LEASE),) * 2
        ),
        TokenEvents(
            source="prefill-0",
            events=(TokenEvent(request_id="r0", index=0, logprobs=TokenLogprobs(token_id=1, logprob=-1.0)),),
        ),
        PrefillResult(
            batch_id=1, worker="p", outcomes=(), num_tokens=1, padding_tokens=0, replays={"8x8": 1}
        ),
        One(One(None)),
        More(1, 2),
        [WithoutSlots([1]), One(WithoutSlots([2])), One(One), len],
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_is_read_equals_what_was_written(message: object) -> None:
    copy = pickle.loads(dumps(message))
    assert copy == message
    assert type(copy) is type(message)


def test_what_two_messages_share_they_share_after_it() -> None:
    batch = PrefillBatch(
        batch_id=1, decode_worker="decode-0", items=(PrefillItem(request=REQUEST, lease=LEASE),) * 2
    )
    first, second = pickle.loads(dumps(batch)).items
    assert first is second


def test_an_error_keeps_its_class_and_fields() -> None:
    failure = Failure(number=1, error=InvalidRequestError("no", param="prompt"), traceback="")
    error = pickle.loads(dumps(failure)).error
    assert (type(error), str(error), error.param) == (InvalidRequestError, "no", "prompt")


def test_a_message_of_another_version_is_refused() -> None:
    data = dumps(One(1)).replace(b"One", b"More")  # the name's length is checked before
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(data)
