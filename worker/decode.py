"""Decode: continuous batching over the KV pages that this worker owns."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from graphs.buckets import StepLadder
from graphs.layout import SlotInput
from scheduler.errors import InvalidRequestError, PurefillError
from scheduler.messages import DecodeStart, Lease, Request, SequenceRef, TokenEvent
from worker.kv_pool import KVPool
from worker.model import Model
from worker.model_runner import ModelRunner
from worker.outputs import OutputState, slot_input
from worker.sampling.logprobs import read_logprobs
from worker.sequences import finish_reason

_MAX_CANCELLED_EARLY = 4096
"""Far more than can be on their way at once."""


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """A running sequence. The KV of its newest token is not in the pages yet: the next step writes it."""

    request: Request
    lease: Lease
    num_cached: int
    newest_token: int
    num_outputs: int
    state: OutputState | None = None

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
    """Sequences whose pages are touched no more."""


class DecodeEngine:
    """Owns the running sequences. Sequences join and leave between steps; one step makes one token for each."""

    def __init__(self, model: Model, pool: KVPool, *, max_num_seqs: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._runner = ModelRunner(model, pool, StepLadder(max_num_seqs))
        self._running: dict[SequenceRef, _Sequence] = {}
        self._cancelled_early: dict[SequenceRef, None] = {}
        """Cancelled before their start arrived; calls from the scheduler may overtake each other."""
        self._released: list[SequenceRef] = []
        self._failed: list[tuple[str, TokenEvent]] = []

    def prepare(self) -> None:
        """Capture every bucket."""
        self._runner.prepare()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to report."""
        return bool(self._running or self._released or self._failed)

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return len(self._running)

    def add(self, start: DecodeStart) -> None:
        """Take up a prefilled sequence. One whose lease is stale ends with an error instead."""
        request = start.request
        sequence = _Sequence(
            request=request,
            lease=start.lease,
            num_cached=request.num_prefill_tokens,
            newest_token=start.first_token_id,
            num_outputs=len(request.output_token_ids) + 1,
        )
        if sequence.ref in self._cancelled_early:
            del self._cancelled_early[sequence.ref]
            self._released.append(sequence.ref)
            return
        error: PurefillError | None = self._pool.check([start.lease]).get(0)
        try:
            sequence.state = self._runner.track(request)
        except InvalidRequestError as invalid:
            error = invalid
        if error is not None:
            event = TokenEvent(
                request_id=request.request_id,
                index=sequence.num_outputs,
                error_label=error.label,
                error_message=str(error),
            )
            self._failed.append((request.api_server, event))
            self._released.append(sequence.ref)
            return
        if sequence.state is not None:
            sequence.state.accept(start.first_token_id)
        self._running[sequence.ref] = sequence

    def cancel(self, ref: SequenceRef) -> None:
        """Drop a sequence before the next step; its pages are reported as released then."""
        if self._running.pop(ref, None) is None:
            self._cancelled_early[ref] = None
            # Some had ended by themselves just before, and no start will come for them.
            if len(self._cancelled_early) > _MAX_CANCELLED_EARLY:
                del self._cancelled_early[next(iter(self._cancelled_early))]
        else:
            self._released.append(ref)

    def step(self) -> StepOutcome:
        """Make one token for each running sequence, up to `max_num_seqs` of them, oldest first."""
        started = time.perf_counter()
        outcome = StepOutcome(seconds=0.0, events=self._failed, released=self._released)
        self._failed, self._released = [], []
        batch = list(self._running.values())[: self._max_num_seqs]
        if batch:
            ticket = self._runner.submit([_slot(sequence) for sequence in batch])
            report = ticket.report()
            for i, (sequence, token) in enumerate(zip(batch, ticket.result(), strict=True)):
                self._advance(sequence, token, report[i] if len(report) else None, outcome)
        outcome.seconds = time.perf_counter() - started
        return outcome

    def _advance(
        self, sequence: _Sequence, token: int, report: NDArray[np.int32] | None, outcome: StepOutcome
    ) -> None:
        request, index = sequence.request, sequence.num_outputs
        reason = finish_reason(request, index, token)
        event = TokenEvent(
            request_id=request.request_id,
            index=index,
            token_id=token,
            finish_reason=reason,
            logprobs=read_logprobs(request.sampling, report, token),
        )
        if sequence.state is not None:
            sequence.state.accept(token)
        outcome.events.append((request.api_server, event))
        sequence.num_cached += 1
        sequence.num_outputs += 1
        sequence.newest_token = token
        if reason is not None:
            del self._running[sequence.ref]
            outcome.released.append(sequence.ref)


def _slot(sequence: _Sequence) -> SlotInput:
    return slot_input(
        sequence.request,
        (sequence.newest_token,),
        num_cached=sequence.num_cached,
        page_ids=sequence.lease.page_ids,
        output_index=sequence.num_outputs,
        state=sequence.state,
    )
