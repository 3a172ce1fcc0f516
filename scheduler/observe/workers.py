"""The figures of one worker, from what it reports anyway. The scheduler counts them for all, a worker for itself."""

from __future__ import annotations

from scheduler.messages import HandoffResult, PrefillResult, StepReport
from scheduler.observe import catalogue as m
from scheduler.observe.registry import Registry

_OF_PREFILL = (
    m.PREFILL_TOKENS,
    m.PREFIX_QUERY_TOKENS,
    m.PREFIX_HIT_TOKENS,
    m.PADDING_TOKENS,
    m.PREFILL_SECONDS,
    m.PREFILL_FLOPS,
    m.OUTPUT_TOKENS,
)
_OF_DECODE = (m.STEP_SECONDS, m.STEP_SEQUENCES, m.STALLED, m.OUTPUT_TOKENS)
_WHEN_THEY_HAPPEN = (m.PREFILL_UTILISATION, m.REPLAYS, m.EAGER_STEPS, m.HANDOFF_SECONDS, m.HANDOFF_BYTES)

OF_WORKERS = frozenset((*_OF_PREFILL, *_OF_DECODE, *_WHEN_THEY_HAPPEN))
"""What is counted by the functions below."""


def declare_worker(registry: Registry, pool: str, name: str) -> None:
    """Show the figures of a worker from now on."""
    registry.declare(*(_OF_PREFILL if pool == "prefill" else _OF_DECODE), labels=(pool, name))


def count_prefill(registry: Registry, result: PrefillResult, peak_flops: float | None) -> None:
    """Count what a batch cost, apart from its pages."""
    worker = ("prefill", result.worker)
    registry.inc(m.PREFILL_TOKENS, *worker, by=result.num_tokens)
    registry.inc(m.PREFIX_QUERY_TOKENS, *worker, by=result.num_query_tokens)
    registry.inc(m.PREFIX_HIT_TOKENS, *worker, by=sum([o.num_cached_tokens for o in result.outcomes]))
    registry.inc(m.PADDING_TOKENS, *worker, by=result.padding_tokens)
    registry.inc(m.OUTPUT_TOKENS, *worker, by=sum([o.token_id is not None for o in result.outcomes]))
    registry.observe(m.PREFILL_SECONDS, result.seconds, *worker)
    registry.inc(m.PREFILL_FLOPS, *worker, by=result.flops)
    if peak_flops is not None and result.seconds:
        registry.set(m.PREFILL_UTILISATION, result.flops / result.seconds / peak_flops, *worker)
    for bucket, count in result.replays.items():
        registry.inc(m.REPLAYS, *worker, bucket, by=count)
    for reason, count in result.eager_steps.items():
        registry.inc(m.EAGER_STEPS, *worker, reason, by=count)


def count_handoff(registry: Registry, handoff: HandoffResult) -> None:
    """Count pages that arrived, and what it took."""
    labels = ("prefill", handoff.worker, handoff.transport)
    registry.observe(m.HANDOFF_SECONDS, handoff.seconds, *labels)
    registry.inc(m.HANDOFF_BYTES, *labels, by=handoff.num_bytes)


def count_step(registry: Registry, report: StepReport) -> None:
    """Count a decode step and its tokens."""
    worker = report.worker
    if report.num_stalled:
        registry.inc(m.STALLED, "decode", worker, by=report.num_stalled)
    if not report.bucket:
        return  # Nothing was computed: it only says what was released, or failed.
    num_tokens = len([event for event in report.events if event.token_id is not None])
    registry.inc(m.OUTPUT_TOKENS, "decode", worker, by=num_tokens)
    registry.observe(m.STEP_SECONDS, report.seconds, "decode", worker)
    registry.observe(m.STEP_SEQUENCES, num_tokens, "decode", worker)
    if report.eager_reason is None:
        registry.inc(m.REPLAYS, "decode", worker, report.bucket)
    else:
        registry.inc(m.EAGER_STEPS, "decode", worker, report.eager_reason)
