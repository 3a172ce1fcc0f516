"""Prefill: turns a batch of prompts into first tokens, and into KV in the pages that were leased for them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphs.buckets import BucketLadder
from graphs.layout import SlotInput
from graphs.programs import Ticket
from graphs.runner import BucketReport
from scheduler.errors import StaleLeaseError
from scheduler.messages import PoolHandle, PrefillBatch, PrefillItem, PrefillOutcome, PrefillResult, Request
from worker.kv_pool import KVPool
from worker.model import Model
from worker.model_runner import ModelRunner, slot_input
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
        return self.attach_pool(handle.decode_worker, KVPool.open(self.model.kv_spec, handle))

    def attach_pool(self, decode_worker: str, pool: KVPool) -> tuple[BucketReport, ...]:
        """Capture the graphs that write into a decode worker's pool; return what each bucket took."""
        runner = ModelRunner(self.model, pool, self._ladder, use_graphs=self._use_graphs)
        self._pools[decode_worker] = pool
        self._runners[decode_worker] = runner
        return runner.prepare()

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
        refused = pool.claim([item.lease for item in batch.items])
        items = [item for i, item in enumerate(batch.items) if i not in refused]
        tokens = [_tokens(item.request) for item in items]
        largest = runner.ladder.buckets[0]
        plan = plan_passes(
            [len(ids) for ids in tokens], max_tokens=largest.num_tokens, max_slots=largest.num_slots
        )
        passes = [
            (segments, runner.submit([_slot(items[s.item], tokens[s.item], s) for s in segments]))
            for segments in plan
        ]
        return SubmittedPrefill(
            worker=self.name,
            batch=batch,
            items=items,
            refused={batch.items[i].request.request_id: error for i, error in refused.items()},
            passes=passes,
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
    refused: Mapping[str, StaleLeaseError]
    """Why the others are not, by request id."""
    passes: Sequence[tuple[Sequence[Segment], Ticket]]
    pool: KVPool
    eager_reason: str | None
    started: float

    def result(self) -> PrefillResult:
        """Wait for the batch and return what became of its items."""
        chosen: dict[str, int] = {}
        buckets: Counter[str] = Counter()
        num_tokens = padding = 0
        for segments, ticket in self.passes:
            # Only the last chunk of a prompt has seen all of it: later passes overwrite earlier choices.
            for segment, token in zip(segments, ticket.result(), strict=True):
                chosen[self.items[segment.item].request.request_id] = token
            pass_tokens = sum(segment.end - segment.start for segment in segments)
            buckets[str(ticket.bucket)] += 1
            num_tokens += pass_tokens
            padding += ticket.bucket.num_tokens - pass_tokens
        late = self.pool.check([item.lease for item in self.items])
        failed = {**self.refused, **{self.items[i].request.request_id: error for i, error in late.items()}}
        return PrefillResult(
            batch_id=self.batch.batch_id,
            worker=self.worker,
            outcomes=tuple(_outcome(item, chosen, failed) for item in self.batch.items),
            num_tokens=num_tokens,
            padding_tokens=padding,
            replays={} if self.eager_reason else dict(buckets),
            eager_steps={self.eager_reason: len(self.passes)} if self.eager_reason else {},
            seconds=time.perf_counter() - self.started,
        )


def _tokens(request: Request) -> Sequence[int]:
    """Return all tokens of which a request needs the KV."""
    if not request.output_token_ids:
        return request.prompt_token_ids
    return (*request.prompt_token_ids, *request.output_token_ids)


def _slot(item: PrefillItem, token_ids: Sequence[int], segment: Segment) -> SlotInput:
    return slot_input(
        item.request,
        token_ids[segment.start : segment.end],
        num_cached=segment.start,
        page_ids=item.lease.page_ids,
        output_index=len(item.request.output_token_ids),
    )


def _outcome(
    item: PrefillItem, chosen: Mapping[str, int], failed: Mapping[str, StaleLeaseError]
) -> PrefillOutcome:
    request = item.request
    error = failed.get(request.request_id)
    if error is not None:
        return PrefillOutcome(
            request_id=request.request_id, error_label=error.label, error_message=str(error)
        )
    token = chosen[request.request_id]
    return PrefillOutcome(
        request_id=request.request_id,
        token_id=token,
        finish_reason=finish_reason(request, len(request.output_token_ids), token),
    )
