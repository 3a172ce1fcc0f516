"""Where the time of one sequence went, from what the events of its tokens say and from when they came. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from scheduler.api.fields import DOCUMENTED
from scheduler.messages import TokenEvent

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


class Timeline:
    """Adds up the times of one sequence. All times are seconds of one clock that only grows."""

    def __init__(self, arrived_at: float) -> None:
        """`arrived_at`: when the ApiServer got the request."""
        self._arrived_at = arrived_at
        self._first_at: float | None = None
        self._last_at = arrived_at
        self._queued_s = self._held_s = self._prefill_s = self._handoff_s = 0.0
        self._not_decoding_s = 0.0
        """Of the time since the first token, what the workers say was something else."""
        self._detokenise_s = 0.0

    def push(self, event: TokenEvent, now: float, detokenise_s: float) -> None:
        """Take in an event that came at `now`, and what it took to make text of it."""
        timing = event.timing
        if timing is not None:
            self._queued_s += timing.queued_s
            self._held_s += timing.held_s
            self._prefill_s += timing.prefill_s
            self._handoff_s += timing.handoff_s
            if self._first_at is not None:
                self._not_decoding_s += timing.queued_s + timing.held_s + timing.prefill_s + timing.handoff_s
        if self._first_at is None:
            self._first_at = now
        self._last_at = now
        self._detokenise_s += detokenise_s

    def timings(self) -> Timings:
        """Return the times up to the last event."""
        first_at = self._last_at if self._first_at is None else self._first_at
        return Timings(
            queued_s=self._queued_s,
            held_s=self._held_s,
            prefill_s=self._prefill_s,
            handoff_s=self._handoff_s,
            decode_s=max(self._last_at - first_at - self._not_decoding_s, 0.0),
            detokenise_s=self._detokenise_s,
            first_token_s=first_at - self._arrived_at,
            total_s=self._last_at - self._arrived_at,
        )
