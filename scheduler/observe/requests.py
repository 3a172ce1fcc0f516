"""The way of one HTTP request that computes tokens: when what happened to it, on the ApiServer's clock. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.messages import Timing, TokenEvent
from scheduler.observe import catalogue as m
from scheduler.observe.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A token that brought word of where time went before it."""

    at: float
    timing: Timing


@dataclass(slots=True, kw_only=True)
class SequenceTimes:
    """What became of one sequence, and when. All times are seconds on one clock."""

    first_token_at: float | None = None
    last_token_at: float = 0.0
    ended_at: float | None = None
    outcome: str | None = None
    """Its finish reason, or the label of an error; None while it runs."""
    num_tokens: int = 0
    marks: list[Mark] = field(default_factory=list)
    """More than one of prefill: it was computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Where a sequence's time went, attempts that were computed again included."""

    queued_s: float
    held_s: float
    prefill_s: float
    handoff_s: float


class RequestTimeline:
    """Owns the times of the sequences of one request, and counts them where the ApiServer counts."""

    def __init__(self, registry: Registry, arrived_at: float) -> None:
        self._registry = registry
        self.arrived_at = arrived_at
        self.submitted_at = arrived_at
        """When its prompts had become tokens and left for the scheduler."""
        self.num_prompt_tokens = 0
        """Of all its sequences."""
        self.text_s = 0.0
        """What it took to make text of the tokens."""
        self.sequences: list[SequenceTimes] = []

    def submitted(self, prompt_lengths: Sequence[int], now: float) -> None:
        """It was accepted, with one sequence for each of these prompts, given in tokens."""
        self.num_prompt_tokens = sum(prompt_lengths)
        self.sequences = [SequenceTimes() for _ in prompt_lengths]
        self._registry.inc(m.PROMPT_TOKENS, by=self.num_prompt_tokens)
        self.submitted_at = now

    def event(self, position: int, event: TokenEvent, now: float) -> None:
        """Something came of a sequence."""
        sequence = self.sequences[position]
        if sequence.ended_at is not None:
            return  # Its text had ended, with a stop string.
        if event.timing is not None:
            sequence.marks.append(Mark(at=now, timing=event.timing))
        if event.token_id is None:
            return
        sequence.num_tokens += 1
        if sequence.first_token_at is None:
            sequence.first_token_at = now
            self._registry.observe(m.TIME_TO_FIRST_TOKEN, now - self.arrived_at)
        else:
            self._registry.observe(m.INTER_TOKEN, now - sequence.last_token_at)
        sequence.last_token_at = now

    def ended(self, position: int, outcome: str, now: float) -> None:
        """A sequence has ended. Nothing happens if it had already."""
        sequence = self.sequences[position]
        if sequence.ended_at is None:
            sequence.ended_at, sequence.outcome = now, outcome
            self._registry.observe(m.REQUEST_SECONDS, now - self.arrived_at)

    def all_ended(self, outcome: str, now: float) -> None:
        """All sequences that have not ended do now."""
        for position in range(len(self.sequences)):
            self.ended(position, outcome, now)

    @property
    def outcome(self) -> str:
        """What became of its sequences: each outcome once."""
        return ",".join(dict.fromkeys(sequence.outcome or "running" for sequence in self.sequences))

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all its sequences."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def first_token_s(self) -> float | None:
        """Seconds from its arrival to the first token of any sequence, or None if there was none."""
        times = [s.first_token_at for s in self.sequences if s.first_token_at is not None]
        return min(times) - self.arrived_at if times else None

    @property
    def waits(self) -> Waits:
        """Where the time went of the sequence that took longest to its first token."""
        slowest = max(self.sequences, key=lambda sequence: sequence.first_token_at or 0.0)
        timings = [mark.timing for mark in slowest.marks]
        return Waits(
            queued_s=sum(timing.queued_s for timing in timings),
            held_s=sum(timing.held_s for timing in timings),
            prefill_s=sum(timing.prefill_s for timing in timings),
            handoff_s=sum(timing.handoff_s for timing in timings),
        )
