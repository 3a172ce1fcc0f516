"""Decode: continuous batching over the KV pages that this worker owns.

On a GPU a step is launched before the tokens of the one before are known here: each sequence's token is taken from
where that step leaves it on the device. So the host works on one step's tokens while the next is computed. A sequence
that turns out to have ended takes part in one step too many: its result is dropped, and its pages are released after
that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphs.buckets import StepLadder
from graphs.layout import SlotInput
from graphs.programs import Ticket
from graphs.runner import BucketReport
from scheduler.errors import InvalidRequestError
from scheduler.messages import DecodeStart, Lease, PageGrant, Request, SequenceRef, Timing, TokenEvent
from worker.kv_pool import KVPool
from worker.model import Model
from worker.model_runner import ModelRunner
from worker.outputs import OutputState, needs_host_tokens, slot_input
from worker.sampling.logprobs import read_logprobs
from worker.sequences import finish_reason

_MAX_EARLY = 4096
"""Far more calls than can be on their way at once."""


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """A running sequence. The KV of its newest token is not in the pages yet: the next step writes it."""

    request: Request
    lease: Lease
    page_ids: list[int]
    """Those of the lease, and those granted since."""
    num_cached: int
    newest_token: int
    num_outputs: int
    state: OutputState | None = None
    handoff_s: float | None = None
    """What it took to bring its pages here; None once that was reported."""
    row: int = -1
    """Where it stands in the step under way that computes its next token; -1: in none."""
    ended: bool = False
    """Its tokens are of no interest any more."""

    @property
    def ref(self) -> SequenceRef:
        return SequenceRef(request_id=self.request.request_id, epoch=self.lease.epoch)


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """What one call of `DecodeEngine.step` produced."""

    seconds: float
    events: list[tuple[str, TokenEvent]] = field(default_factory=list)
    """(ApiServer name, event) of every sequence of the step."""
    released: list[SequenceRef] = field(default_factory=list)
    """Sequences whose pages are touched no more. Those that have not ended are to be computed again."""
    num_stalled: int = 0
    """Sequences that had no room for another token."""
    bucket: str = ""
    """In which the step ran; empty if nothing was computed."""
    eager_reason: str | None = None
    """Why it ran without a graph, if it did."""


class DecodeEngine:
    """Owns the running sequences. Sequences join and leave between steps; one step makes one token for each."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        *,
        max_num_seqs: int,
        use_graphs: bool = True,
        looks_ahead: bool | None = None,
    ) -> None:
        """`looks_ahead` launches a step before the last one's tokens are known; None: where that saves time."""
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._looks_ahead = pool.device.type == "cuda" if looks_ahead is None else looks_ahead
        self._runner = ModelRunner(model, pool, StepLadder(max_num_seqs), use_graphs=use_graphs, steps=True)
        self._under_way: _Step | None = None
        self._running: dict[SequenceRef, _Sequence] = {}
        # What arrived before a sequence's start: calls from the scheduler may overtake each other.
        self._cancelled_early: dict[SequenceRef, None] = {}
        self._grants_early: dict[tuple[SequenceRef, int], PageGrant] = {}
        """By sequence, and how many pages it has then."""
        self._released: list[SequenceRef] = []
        self._failed: list[tuple[str, TokenEvent]] = []

    def prepare(self) -> tuple[BucketReport, ...]:
        """Capture every bucket; return what each took."""
        return self._runner.prepare()

    def reset(self) -> None:
        """Drop all sequences, and what has come for those that have not. Their pages are touched no more."""
        if self._under_way is not None:
            self._under_way.ticket.result()
            self._under_way = None
        for kept in (self._running, self._cancelled_early, self._grants_early, self._released, self._failed):
            kept.clear()
        self._pool.num_running = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to report."""
        if self._released or self._failed or self._under_way is not None:
            return True
        return any(self._can_step(sequence) for sequence in self._running.values())

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return len(self._running)

    def add(self, start: DecodeStart) -> None:
        """Take up a prefilled sequence. One whose lease is stale is released at once."""
        request = start.request
        sequence = _Sequence(
            request=request,
            lease=start.lease,
            page_ids=list(start.lease.page_ids),
            num_cached=request.num_prefill_tokens,
            newest_token=start.first_token_id,
            num_outputs=len(request.output_token_ids) + 1,
            handoff_s=start.handoff_s,
        )
        if sequence.ref in self._cancelled_early:
            del self._cancelled_early[sequence.ref]
            self._released.append(sequence.ref)
            return
        if self._pool.check([start.lease]):
            self._released.append(sequence.ref)
            return
        try:
            sequence.state = self._runner.track(request)
            if sequence.state is not None:
                sequence.state.accept(start.first_token_id)
        except InvalidRequestError as error:
            self._failed.append(_failure(sequence, error))
            self._released.append(sequence.ref)
            return
        self._running[sequence.ref] = sequence
        self._pool.num_running = len(self._running)
        self._take_grants(sequence)

    def grow(self, grant: PageGrant) -> None:
        """Give a sequence more pages."""
        self._grants_early[grant.ref, grant.first_page] = grant
        sequence = self._running.get(grant.ref)
        if sequence is not None:
            self._take_grants(sequence)
        else:
            _forget_oldest(self._grants_early)

    def _take_grants(self, sequence: _Sequence) -> None:
        """Append what was granted, in the order of the pages. A sequence of which a page is refused is released."""
        while grant := self._grants_early.pop((sequence.ref, len(sequence.page_ids)), None):
            granted = Lease(
                decode_worker=sequence.lease.decode_worker, epoch=grant.epoch, page_ids=grant.page_ids
            )
            if self._pool.claim([granted]):
                self._drop(sequence)
                return
            sequence.page_ids += grant.page_ids

    def cancel(self, ref: SequenceRef) -> None:
        """Drop a sequence before the next step; its pages are reported as released once no step touches them."""
        sequence = self._running.get(ref)
        if sequence is not None:
            self._drop(sequence)
            return
        self._cancelled_early[ref] = None
        _forget_oldest(self._cancelled_early)

    def _drop(self, sequence: _Sequence) -> None:
        del self._running[sequence.ref]
        sequence.ended = True
        if sequence.row < 0:
            self._released.append(sequence.ref)

    def step(self) -> StepOutcome:
        """Make one token for each sequence that has room for it, up to `max_num_seqs` of them, oldest first."""
        started = time.perf_counter()
        outcome = StepOutcome(seconds=0.0, events=self._failed, released=self._released)
        self._failed, self._released = [], []
        step = self._under_way or self._launch()
        self._under_way = None
        if step is not None:
            for row, sequence in enumerate(step.sequences):
                sequence.row = row
        outcome.num_stalled = sum(s.row < 0 and not self._has_room(s) for s in self._running.values())
        if step is not None:
            if self._looks_ahead:
                self._under_way = self._launch()
            self._take(step, outcome)
        self._pool.num_running = len(self._running)
        outcome.seconds = time.perf_counter() - started
        return outcome

    def _launch(self) -> _Step | None:
        """Start a step of all that can take part, or return None if nobody can, or one must be waited for."""
        sequences = [sequence for sequence in self._running.values() if self._can_step(sequence)]
        sequences = sequences[: self._max_num_seqs]
        if not sequences or any(s.row >= 0 and needs_host_tokens(s.request.sampling) for s in sequences):
            return None
        return _Step(sequences, self._runner.submit([_slot(sequence) for sequence in sequences]))

    def _take(self, step: _Step, outcome: StepOutcome) -> None:
        """Wait for a step, and take its tokens."""
        outcome.bucket, outcome.eager_reason = str(step.ticket.bucket), self._runner.eager_reason
        following = () if self._under_way is None else self._under_way.sequences
        next_rows = {id(sequence): row for row, sequence in enumerate(following)}
        tokens, report = step.ticket.result(), step.ticket.report()
        for row, (sequence, token) in enumerate(zip(step.sequences, tokens, strict=True)):
            sequence.row = next_rows.get(id(sequence), -1)
            if not sequence.ended:
                self._advance(sequence, token, report[row] if len(report) else None, outcome)
            if sequence.ended and sequence.row < 0:
                outcome.released.append(sequence.ref)

    def _can_step(self, sequence: _Sequence) -> bool:
        """Whether it may take part in the next step: it has room, and the step under way will not end it."""
        is_last = sequence.row >= 0 and sequence.num_outputs + 1 >= sequence.request.sampling.max_tokens
        return not is_last and self._has_room(sequence)

    def _has_room(self, sequence: _Sequence) -> bool:
        """Whether there is a place for the KV of its newest token, which may still be under way."""
        return sequence.num_cached + (sequence.row >= 0) < len(sequence.page_ids) * self._pool.page_size

    def _advance(
        self, sequence: _Sequence, token: int, report: NDArray[np.int32] | None, outcome: StepOutcome
    ) -> None:
        request, index = sequence.request, sequence.num_outputs
        reason = finish_reason(request, index, token)
        event = TokenEvent(
            request_id=request.request_id,
            index=index,
            epoch=sequence.lease.epoch,
            token_id=token,
            finish_reason=reason,
            logprobs=read_logprobs(request.sampling, report, token),
            timing=None if sequence.handoff_s is None else Timing(handoff_s=sequence.handoff_s),
        )
        sequence.handoff_s = None
        outcome.events.append((request.api_server, event))
        sequence.num_cached += 1
        sequence.num_outputs += 1
        sequence.newest_token = token
        if reason is None and sequence.state is not None:
            try:
                sequence.state.accept(token)
            except InvalidRequestError as error:
                outcome.events.append(_failure(sequence, error))
                sequence.ended = True
        elif reason is not None:
            sequence.ended = True
        if sequence.ended:
            del self._running[sequence.ref]


@dataclass(frozen=True, slots=True)
class _Step:
    """A step under way. Row i of its result is the token of sequence i."""

    sequences: Sequence[_Sequence]
    ticket: Ticket


def _forget_oldest(early: dict[Any, Any]) -> None:
    """Keep what came before its sequence's start from growing without end."""
    # Some sequences had ended by themselves just before, and no start will come for them.
    if len(early) > _MAX_EARLY:
        del early[next(iter(early))]


def _failure(sequence: _Sequence, error: InvalidRequestError) -> tuple[str, TokenEvent]:
    """Return the event that ends a sequence with an error, and the ApiServer that it goes to."""
    request = sequence.request
    event = TokenEvent(
        request_id=request.request_id,
        index=sequence.num_outputs,
        epoch=sequence.lease.epoch,
        error_label=error.label,
        error_message=str(error),
    )
    return request.api_server, event


def _slot(sequence: _Sequence) -> SlotInput:
    """Return the sequence's part of the next step, in which it goes on from the one under way, if it is in that."""
    is_ahead = sequence.row >= 0
    return slot_input(
        sequence.request,
        (-1 - sequence.row if is_ahead else sequence.newest_token,),
        num_cached=sequence.num_cached + is_ahead,
        page_ids=sequence.page_ids,
        output_index=sequence.num_outputs + is_ahead,
        state=sequence.state,
    )
