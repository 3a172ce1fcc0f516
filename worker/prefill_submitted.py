"""A prefill batch under way: what it gives, and where its pages are."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
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
from worker.handoff.base import Arrival, Handoff, Writing
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

    worker: str
    batch: PrefillBatch
    launched: Launched
    handoff: Handoff
    writing: Writing
    arrivals: dict[int, list[Arriving]]
    """Where the engine keeps what is still on its way when the result is there."""
    eager_reason: str | None
    cost: PrefillCost
    started: float
    device_time: DeviceTime

    def result(self) -> PrefillResult:
        """Wait for the batch and return what became of its items."""
        chosen: dict[str, PrefillOutcome] = {}
        buckets: Counter[str] = Counter()
        try:
            num_tokens, padding = self._take_passes(chosen, buckets)
        except BaseException:
            self.handoff.finish(self.writing)  # Whatever it holds, its pages come back.
            raise
        seconds = self.device_time.ended(self.started)
        arriving = Arriving(
            worker=self.worker,
            batch_id=self.batch.batch_id,
            items=self.batch.items,
            transport=self.handoff.transport,
            arrival=self.handoff.finish(self.writing),
        )
        failed = dict(self.launched.refused)
        # An error that is known now spares the client a token that would be computed again.
        is_pending = not arriving.arrival.done()
        if is_pending:
            self.arrivals.setdefault(self.batch.batch_id, []).append(arriving)
        else:
            errors = arriving.arrival.result().errors
            failed |= {self.batch.items[i].request.request_id: error for i, error in errors.items()}
        eager_steps = {
            self.eager_reason: len(self.launched.passes),
            "prompt_logprobs": sum(map(len, self.launched.prompt_reports.values())),
        }
        return PrefillResult(
            batch_id=self.batch.batch_id,
            worker=self.worker,
            outcomes=tuple(
                self._outcome(item.request, num_cached, chosen, failed)
                for item, num_cached in zip(
                    self.batch.items,
                    self.writing.num_cached or [0] * len(self.batch.items),
                    strict=True,
                )
            ),
            num_tokens=num_tokens,
            padding_tokens=padding,
            replays={} if self.eager_reason else dict(buckets),
            eager_steps={reason: steps for reason, steps in eager_steps.items() if reason and steps},
            seconds=seconds,
            flops=self.cost.flops(segments for segments, _ in self.launched.passes),
            handoff=None if is_pending else arriving.result(),
            handoff_pending=is_pending,
            num_query_tokens=sum(
                item.request.num_prefill_tokens
                for item in self.batch.items
                if item.request.prefix and not item.request.reports_prompt
            ),
        )

    def _take_passes(self, chosen: dict[str, PrefillOutcome], buckets: Counter[str]) -> tuple[int, int]:
        """Wait for the passes; return the tokens that were computed, and those that were padding."""
        num_tokens = padding = 0
        for segments, ticket in self.launched.passes:
            # Only the last chunk of a prompt has seen all of it: later passes overwrite earlier choices.
            report = ticket.report()
            for i, (segment, token) in enumerate(zip(segments, ticket.result(), strict=True)):
                request = self.batch.items[segment.item].request
                chosen[request.request_id] = _chosen(request, token, report[i] if len(report) else None)
            pass_tokens = sum(segment.end - segment.start for segment in segments)
            buckets[str(ticket.bucket)] += 1
            num_tokens += pass_tokens
            padding += ticket.bucket.num_tokens - pass_tokens
        return num_tokens, padding

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
class Arriving:
    """Pages on their way."""

    worker: str
    batch_id: int
    items: Sequence[PrefillItem]
    transport: str
    arrival: Future[Arrival]

    def result(self) -> HandoffResult:
        """Wait for them."""
        arrival = self.arrival.result()
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
