"""Prefill: turns a batch of prompts into first tokens, and into KV in the pages that were leased for them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graphs.buckets import BucketLadder
from graphs.layout import SlotInput
from scheduler.errors import StaleLeaseError
from scheduler.messages import PoolHandle, PrefillBatch, PrefillItem, PrefillOutcome, PrefillResult
from worker.kv_pool import KVPool
from worker.model import Model
from worker.model_runner import ModelRunner, slot_input
from worker.sequences import finish_reason


@dataclass(frozen=True, slots=True)
class Segment:
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
    """Owns the model and, for each decode worker's pool, the static buffers that write into it."""

    def __init__(self, name: str, model: Model, ladder: BucketLadder) -> None:
        self.name = name
        self.model = model
        self._ladder = ladder
        self._pools: dict[str, KVPool] = {}
        self._runners: dict[str, ModelRunner] = {}

    def attach(self, handle: PoolHandle) -> Mapping[str, float]:
        """Open a decode worker's pool and warm up on it; return the seconds of each bucket by name.

        Raises `ConfigError` if the pool does not fit this model.
        """
        pool = KVPool.open(self.model.kv_spec, handle)
        runner = ModelRunner(self.model, pool, self._ladder)
        self._pools[handle.decode_worker] = pool
        self._runners[handle.decode_worker] = runner
        return {str(bucket): seconds for bucket, seconds in runner.warm_up().items()}

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all static buffers."""
        return sum(runner.graphs.size_bytes for runner in self._runners.values())

    def run(self, batch: PrefillBatch) -> PrefillResult:
        """Compute a batch. An item whose lease is stale fails alone; the others do not notice."""
        started = time.perf_counter()
        pool, runner = self._pools[batch.decode_worker], self._runners[batch.decode_worker]
        failed = _refused(batch.items, pool.claim)
        items = [item for item in batch.items if item.request.request_id not in failed]
        tokens = [(*item.request.prompt_token_ids, *item.request.output_token_ids) for item in items]
        chosen: dict[str, int] = {}
        replays: Counter[str] = Counter()
        padding = 0
        for segments in plan_passes(
            [len(ids) for ids in tokens], max_tokens=self._ladder.max_tokens, max_slots=self._ladder.max_slots
        ):
            next_tokens, bucket = runner.run([_slot(items[s.item], tokens[s.item], s) for s in segments])
            replays[str(bucket)] += 1
            padding += bucket.num_tokens - sum(s.end - s.start for s in segments)
            # Only the last chunk of a prompt has seen all of it: later passes overwrite earlier choices.
            for segment, token in zip(segments, next_tokens, strict=True):
                chosen[items[segment.item].request.request_id] = token
        failed |= _refused(items, pool.check)
        return PrefillResult(
            batch_id=batch.batch_id,
            worker=self.name,
            outcomes=tuple(_outcome(item, chosen, failed) for item in batch.items),
            num_tokens=sum(len(ids) for ids in tokens),
            padding_tokens=padding,
            replays=dict(replays),
            seconds=time.perf_counter() - started,
        )


def _refused(
    items: Sequence[PrefillItem], touch: Callable[[Sequence[int], int], None]
) -> dict[str, StaleLeaseError]:
    """Call `touch` with the pages and epoch of each item; return the errors of those refused, by request id."""
    refused: dict[str, StaleLeaseError] = {}
    for item in items:
        try:
            touch(item.lease.page_ids, item.lease.epoch)
        except StaleLeaseError as error:
            refused[item.request.request_id] = error
    return refused


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
