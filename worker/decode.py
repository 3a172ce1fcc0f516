"""Decode: continuous batching over the KV pages that this worker owns."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from graphs.buckets import StepLadder
from graphs.layout import SlotInput
from scheduler.messages import DecodeStart, Lease, PageGrant, Request, SequenceRef, TokenEvent
from worker.kv_pool import KVPool
from worker.model import Model
from worker.model_runner import ModelRunner, slot_input
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


class DecodeEngine:
    """Owns the running sequences. Sequences join and leave between steps; one step makes one token for each."""

    def __init__(self, model: Model, pool: KVPool, *, max_num_seqs: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._runner = ModelRunner(model, pool, StepLadder(max_num_seqs))
        self._running: dict[SequenceRef, _Sequence] = {}
        # What arrived before a sequence's start: calls from the scheduler may overtake each other.
        self._cancelled_early: dict[SequenceRef, None] = {}
        self._grants_early: dict[tuple[SequenceRef, int], PageGrant] = {}
        """By sequence, and how many pages it has then."""
        self._released: list[SequenceRef] = []

    def prepare(self) -> None:
        """Capture every bucket."""
        self._runner.prepare()

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to report."""
        return bool(self._released) or any(self._has_room(sequence) for sequence in self._running.values())

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
        )
        if sequence.ref in self._cancelled_early:
            del self._cancelled_early[sequence.ref]
            self._released.append(sequence.ref)
        elif self._pool.check([start.lease]):
            self._released.append(sequence.ref)
        else:
            self._running[sequence.ref] = sequence
            self._take_grants(sequence)

    def grow(self, grant: PageGrant) -> None:
        """Give a sequence more pages."""
        self._grants_early[grant.ref, grant.first_page] = grant
        sequence = self._running.get(grant.ref)
        if sequence is not None:
            self._take_grants(sequence)
        elif len(self._grants_early) > _MAX_EARLY:
            # Some had ended by themselves just before, and no start will come for them.
            del self._grants_early[next(iter(self._grants_early))]

    def _take_grants(self, sequence: _Sequence) -> None:
        """Append what was granted, in the order of the pages. A sequence of which a page is refused is released."""
        while grant := self._grants_early.pop((sequence.ref, len(sequence.page_ids)), None):
            granted = Lease(
                decode_worker=sequence.lease.decode_worker, epoch=grant.epoch, page_ids=grant.page_ids
            )
            if self._pool.claim([granted]):
                del self._running[sequence.ref]
                self._released.append(sequence.ref)
                return
            sequence.page_ids += grant.page_ids

    def cancel(self, ref: SequenceRef) -> None:
        """Drop a sequence before the next step; its pages are reported as released then."""
        if self._running.pop(ref, None) is None:
            self._cancelled_early[ref] = None
            # Some had ended by themselves just before, and no start will come for them.
            if len(self._cancelled_early) > _MAX_EARLY:
                del self._cancelled_early[next(iter(self._cancelled_early))]
        else:
            self._released.append(ref)

    def step(self) -> StepOutcome:
        """Make one token for each sequence that has room for it, up to `max_num_seqs` of them, oldest first."""
        started = time.perf_counter()
        ready = [sequence for sequence in self._running.values() if self._has_room(sequence)]
        outcome = StepOutcome(
            seconds=0.0, released=self._released, num_stalled=len(self._running) - len(ready)
        )
        self._released = []
        batch = ready[: self._max_num_seqs]
        if batch:
            tokens = self._runner.submit([_slot(sequence) for sequence in batch]).result()
            for sequence, token in zip(batch, tokens, strict=True):
                self._advance(sequence, token, outcome)
        outcome.seconds = time.perf_counter() - started
        return outcome

    def _has_room(self, sequence: _Sequence) -> bool:
        """Whether there is a place for the KV of its newest token."""
        return sequence.num_cached < len(sequence.page_ids) * self._pool.page_size

    def _advance(self, sequence: _Sequence, token: int, outcome: StepOutcome) -> None:
        request, index = sequence.request, sequence.num_outputs
        reason = finish_reason(request, index, token)
        event = TokenEvent(
            request_id=request.request_id,
            index=index,
            epoch=sequence.lease.epoch,
            token_id=token,
            finish_reason=reason,
        )
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
        page_ids=sequence.page_ids,
        output_index=sequence.num_outputs,
    )
