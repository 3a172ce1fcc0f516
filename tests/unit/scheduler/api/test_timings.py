from __future__ import annotations

import pytest

from scheduler.api.timings import Timeline
from scheduler.api.tokenizer import Tokenizer
from scheduler.messages import Timing, TokenEvent
from tests.unit.scheduler.api.scripted import ScriptedEngine, app_over, complete, events


def event(index: int, timing: Timing | None = None) -> TokenEvent:
    return TokenEvent(request_id="r", index=index, token_id=7, timing=timing)


def test_stages_of_a_sequence() -> None:
    line = Timeline(10.0)
    line.push(event(0, Timing(queued_s=0.1, held_s=0.2, prefill_s=0.3)), 10.7, 0.01)
    line.push(event(1, Timing(handoff_s=0.05)), 11.0, 0.02)
    line.push(event(2), 11.5, 0.01)
    timings = line.timings()
    assert (timings.queued_s, timings.held_s, timings.prefill_s, timings.handoff_s) == (0.1, 0.2, 0.3, 0.05)
    assert timings.first_token_s == pytest.approx(0.7)
    assert timings.decode_s == pytest.approx(0.75)
    assert timings.total_s == pytest.approx(1.5)
    assert timings.detokenise_s == pytest.approx(0.04)


def test_a_sequence_that_is_computed_again_has_the_sum_of_its_times() -> None:
    line = Timeline(0.0)
    line.push(event(0, Timing(held_s=0.1, prefill_s=0.2)), 0.3, 0.0)
    line.push(event(1, Timing(handoff_s=0.1)), 1.0, 0.0)
    line.push(event(2, Timing(queued_s=0.5, prefill_s=0.4)), 2.0, 0.0)
    line.push(event(3, Timing(handoff_s=0.1)), 2.5, 0.0)
    timings = line.timings()
    assert (timings.queued_s, timings.held_s) == (0.5, 0.1)
    assert timings.prefill_s == pytest.approx(0.6)
    assert timings.handoff_s == pytest.approx(0.2)
    # 2.2 s after the first token, less the second prefill with its wait, and both handoffs.
    assert timings.decode_s == pytest.approx(2.2 - 0.9 - 0.2)


def test_times_of_a_sequence_without_a_token() -> None:
    timings = Timeline(3.0).timings()
    assert (timings.first_token_s, timings.total_s, timings.decode_s) == (0.0, 0.0, 0.0)


def test_timings_are_told_to_who_asks(bytes_tokenizer: Tokenizer) -> None:
    app = app_over(ScriptedEngine(["one<end>", "two"]), bytes_tokenizer)
    asked = complete(app, n=2, return_timings=True).json()["choices"]
    for choice in asked:
        assert 0 <= choice["timings"]["first_token_s"] <= choice["timings"]["total_s"]
    app = app_over(ScriptedEngine(["one<end>"] * 2), bytes_tokenizer)
    assert "timings" not in complete(app).json()["choices"][0]
    chunks = events(complete(app, stream=True, return_timings=True).text)
    assert ["timings" in chunk["choices"][0] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
