from __future__ import annotations

import pytest

from scheduler.api.timings import Timings, timings_of
from scheduler.api.tokenizer import Tokenizer
from scheduler.messages import Timing, TokenEvent
from scheduler.observe.registry import Registry
from scheduler.observe.requests import RequestTimeline
from tests.unit.scheduler.api.scripted import ScriptedEngine, app_over, complete, events


def timings(arrived_at: float, *events: tuple[float, Timing | None]) -> Timings:
    """The times of a sequence whose tokens came at these times, some with what a worker says of the time before."""
    line = RequestTimeline(Registry(), arrived_at)
    line.submitted([5], arrived_at)
    for index, (at, timing) in enumerate(events):
        line.event(0, TokenEvent(request_id="r", index=index, token_id=7, timing=timing), at)
    return timings_of(line, 0, 0.04)


def test_stages_of_a_sequence() -> None:
    told = timings(
        10.0,
        (10.7, Timing(queued_s=0.1, held_s=0.2, prefill_s=0.3)),
        (11.0, Timing(handoff_s=0.05)),
        (11.5, None),
    )
    assert (told.queued_s, told.held_s, told.prefill_s, told.handoff_s) == (0.1, 0.2, 0.3, 0.05)
    assert told.first_token_s == pytest.approx(0.7)
    assert told.decode_s == pytest.approx(0.75)
    assert told.total_s == pytest.approx(1.5)
    assert told.detokenise_s == 0.04


def test_a_sequence_that_is_computed_again_has_the_sum_of_its_times() -> None:
    told = timings(
        0.0,
        (0.3, Timing(held_s=0.1, prefill_s=0.2)),
        (1.0, Timing(handoff_s=0.1)),
        (2.0, Timing(queued_s=0.5, prefill_s=0.4)),
        (2.5, Timing(handoff_s=0.1)),
    )
    assert (told.queued_s, told.held_s) == (0.5, 0.1)
    assert told.prefill_s == pytest.approx(0.6)
    assert told.handoff_s == pytest.approx(0.2)
    # 2.2 s after the first token, less the second prefill with its wait, and both handoffs.
    assert told.decode_s == pytest.approx(2.2 - 0.9 - 0.2)


def test_a_sequence_of_one_token_is_not_decoded() -> None:
    told = timings(3.0, (3.5, Timing(prefill_s=0.4)))
    assert (told.first_token_s, told.total_s, told.decode_s, told.handoff_s) == (0.5, 0.5, 0.0, 0.0)


def test_timings_are_told_to_who_asks(bytes_tokenizer: Tokenizer) -> None:
    app = app_over(ScriptedEngine(["one<end>", "two"]), bytes_tokenizer)
    asked = complete(app, n=2, return_timings=True).json()["choices"]
    for choice in asked:
        assert 0 <= choice["timings"]["first_token_s"] <= choice["timings"]["total_s"]
    app = app_over(ScriptedEngine(["one<end>"] * 2), bytes_tokenizer)
    assert "timings" not in complete(app).json()["choices"][0]
    chunks = events(complete(app, stream=True, return_timings=True).text)
    assert ["timings" in chunk["choices"][0] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
