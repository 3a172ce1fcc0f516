from __future__ import annotations

import pytest

from scheduler.messages import Timing, TokenEvent
from scheduler.observe import catalogue as m
from scheduler.observe.registry import Registry
from scheduler.observe.requests import RequestTimeline, Waits


def event(index: int, timing: Timing | None = None) -> TokenEvent:
    return TokenEvent(request_id="r", index=index, token_id=5, timing=timing)


def sums(registry: Registry) -> dict[str, tuple[float, float]]:
    """Return the sum and the number of values of each histogram."""
    figures = registry.figures()
    return {name: (series[()][0], sum(series[()][1:])) for name, series in figures.histograms.items()}


def test_times_and_tokens_of_two_sequences() -> None:
    registry = Registry()
    timeline = RequestTimeline(registry, 100.0)
    timeline.submitted([3, 3], 100.5)
    first = Timing(queued_s=0.25, held_s=0.5, prefill_s=0.125)
    timeline.event(0, event(0, first), 101.5)
    timeline.event(1, event(0, first), 102.0)
    timeline.event(0, event(1, Timing(handoff_s=0.0625)), 103.0)
    timeline.ended(0, "stop", 103.0)
    timeline.event(0, event(2), 103.5)  # after its stop string
    timeline.all_ended("cancelled", 104.0)
    timeline.all_ended("cancelled", 105.0)
    assert sums(registry) == {
        m.TIME_TO_FIRST_TOKEN.name: (1.5 + 2.0, 2),
        m.INTER_TOKEN.name: (1.5, 1),
        m.REQUEST_SECONDS.name: (3.0 + 4.0, 2),
    }
    assert registry.values(m.PROMPT_TOKENS) == {(): 6}
    assert (timeline.outcome, timeline.num_output_tokens) == ("stop,cancelled", 3)
    assert timeline.first_token_s == 1.5
    assert timeline.waits == Waits(queued_s=0.25, held_s=0.5, prefill_s=0.125, handoff_s=0.0)


def test_what_is_computed_again_adds_up() -> None:
    timeline = RequestTimeline(Registry(), 0.0)
    timeline.submitted([1], 0.0)
    timeline.event(0, event(0, Timing(queued_s=1.0, prefill_s=2.0)), 3.0)
    timeline.event(0, event(1, Timing(handoff_s=0.5)), 4.0)
    timeline.event(0, event(2, Timing(queued_s=4.0, prefill_s=3.0)), 11.0)
    assert timeline.waits == Waits(queued_s=5.0, held_s=0.0, prefill_s=5.0, handoff_s=0.5)


@pytest.mark.parametrize("label", ["timeout", "worker_failed"])
def test_one_that_fails_before_its_first_token(label: str) -> None:
    registry = Registry()
    timeline = RequestTimeline(registry, 1.0)
    timeline.submitted([4], 1.0)
    timeline.all_ended(label, 3.0)
    assert (timeline.outcome, timeline.first_token_s, timeline.num_output_tokens) == (label, None, 0)
    assert sums(registry) == {m.REQUEST_SECONDS.name: (2.0, 1)}
