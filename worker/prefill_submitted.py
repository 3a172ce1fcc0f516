"""A prefill batch under way: what it gives, and where its pages are."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from graphs.buckets import Segment
from graphs.programs import NO_REPORT, Ticket
from scheduler.errors import PurefillError
from scheduler.messages import (
    HandoffFailure,
    HandoffResult,
    PrefillBatch,
    PrefillItem,
    PrefillOutcome,
    PrefillResult,
    Request,
)
from worker.flops import PrefillCost
from worker.handoff.base import Arriving, Handoff, Writing
from worker.sampling.logprobs import read_logprobs, read_prompt_report
from worker.sequences import finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The passes of a batch under way."""

    refused: Mapping[str, PurefillError]
    """Why some of its items are not computed, by request id."""
    passes: Sequence[tuple[Sequence[Segment], Ticket]]
    prompt_reports: Mapping[str, Sequence[torch.Tensor]]
    """By request id, of those that asked for logprobs of the prompt: one tensor a pass."""


def draft_result(
    worker: str, batch: PrefillBatch, launched: Launched, *, cost: PrefillCost, eager_reason: str | None
) -> PrefillResult:
    """Return what is known of a batch's result as soon as it is launched, so that the device need not wait for it."""
    buckets: Counter[str] = Counter()
    num_tokens = num_positions = 0
    for segments, ticket in launched.passes:
        buckets[str(ticket.bucket)] += 1
        num_tokens += sum([segment.end - segment.start for segment in segments])
        num_positions += ticket.bucket.num_tokens
    eager_steps = {
        eager_reason: len(launched.passes),
        "prompt_logprobs": sum(map(len, launched.prompt_reports.values())),
    }
    return PrefillResult(
        batch_id=batch.batch_id,
        worker=worker,
        outcomes=(),
        num_tokens=num_tokens,
        padding_tokens=num_positions - num_tokens,
        replays={} if eager_reason else dict(buckets),
        eager_steps={reason: steps for reason, steps in eager_steps.items() if reason and steps},
        flops=cost.flops(segments for segments, _ in launched.passes),
        num_query_tokens=sum(
            [
                item.request.num_prefill_tokens
                for item in batch.items
                if item.request.prefix and not item.request.reports_prompt
            ]
        ),
    )


class DeviceTime:
    """Owns since when the device computes nothing of ours. Batches run one after the other, as they were started."""

    def __init__(self) -> None:
        self._free_since = float("-inf")

    def ended(self, started: float) -> float:
        """The oldest batch, started then, has ended; return its seconds, without its wait for the one before it."""
        begun, self._free_since = max(started, self._free_since), time.perf_counter()
        return self._free_since - begun


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedPrefill:
    """A batch under way."""

    batch: PrefillBatch
    launched: Launched
    handoff: Handoff
    writing: Writing
    pending: dict[int, list[PendingHandoff]]
    """Where the engine keeps what is still on its way when the result is there."""
    draft: PrefillResult
    """What is known of the result before it is there."""
    started: float
    device_time: DeviceTime

    def result(self) -> PrefillResult:
        """Wait for the batch and return what became of its items."""
        try:
            chosen = self._take_passes()
        except BaseException:
            self.handoff.finish(self.writing)  # Whatever it holds, its pages come back.
            raise
        seconds = self.device_time.ended(self.started)
        pending = PendingHandoff(
            worker=self.draft.worker,
            batch_id=self.batch.batch_id,
            items=self.batch.items,
            transport=self.handoff.transport,
            arriving=self.handoff.finish(self.writing),
        )
        failed = dict(self.launched.refused)
        # An error that is known now spares the client a token that would be computed again.
        is_known = pending.arriving.done()
        if is_known:
            errors = pending.arriving.result().errors
            failed |= {self.batch.items[i].request.request_id: error for i, error in errors.items()}
        else:
            self.pending.setdefault(self.batch.batch_id, []).append(pending)
        num_cached = self.writing.num_cached or [0] * len(self.batch.items)
        return replace(
            self.draft,
            outcomes=tuple(
                [
                    self._outcome(item.request, count, chosen, failed)
                    for item, count in zip(self.batch.items, num_cached, strict=True)
                ]
            ),
            seconds=seconds,
            handoff=pending.result() if is_known else None,
            handoff_pending=not is_known,
        )

    def _take_passes(self) -> dict[str, PrefillOutcome]:
        """Wait for the passes; return what they chose, by request id."""
        chosen: dict[str, PrefillOutcome] = {}
        for segments, ticket in self.launched.passes:
            # Only the last chunk of a prompt has seen all of it: later passes overwrite earlier choices.
            tokens, report = ticket.result(), ticket.report()
            for i, (segment, token) in enumerate(zip(segments, tokens, strict=True)):
                request = self.batch.items[segment.item].request
                chosen[request.request_id] = _chosen(request, token, report[i] if len(report) else None)
        return chosen

    def _outcome(
        self,
        request: Request,
        num_cached: int,
        chosen: Mapping[str, PrefillOutcome],
        failed: Mapping[str, PurefillError],
    ) -> PrefillOutcome:
        error = failed.get(request.request_id)
        if error is not None:
            return PrefillOutcome(
                request_id=request.request_id, error_label=error.label, error_message=str(error)
            )
        outcome = chosen[request.request_id]
        if num_cached:
            outcome = replace(outcome, num_cached_tokens=num_cached)
        report = self.launched.prompt_reports.get(request.request_id)
        if report is None:
            return outcome
        num_top = request.sampling.num_logprobs or 0
        rows = torch.cat([*report]).cpu().numpy() if report else NO_REPORT
        return replace(outcome, prompt_logprobs=read_prompt_report(rows, request.prompt_token_ids, num_top))


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingHandoff:
    """Pages on their way."""

    worker: str
    batch_id: int
    items: Sequence[PrefillItem]
    transport: str
    arriving: Arriving

    def result(self) -> HandoffResult:
        """Wait for them."""
        arrival = self.arriving.result()
        return HandoffResult(
            batch_id=self.batch_id,
            worker=self.worker,
            transport=self.transport,
            failures=tuple(
                HandoffFailure(
                    request_id=self.items[i].request.request_id,
                    error_label=error.label,
                    error_message=str(error),
                )
                for i, error in arrival.errors.items()
            ),
            num_bytes=arrival.num_bytes,
            seconds=arrival.seconds,
        )


def _chosen(request: Request, token_id: int, report: NDArray[np.int32] | None) -> PrefillOutcome:
    return PrefillOutcome(
        request_id=request.request_id,
        token_id=token_id,
        finish_reason=finish_reason(request, len(request.output_token_ids), token_id),
        logprobs=read_logprobs(request.sampling, report, token_id),
    )
