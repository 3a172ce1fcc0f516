"""A prefill batch under way, how it is cut into what fits, and how its results are put together again. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from scheduler.errors import PurefillError
from scheduler.messages import HandoffResult, PrefillBatch, PrefillItem, PrefillOutcome, PrefillResult


class Started(Protocol):
    """A batch under way."""

    def result(self) -> PrefillResult:
        """Wait for the batch and return what became of its items."""


class Known(NamedTuple):
    """The result of a batch that is not under way any more."""

    known: PrefillResult

    def result(self) -> PrefillResult:
        """Return it."""
        return self.known


def split_batch(batch: PrefillBatch, max_pages: int, page_size: int) -> list[PrefillBatch]:
    """Cut a batch into batches, in order, whose tokens fit into `max_pages` pages; an item alone always does."""
    parts: list[list[PrefillItem]] = [[]]
    room = max_pages
    for item in batch.items:
        num_pages = -(-item.request.num_prefill_tokens // page_size)
        if num_pages > room and parts[-1]:
            parts.append([])
            room = max_pages
        parts[-1].append(item)
        room -= num_pages
    return [replace(batch, items=tuple(items)) for items in parts]


def failed_result(worker: str, batch: PrefillBatch, error: PurefillError) -> PrefillResult:
    """Return the result of a batch of which nothing was computed."""
    return PrefillResult(
        batch_id=batch.batch_id,
        worker=worker,
        outcomes=tuple(
            PrefillOutcome(
                request_id=item.request.request_id, error_label=error.label, error_message=str(error)
            )
            for item in batch.items
        ),
        num_tokens=0,
        padding_tokens=0,
        replays={},
    )


def merge_results(results: Sequence[PrefillResult]) -> PrefillResult:
    """Put the results of a batch's parts together, in order."""
    if len(results) == 1:
        return results[0]
    known = [result.handoff for result in results if result.handoff is not None]
    return replace(
        results[0],
        outcomes=tuple(outcome for result in results for outcome in result.outcomes),
        num_tokens=sum(result.num_tokens for result in results),
        padding_tokens=sum(result.padding_tokens for result in results),
        replays=_sum(result.replays for result in results),
        eager_steps=_sum(result.eager_steps for result in results),
        seconds=sum(result.seconds for result in results),
        flops=sum(result.flops for result in results),
        handoff=merge_handoffs(known) if known else None,
        handoff_pending=any(result.handoff_pending for result in results),
        num_query_tokens=sum(result.num_query_tokens for result in results),
    )


def merge_handoffs(results: Sequence[HandoffResult]) -> HandoffResult:
    """Put what became of the pages of a batch's parts together."""
    return replace(
        results[0],
        failures=tuple(failure for result in results for failure in result.failures),
        num_bytes=sum(result.num_bytes for result in results),
        seconds=sum(result.seconds for result in results),
    )


def _sum(counts: Iterator[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
