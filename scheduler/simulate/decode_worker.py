"""A decode worker in virtual time: continuous batching over pages, step by step in effect, but not in cost.

Between two changes (a sequence joins, ends, needs a page, or leaves) every step has the same sequences, so all of them
are computed at once: k steps of n sequences that attend to C tokens at first take

    k s(n) + c (k C + n k (k - 1) / 2)

with s(n) the seconds of a step's bucket and c what each attended token adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf, sqrt
from typing import Protocol

from scheduler.messages import DecodeStart, EarlierTokens, PageGrant, SequenceRef, StepReport, TokenEvent
from scheduler.simulate.fleet_costs import FleetCosts

_REPORT_AHEAD_TOKENS = 15
"""A worker is heard of when a sequence has room for so many tokens: the scheduler then wants pages for it."""
_REPORT_STEPS = 12
"""That comes after a multiple of so many steps, before the room ends, so that one report serves many sequences."""
_NEVER = 1 << 62


class DecodeSink(Protocol):
    """Told of what decode workers compute."""

    def steps(self, num_steps: int, num_sequences: int, first_s: float, last_s: float, now: float) -> None:
        """So many steps ended `now`, each with a token for `num_sequences`; the first and the last took so long."""

    def took_up(self, request_id: str, second_token_at: float) -> None:
        """A sequence will have its next token then, if nothing happens before."""

    def left(self, request_id: str, last_token_at: float) -> None:
        """A sequence that has not ended is in the steps no more."""


@dataclass(slots=True)
class _Sequence:
    ref: SequenceRef
    num_tokens: int
    """When it joined: prompt, and all tokens up to the newest, which is in no page yet."""
    num_outputs: int
    """Likewise."""
    max_tokens: int
    num_pages: int
    joined_at: int = 0
    """After so many steps."""
    num_reported: int = 0
    """Tokens since it joined that the scheduler knows of."""
    due: int = _NEVER
    """After so many steps something is to be done about it."""


class VirtualDecodeWorker:
    """Owns the sequences of one decode worker. It is told the time with each call; all times are in seconds."""

    def __init__(self, name: str, costs: FleetCosts, sink: DecodeSink) -> None:
        self.name = name
        self.busy_s = 0.0
        """Spent in steps so far."""
        self._costs = costs
        self._sink = sink
        self._step_s = costs.step_seconds
        self._per_token = costs.decode_seconds_per_context_token
        self._page_size = costs.page_size
        self._slowness = 1.0
        self._steps = 0
        self._clock = 0.0
        """When the last step ended that is counted in `_steps`."""
        self._boundary = _NEVER
        """After so many steps the commands that wait are obeyed."""
        self._target = _NEVER
        """After so many steps `advance` is to be called."""
        self._active: dict[int, _Sequence] = {}
        """By the epoch of the lease, which no two share."""
        self._context = 0
        """Tokens that the next step attends to."""
        self._due: list[tuple[int, int, _Sequence]] = []
        self._order = count()
        self._joining: list[_Sequence] = []
        self._stalled: dict[SequenceRef, _Sequence] = {}
        self._leaving: list[SequenceRef] = []
        self._num_fresh = 0
        """Sequences whose first step is the next one: the sink has had its gap already."""
        self._numbers = count(1)

    @property
    def num_running(self) -> int:
        """Sequences in the steps."""
        return len(self._active)

    def add(self, start: DecodeStart, now: float) -> None:
        """Take up a prefilled sequence with the next step."""
        request = start.request
        self._joining.append(
            _Sequence(
                ref=SequenceRef(request_id=request.request_id, epoch=start.lease.epoch),
                num_tokens=request.num_prefill_tokens + 1,
                num_outputs=len(request.output_token_ids) + 1,
                max_tokens=request.max_total_tokens,
                num_pages=len(start.lease.page_ids),
            )
        )
        self._obey_soon(now)

    def grow(self, grant: PageGrant, now: float) -> None:
        """Give a sequence more pages. Nothing happens if it is gone."""
        sequence = self._active.get(grant.ref.epoch)
        if sequence is not None:
            sequence.num_pages += len(grant.page_ids)
            self._file(sequence)
            return
        sequence = self._stalled.pop(grant.ref, None)
        if sequence is not None:
            sequence.num_pages += len(grant.page_ids)
            self._joining.append(sequence)
            self._obey_soon(now)
            return
        for sequence in self._joining:
            if sequence.ref == grant.ref:
                sequence.num_pages += len(grant.page_ids)

    def cancel(self, ref: SequenceRef, now: float) -> None:
        """Drop a sequence before the next step."""
        self._leaving.append(ref)
        self._obey_soon(now)

    def next_at(self) -> float:
        """Return when `advance` must be called, or infinity."""
        target = self._target = self._next_step()
        if target == _NEVER:
            return inf
        return self._clock + self._seconds(target - self._steps) * self._slowness

    def slow_down(self, slowness: float, now: float) -> None:
        """From now on steps take `slowness` times what the costs say. The step under way is stretched, too."""
        if slowness == self._slowness:
            return
        if self._active:
            # Keeps what was done of the steps under way: the clock is moved as if they had begun at the new pace.
            self._clock = now - (now - self._clock) * slowness / self._slowness
        self._slowness = slowness

    def advance(self, now: float) -> StepReport | None:
        """Make the steps that end `now`, as `next_at` said; return what the scheduler is to be told, if anything."""
        assert self._steps <= self._target < _NEVER
        self._make(self._target - self._steps, now)
        events: list[TokenEvent] = []
        earlier: list[EarlierTokens] = []
        released: list[SequenceRef] = []
        while self._due and self._due[0][0] <= self._steps:
            due, _, sequence = heappop(self._due)
            if sequence.due == due and sequence.ref.epoch in self._active:
                self._attend_to(sequence, events, earlier, released)
        if self._boundary == self._steps:
            self._obey(earlier, released)
        if not (events or earlier or released):
            return None
        return StepReport(
            worker=self.name,
            seconds=0.0,
            events=tuple(events),
            released=tuple(released),
            num_stalled=len(self._stalled),
            number=next(self._numbers),
            earlier=tuple(earlier),
        )

    def die(self, now: float) -> StepReport:
        """Return a last report: all tokens that it has sent to clients."""
        if self._active:
            self._make(self._completed(now), now)
        earlier = [self._catch_up(sequence) for sequence in self._active.values()]
        for sequence in list(self._active.values()):
            self._pause(sequence)
        return StepReport(
            worker=self.name,
            seconds=0.0,
            events=(),
            released=(),
            number=next(self._numbers),
            earlier=tuple(e for e in earlier if e is not None),
        )

    def _next_step(self) -> int:
        due = self._due
        while due and (due[0][2].due != due[0][0] or due[0][2].ref.epoch not in self._active):
            heappop(due)
        return min(due[0][0], self._boundary) if due else self._boundary

    def _seconds(self, num_steps: int) -> float:
        n = len(self._active)
        if not n or not num_steps:
            return 0.0
        attended = num_steps * self._context + n * num_steps * (num_steps - 1) // 2
        return num_steps * self._step_s[n] + self._per_token * attended

    def _completed(self, now: float) -> int:
        """Return how many steps have ended since the clock was set."""
        spent = (now - self._clock) / self._slowness
        n = len(self._active)
        a = self._per_token * n / 2
        b = self._step_s[n] + self._per_token * self._context - a
        k = int((sqrt(b * b + 4 * a * spent) - b) / (2 * a)) if a > 0 else int(spent / b)
        while k > 0 and self._seconds(k) > spent:
            k -= 1
        while self._seconds(k + 1) <= spent:
            k += 1
        return k

    def _obey_soon(self, now: float) -> None:
        if self._boundary == _NEVER:
            if self._active:
                self._boundary = self._steps + self._completed(now) + 1
            else:
                self._clock, self._boundary = now, self._steps

    def _make(self, num_steps: int, now: float) -> None:
        n = len(self._active)
        if num_steps and n:
            first = (self._step_s[n] + self._per_token * self._context) * self._slowness
            last = first + self._per_token * n * (num_steps - 1) * self._slowness
            self.busy_s += num_steps * (first + last) / 2
            if self._num_fresh:
                # For these the first gap was longer than the step, and the sink has had it.
                self._sink.steps(1, n - self._num_fresh, first, first, now)
                num_left, self._num_fresh = num_steps - 1, 0
            else:
                num_left = num_steps
            if num_left:
                self._sink.steps(num_left, n, first, last, now)
            self._context += n * num_steps
        self._steps += num_steps
        self._clock = now

    def _attend_to(
        self,
        sequence: _Sequence,
        events: list[TokenEvent],
        earlier: list[EarlierTokens],
        released: list[SequenceRef],
    ) -> None:
        """Report a sequence that ends, or nears the end of its pages; take it out of the steps if it must wait."""
        made = self._steps - sequence.joined_at
        has_ended = sequence.num_tokens + made >= sequence.max_tokens
        tokens = self._catch_up(sequence, but=int(has_ended))
        if tokens is not None:
            earlier.append(tokens)
        if has_ended:
            events.append(
                TokenEvent(
                    request_id=sequence.ref.request_id,
                    index=sequence.num_outputs + made - 1,
                    epoch=sequence.ref.epoch,
                    token_id=0,
                    finish_reason="length",
                )
            )
            released.append(sequence.ref)
            self._take_out(sequence)
        elif sequence.num_tokens + made > sequence.num_pages * self._page_size:
            self._pause(sequence)
            self._stalled[sequence.ref] = sequence
        else:
            self._file(sequence)

    def _catch_up(self, sequence: _Sequence, but: int = 0) -> EarlierTokens | None:
        """Return the tokens of a running sequence that were not reported, but for the newest `but`."""
        made = self._steps - sequence.joined_at - but
        num_new = made - sequence.num_reported
        sequence.num_reported = made
        return EarlierTokens(ref=sequence.ref, token_ids=(0,) * num_new) if num_new > 0 else None

    def _obey(self, earlier: list[EarlierTokens], released: list[SequenceRef]) -> None:
        """Let those leave and join that are to."""
        self._boundary = _NEVER
        if self._leaving:
            leaving, self._leaving = dict.fromkeys(self._leaving), []
            self._joining, dropped = (
                [s for s in self._joining if s.ref not in leaving],
                [s.ref for s in self._joining if s.ref in leaving],
            )
            for sequence in [self._active[ref.epoch] for ref in leaving if ref.epoch in self._active]:
                tokens = self._catch_up(sequence)
                if tokens is not None:
                    earlier.append(tokens)
                self._pause(sequence)
                dropped.append(sequence.ref)
            dropped += [ref for ref in leaving if self._stalled.pop(ref, None) is not None]
            released += sorted(dropped, key=lambda ref: ref.epoch)
        joining, self._joining = self._joining, []
        for sequence in joining:
            sequence.joined_at, sequence.num_reported = self._steps, 0
            self._active[sequence.ref.epoch] = sequence
            self._context += sequence.num_tokens
            self._file(sequence)
        if joining:
            ends_at = self._clock + self._seconds(1) * self._slowness
            for sequence in joining:
                self._sink.took_up(sequence.ref.request_id, ends_at)
            self._num_fresh = len(joining)

    def _pause(self, sequence: _Sequence) -> None:
        """Take a sequence out that has not ended."""
        if self._steps > sequence.joined_at:
            self._sink.left(sequence.ref.request_id, self._clock)
        self._take_out(sequence)

    def _take_out(self, sequence: _Sequence) -> None:
        made = self._steps - sequence.joined_at
        del self._active[sequence.ref.epoch]
        self._context -= sequence.num_tokens + made
        sequence.num_tokens += made
        sequence.num_outputs += made

    def _file(self, sequence: _Sequence) -> None:
        """Note after how many steps something is to be done about a running sequence."""
        tokens = sequence.num_tokens + self._steps - sequence.joined_at
        room_ends = sequence.num_pages * self._page_size
        due = self._steps + sequence.max_tokens - tokens
        if room_ends < sequence.max_tokens:
            near = self._steps + room_ends - _REPORT_AHEAD_TOKENS - tokens
            # Near the end of its pages it is heard of after each step.
            heard_of = -(-near // _REPORT_STEPS) * _REPORT_STEPS if near > self._steps else self._steps + 1
            due = min(due, heard_of)
        if due != sequence.due:
            sequence.due = due
            heappush(self._due, (due, next(self._order), sequence))
