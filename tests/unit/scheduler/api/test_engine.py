from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.api.engine import TokenRouter, TokenStream
from scheduler.errors import OverloadedError, RequestError, UnavailableError, WorkerFailedError
from scheduler.messages import TokenEvent, TokenEvents

End = Literal["with the last token", "after the last token"]


def sequence(request_id: str, num_tokens: int, end: End) -> list[TokenEvent]:
    """All events of a request, in order. The token at index i is 100 + i."""
    last = num_tokens - 1 if end == "with the last token" else num_tokens
    return [
        TokenEvent(
            request_id=request_id,
            index=i,
            token_id=100 + i if i < num_tokens else None,
            finish_reason="length" if i == last else None,
        )
        for i in range(last + 1)
    ]


def deliver(router: TokenRouter, *events: TokenEvent) -> None:
    router.deliver(TokenEvents(source="decode-0", events=events))


async def read_all(stream: TokenStream, num_requests: int = 1) -> dict[int, list[TokenEvent]]:
    """The events of each request, by its position, up to the end of all of them."""
    seen: dict[int, list[TokenEvent]] = {i: [] for i in range(num_requests)}
    while not all(events and events[-1].finish_reason for events in seen.values()):
        for position, event in await stream.read():
            seen[position].append(event)
    return seen


def read(stream: TokenStream) -> list[TokenEvent]:
    return asyncio.run(asyncio.wait_for(read_all(stream), timeout=60))[0]


def read_some(stream: TokenStream) -> tuple[list[TokenEvent], RequestError]:
    """What comes before the error, and the error."""
    events = []

    async def read_on() -> None:
        while True:
            events.extend([event for _, event in await stream.read()])

    with pytest.raises(RequestError) as caught:
        asyncio.run(asyncio.wait_for(read_on(), timeout=60))
    return events, caught.value


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[dict[str, list[TokenEvent]], list[list[TokenEvent]]]:
    """Sequences, and messages in which their events come: any order, some twice, requests mixed."""
    ends: st.SearchStrategy[End] = st.sampled_from(["with the last token", "after the last token"])
    sequences = {
        f"r{i}": sequence(f"r{i}", draw(st.integers(1, 6)), draw(ends))
        for i in range(draw(st.integers(1, 4)))
    }
    events = [event for events in sequences.values() for event in events]
    repeats = draw(st.lists(st.sampled_from(events), max_size=8))
    shuffled = draw(st.permutations(events + repeats))
    cuts = sorted(draw(st.lists(st.integers(0, len(shuffled)), max_size=6)))
    bounds = zip([0, *cuts], [*cuts, len(shuffled)], strict=True)
    return sequences, [list(shuffled[start:end]) for start, end in bounds]


@given(arrivals(), st.booleans())
def test_each_token_comes_once_and_in_order_whatever_the_arrival(
    arrival: tuple[dict[str, list[TokenEvent]], list[list[TokenEvent]]], waits: bool
) -> None:
    """In streams of one request, whose readers wait or come late, and in one of all requests."""
    sequences, messages = arrival

    async def run() -> None:
        apart, together = TokenRouter(), TokenRouter()
        streams = [apart.open([request_id]) for request_id in sequences]
        whole = together.open(list(sequences))
        readings = [asyncio.ensure_future(read_all(stream)) for stream in streams]
        readings.append(asyncio.ensure_future(read_all(whole, len(sequences))))
        for events in messages:
            if waits:
                await asyncio.sleep(0)  # let the readers run dry
            deliver(apart, *events)
            deliver(together, *events)
        assert (len(apart), len(together)) == (0, 0)
        *each, all_of_them = await asyncio.wait_for(asyncio.gather(*readings), timeout=60)
        assert [seen[0] for seen in each] == list(sequences.values())
        assert list(all_of_them.values()) == list(sequences.values())

    asyncio.run(run())


def test_nothing_is_given_out_before_what_precedes_it() -> None:
    router = TokenRouter()
    stream = router.open(["r"])
    first, second, third = sequence("r", 3, "with the last token")
    deliver(router, third, second)
    assert len(router) == 1
    deliver(router, first)
    assert len(router) == 0
    assert read(stream) == [first, second, third]


def test_an_error_comes_after_the_tokens_before_it_and_ends_the_stream() -> None:
    router = TokenRouter()
    stream = router.open(["r"])
    first, second, third = sequence("r", 3, "with the last token")
    failure = TokenEvent(request_id="r", index=2, error_label="worker_failed", error_message="out of memory")
    deliver(router, first, second, failure, third)
    events, error = read_some(stream)
    assert events == [first, second]
    assert isinstance(error, WorkerFailedError)
    assert error.message == "out of memory"
    assert len(router) == 0


def test_an_error_does_not_wait_for_tokens_that_are_missing() -> None:
    router = TokenRouter()
    stream = router.open(["r"])
    deliver(router, TokenEvent(request_id="r", index=5, error_label="overloaded", error_message="full"))
    events, error = read_some(stream)
    assert events == []
    assert isinstance(error, OverloadedError)


def test_an_error_after_the_end_changes_nothing() -> None:
    router = TokenRouter()
    stream = router.open(["r"])
    events = sequence("r", 2, "with the last token")
    deliver(router, *events, TokenEvent(request_id="r", index=2, error_label="cancelled"))
    assert read(stream) == events


def test_an_error_of_one_request_leaves_the_others_alone() -> None:
    router = TokenRouter()
    failing, other = router.open(["failing"]), router.open(["other"])
    events = sequence("other", 2, "after the last token")
    deliver(router, TokenEvent(request_id="failing", index=0, error_label="worker_failed"), *events)
    assert isinstance(read_some(failing)[1], WorkerFailedError)
    assert read(other) == events


def test_events_of_closed_and_unknown_requests_are_dropped() -> None:
    router = TokenRouter()
    router.open(["r", "done"])
    deliver(router, *sequence("done", 1, "with the last token"))
    assert router.close(["r", "done", "unknown"]) == ["r"]
    deliver(router, *sequence("r", 2, "with the last token"), *sequence("unknown", 1, "with the last token"))
    assert len(router) == 0


def test_fail_all_ends_what_is_open() -> None:
    router = TokenRouter()
    done, running = router.open(["done"]), router.open(["running"])
    events = sequence("done", 1, "with the last token")
    deliver(router, *events)
    assert router.fail_all(UnavailableError("stopping")) == ["running"]
    assert read(done) == events
    assert isinstance(read_some(running)[1], UnavailableError)


def test_an_error_of_one_request_ends_its_whole_stream() -> None:
    router = TokenRouter()
    stream = router.open(["failing", "other"])
    events = sequence("other", 2, "after the last token")
    deliver(
        router, events[0], TokenEvent(request_id="failing", index=0, error_label="worker_failed"), *events[1:]
    )
    before, error = read_some(stream)
    assert before == events
    assert isinstance(error, WorkerFailedError)


def test_a_reader_that_waits_too_long_gets_nothing() -> None:
    async def run() -> None:
        router = TokenRouter()
        stream = router.open(["r"])
        assert await stream.read(0) == []
        deliver(router, *sequence("r", 1, "with the last token"))
        assert len(await stream.read(0)) == 1

    asyncio.run(run())
