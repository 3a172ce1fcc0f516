"""Where the time of one sequence went, from what the events of its tokens say and from when they came. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from scheduler.api.fields import DOCUMENTED
from scheduler.observe.requests import RequestTimeline

Seconds = Annotated[float, Field(ge=0)]


class Timings(BaseModel):
    """Where the time of a choice went.

    What the first five leave of `total_s` went into messages between the processes, and into tokenising. A choice
    that was computed again, after a failure or a preemption, has the sum of all its times in each field.
    """

    model_config = DOCUMENTED

    queued_s: Seconds
    """In the queue, because all prefill workers were busy or no decode worker had room."""
    held_s: Seconds
    """In the queue besides, held for others to join its batch."""
    prefill_s: Seconds
    """At the prefill worker, with the rest of its batch."""
    handoff_s: Seconds
    """Its KV pages were on their way to the decode worker."""
    decode_s: Seconds
    """The rest of the time from its first token to its last."""
    detokenise_s: Seconds
    """Spent on making text of tokens, within the other times."""
    first_token_s: Seconds
    """From the request's arrival at the ApiServer to its first token there."""
    total_s: Seconds
    """From the request's arrival to its last token."""


def timings_of(timeline: RequestTimeline, position: int, detokenise_s: float) -> Timings:
    """Return where the time of a request's sequence went up to its newest token."""
    times, arrived_at = timeline.sequences[position], timeline.arrived_at
    timings = [mark.timing for mark in times.marks]
    first_at = times.last_token_at if times.first_token_at is None else times.first_token_at
    # The first came with the first token. What came after tells of handoffs, and of being computed again.
    not_decoding_s = sum(t.queued_s + t.held_s + t.prefill_s + t.handoff_s for t in timings[1:])
    return Timings(
        queued_s=sum(timing.queued_s for timing in timings),
        held_s=sum(timing.held_s for timing in timings),
        prefill_s=sum(timing.prefill_s for timing in timings),
        handoff_s=sum(timing.handoff_s for timing in timings),
        decode_s=max(times.last_token_at - first_at - not_decoding_s, 0.0),
        detokenise_s=detokenise_s,
        first_token_s=max(first_at - arrived_at, 0.0),
        total_s=max(times.last_token_at - arrived_at, 0.0),
    )
