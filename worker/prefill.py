"""Prefill: turns a batch of prompts into first tokens, and into KV in the pages that were leased for them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from graphs.buckets import BucketLadder
from graphs.layout import SlotInput
from graphs.programs import NO_REPORT, Ticket
from graphs.runner import BucketReport
from scheduler.errors import InvalidRequestError, PurefillError
from scheduler.messages import PoolHandle, PrefillBatch, PrefillItem, PrefillOutcome, PrefillResult, Request
from worker.kv_pool import KVPool
from worker.model import Model
from worker.model_runner import ModelRunner
from worker.outputs import OutputState, slot_input
from worker.sampling.logprobs import read_logprobs, read_prompt_report
from worker.sequences import finish_reason


class Segment(NamedTuple):
    """Tokens ``start:end`` of one item of a batch, computed in one pass."""

    item: int
    start: int
    end: int


def plan_passes(lengths: Sequence[int], *, max_tokens: int, max_slots: int) -> list[list[Segment]]:
    """Cut a batch into passes that each fit the largest bucket, in order.

    A prompt longer than `max_tokens` is cut into chunks; any other stays whole. A chunk attends to the earlier
    ones through their pages, so a prompt has at most one chunk in a pass.
    """
    passes: list[list[Segment]] = []
    room = 0
    for item, length in enumerate(lengths):
        start = 0
        while start < length:
            size = min(length - start, max_tokens)
            if size > room or len(passes[-1]) == max_slots:
                passes.append([])
                room = max_tokens
            passes[-1].append(Segment(item, start, start + size))
            room -= size
            start += size
    return passes


class PrefillEngine:
    """Owns the model and, for each decode worker's pool, the static buffers and graphs that write into it."""

    def __init__(self, name: str, model: Model, ladder: BucketLadder, *, use_graphs: bool = True) -> None:
        self.name = name
        self.model = model
        self._ladder = ladder
        self._use_graphs = use_graphs
        self._pools: dict[str, KVPool] = {}
        self._runners: dict[str, ModelRunner] = {}

    def attach(self, handle: PoolHandle) -> tuple[BucketReport, ...]:
        """Open a decode worker's pool and do as `attach_pool`.

        Raises `ConfigError` if the pool does not fit this model.
        """
        return self.attach_pool(
            handle.decode_worker, KVPool.open(self.model.kv_spec, handle, self.model.device)
        )

    def attach_pool(self, decode_worker: str, pool: KVPool) -> tuple[BucketReport, ...]:
        """Capture the graphs that write into a decode worker's pool; return what each bucket took."""
        runner = ModelRunner(self.model, pool, self._ladder, use_graphs=self._use_graphs)
        self._pools[decode_worker] = pool
        self._runners[decode_worker] = runner
        return runner.prepare()

    @property
    def is_decoding(self) -> bool:
        """Whether any sequence decodes in the pools."""
        return any(pool.num_running for pool in self._pools.values())

    @property
    def uses_graphs(self) -> bool:
        """Whether batches are replays of captured CUDA graphs."""
        on_gpu = self.model.device.type == "cuda"
        return on_gpu and all(runner.eager_reason is None for runner in self._runners.values())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all static buffers and graphs."""
        return sum(runner.size_bytes for runner in self._runners.values())

    def run(self, batch: PrefillBatch) -> PrefillResult:
        """Compute a batch. An item whose lease is stale fails alone; the others do not notice."""
        return self.submit(batch).result()

    def submit(self, batch: PrefillBatch) -> SubmittedPrefill:
        """Start a batch. On a GPU this returns before it is computed, so that the next one can be prepared."""
        started = time.perf_counter()
        pool, runner = self._pools[batch.decode_worker], self._runners[batch.decode_worker]
        refused: dict[str, PurefillError] = {
            batch.items[i].request.request_id: error
            for i, error in pool.claim([item.lease for item in batch.items]).items()
        }
        items: list[PrefillItem] = []
        states: list[OutputState | None] = []
        for item in batch.items:
            if item.request.request_id in refused:
                continue
            try:
                states.append(runner.track(item.request))
                items.append(item)
            except InvalidRequestError as error:
                refused[item.request.request_id] = error
        tokens = [_tokens(item.request) for item in items]
        # First, because the passes of the batch write the same KV again: what stays does not depend on this.
        prompt_reports = {
            item.request.request_id: runner.report_prompt(item.request.prompt_token_ids, item.lease.page_ids)
            for item in items
            if item.request.sampling.prompt_logprobs and not item.request.output_token_ids
        }
        largest = runner.ladder.buckets[0]
        plan = plan_passes(
            [len(ids) for ids in tokens], max_tokens=largest.num_tokens, max_slots=largest.num_slots
        )
        passes = [
            (
                segments,
                runner.submit([_slot(items[s.item], tokens[s.item], s, states[s.item]) for s in segments]),
            )
            for segments in plan
        ]
        return SubmittedPrefill(
            worker=self.name,
            batch=batch,
            items=items,
            refused=refused,
            passes=passes,
            prompt_reports=prompt_reports,
            pool=pool,
            eager_reason=runner.eager_reason,
            started=started,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedPrefill:
    """A batch under way."""

    worker: str
    batch: PrefillBatch
    items: Sequence[PrefillItem]
    """Those of the batch that are computed."""
    refused: Mapping[str, PurefillError]
    """Why the others are not, by request id."""
    passes: Sequence[tuple[Sequence[Segment], Ticket]]
    prompt_reports: Mapping[str, Sequence[torch.Tensor]]
    """By request id, of those that asked for logprobs of the prompt: one tensor a pass."""
    pool: KVPool
    eager_reason: str | None
    started: float

    def result(self) -> PrefillResult:
        """Wait for the batch and return what became of its items."""
        chosen: dict[str, PrefillOutcome] = {}
        buckets: Counter[str] = Counter()
        num_tokens = padding = 0
        for segments, ticket in self.passes:
            # Only the last chunk of a prompt has seen all of it: later passes overwrite earlier choices.
            report = ticket.report()
            for i, (segment, token) in enumerate(zip(segments, ticket.result(), strict=True)):
                request = self.items[segment.item].request
                chosen[request.request_id] = _chosen(request, token, report[i] if len(report) else None)
            pass_tokens = sum(segment.end - segment.start for segment in segments)
            buckets[str(ticket.bucket)] += 1
            num_tokens += pass_tokens
            padding += ticket.bucket.num_tokens - pass_tokens
        late = self.pool.check([item.lease for item in self.items])
        failed = {**self.refused, **{self.items[i].request.request_id: error for i, error in late.items()}}
        eager_steps = {
            self.eager_reason: len(self.passes),
            "prompt_logprobs": sum(map(len, self.prompt_reports.values())),
        }
        return PrefillResult(
            batch_id=self.batch.batch_id,
            worker=self.worker,
            outcomes=tuple(self._outcome(item.request, chosen, failed) for item in self.batch.items),
            num_tokens=num_tokens,
            padding_tokens=padding,
            replays={} if self.eager_reason else dict(buckets),
            eager_steps={reason: steps for reason, steps in eager_steps.items() if reason and steps},
            seconds=time.perf_counter() - self.started,
        )

    def _outcome(
        self,
        request: Request,
        chosen: Mapping[str, PrefillOutcome],
        failed: Mapping[str, PurefillError],
    ) -> PrefillOutcome:
        error = failed.get(request.request_id)
        if error is not None:
            return PrefillOutcome(
                request_id=request.request_id, error_label=error.label, error_message=str(error)
            )
        outcome = chosen[request.request_id]
        report = self.prompt_reports.get(request.request_id)
        if report is None:
            return outcome
        num_top = request.sampling.num_logprobs or 0
        rows = torch.cat([*report]).cpu().numpy() if report else NO_REPORT
        return replace(outcome, prompt_logprobs=read_prompt_report(rows, request.prompt_token_ids, num_top))


def _tokens(request: Request) -> Sequence[int]:
    """Return all tokens of which a request needs the KV."""
    if not request.output_token_ids:
        return request.prompt_token_ids
    return (*request.prompt_token_ids, *request.output_token_ids)


def _slot(
    item: PrefillItem, token_ids: Sequence[int], segment: Segment, state: OutputState | None
) -> SlotInput:
    return slot_input(
        item.request,
        token_ids[segment.start : segment.end],
        num_cached=segment.start,
        page_ids=item.lease.page_ids,
        output_index=len(item.request.output_token_ids),
        # Nobody wants what an earlier chunk chooses.
        state=state if segment.end == len(token_ids) else None,
    )


def _chosen(request: Request, token_id: int, report: NDArray[np.int32] | None) -> PrefillOutcome:
    return PrefillOutcome(
        request_id=request.request_id,
        token_id=token_id,
        finish_reason=finish_reason(request, len(request.output_token_ids), token_id),
        logprobs=read_logprobs(request.sampling, report, token_id),
    )
