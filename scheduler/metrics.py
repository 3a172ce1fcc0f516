"""What the scheduler counts, in Prometheus' form, and the log line of each batch."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from scheduler.actions import RequeueReason
from scheduler.batching.former import FormedBatch
from scheduler.core import SchedulerCore
from scheduler.messages import HandoffResult, JournalStatus, PrefillResult, Request, StepReport

_LOG = logging.getLogger(__name__)
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_HANDOFF_SECONDS = (0.00001, 0.0001, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REQUESTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


class SchedulerMetrics:
    """Owns the metrics of the service; an `Observer` of the scheduler's core."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._rejections = Counter(
            "purefill_rejections", "Requests that were not accepted.", ["reason"], registry=registry
        )
        self._requests = Counter(
            "purefill_requests", "Requests that ended, by outcome.", ["outcome"], registry=registry
        )
        self._batches = Counter(
            "purefill_batches", "Prefill batches, by what made them leave.", ["reason"], registry=registry
        )
        self._past_deadline = Counter(
            "purefill_requests_past_deadline",
            "Requests that left the queue after the time by which their first token was wished for.",
            registry=registry,
        )
        self._batch_requests = Histogram(
            "purefill_prefill_batch_requests",
            "Requests of a prefill batch.",
            buckets=_REQUESTS,
            registry=registry,
        )
        self._batch_tokens = Histogram(
            "purefill_prefill_batch_tokens", "Tokens of a prefill batch.", buckets=_TOKENS, registry=registry
        )
        self._padding = Counter(
            "purefill_prefill_padding_tokens", "Token positions computed for padding.", registry=registry
        )
        self._replays = Counter(
            "purefill_graph_replays", "Prefill passes in a bucket.", ["bucket"], registry=registry
        )
        self._eager = Counter(
            "purefill_eager_steps", "Forward passes without a graph.", ["reason"], registry=registry
        )
        self._prefill_seconds = Histogram(
            "purefill_prefill_seconds", "Time of a batch in its worker.", buckets=_SECONDS, registry=registry
        )
        self._first_token = Histogram(
            "purefill_time_to_first_token_seconds",
            "From a request's arrival at the scheduler to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._step_seconds = Histogram(
            "purefill_decode_step_seconds", "Time of a decode step.", buckets=_SECONDS, registry=registry
        )
        self._request_seconds = Histogram(
            "purefill_request_seconds",
            "From a request's arrival to its end.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "purefill_prefill_tokens", "Tokens prefilled, padding not counted.", registry=registry
        )
        self._output_tokens = Counter("purefill_output_tokens", "Tokens produced.", registry=registry)
        self._handoff_seconds = Histogram(
            "purefill_handoff_seconds",
            "What it took to bring the KV pages of a batch to their decode worker.",
            ["transport"],
            buckets=_HANDOFF_SECONDS,
            registry=registry,
        )
        self._handoff_bytes = Counter(
            "purefill_handoff_bytes",
            "KV pages brought to decode workers, in bytes.",
            ["transport"],
            registry=registry,
        )
        self._preemptions = Counter(
            "purefill_preemptions",
            "Sequences that left their pages to older ones, to be computed again later.",
            registry=registry,
        )
        self._requeues = Counter(
            "purefill_requeues", "Requests that were put back into the queue.", ["reason"], registry=registry
        )
        self._restarts = Counter(
            "purefill_worker_restarts",
            "Workers that died and were started again.",
            ["worker"],
            registry=registry,
        )
        self._refused = Counter(
            "purefill_leases_refused",
            "Writes, reads and reports that came under a lease that had ended.",
            ["what"],
            registry=registry,
        )
        self._stalled = Counter(
            "purefill_decode_stalled_sequences",
            "Times that a sequence sat a decode step out, for want of a page.",
            registry=registry,
        )
        self._queue_requests = Gauge("purefill_queue_requests", "Requests that wait.", registry=registry)
        self._queue_tokens = Gauge(
            "purefill_queue_tokens", "Tokens of requests that wait.", registry=registry
        )
        self._live = Gauge("purefill_live_requests", "Requests that have not ended.", registry=registry)
        self._pages = Gauge("purefill_kv_pages", "KV pages.", ["pool", "worker", "state"], registry=registry)
        self._leases = Gauge("purefill_kv_leases", "Leases on KV pages.", ["worker"], registry=registry)

        self._journal_up = Gauge(
            "purefill_journal_up", "1: the journal can be reached.", ["api_server"], registry=registry
        )
        self._journal_lag = Gauge(
            "purefill_journal_lag_seconds",
            "How long the oldest token waits that is to be written into the journal.",
            ["api_server"],
            registry=registry,
        )
        self._unjournaled = Gauge(
            "purefill_unjournaled_requests",
            "Requests that went on without the journal, since the ApiServer started.",
            ["api_server"],
            registry=registry,
        )

    def render(self, core: SchedulerCore) -> str:
        """Return all metrics in Prometheus' text format, gauges as of now."""
        self._queue_requests.set(core.num_waiting)
        self._queue_tokens.set(core.num_waiting_tokens)
        self._live.set(core.num_live)
        # What a decode worker that died had says nothing any more.
        self._pages.clear()
        self._leases.clear()
        for ledger in core.ledgers:
            self._pages.labels("decode", ledger.worker, "free").set(ledger.free_pages)
            self._pages.labels("decode", ledger.worker, "used").set(ledger.num_pages - ledger.free_pages)
            self._leases.labels(ledger.worker).set(ledger.num_leases)
        return generate_latest(self._registry).decode()

    def rejected(self, label: str, count: int = 1) -> None:
        """Count requests that were not accepted."""
        if count:
            self._rejections.labels(label).inc(count)

    def journal_status(self, api_server: str, status: JournalStatus) -> None:
        """Remember how an ApiServer gets on with its journal."""
        self._journal_up.labels(api_server).set(status.is_up)
        self._journal_lag.labels(api_server).set(status.lag_s)
        self._unjournaled.labels(api_server).set(status.num_unjournaled)

    def batch_formed(self, batch_id: int, worker: str, formed: FormedBatch, now: float) -> None:
        """Count a batch, and log it."""
        self._batches.labels(formed.reason).inc()
        self._batch_requests.observe(len(formed.requests))
        self._batch_tokens.observe(formed.num_tokens)
        self._past_deadline.inc(formed.num_past_deadline)
        _LOG.info(
            "batch %d to %s: %d requests, %d tokens, %s, oldest waited %.1f ms",
            batch_id,
            worker,
            len(formed.requests),
            formed.num_tokens,
            formed.reason,
            1000 * (now - min(request.arrival_time for request in formed.requests)),
        )

    def prefilled(self, result: PrefillResult) -> None:
        """Count what a batch cost."""
        self._padding.inc(result.padding_tokens)
        self._prompt_tokens.inc(result.num_tokens)
        self._output_tokens.inc(sum(outcome.token_id is not None for outcome in result.outcomes))
        self._prefill_seconds.observe(result.seconds)
        for bucket, count in result.replays.items():
            self._replays.labels(bucket).inc(count)
        for reason, count in result.eager_steps.items():
            self._eager.labels(reason).inc(count)

    def handed_off(self, handoff: HandoffResult) -> None:
        """Count pages that arrived, and what it took."""
        self._handoff_seconds.labels(handoff.transport).observe(handoff.seconds)
        self._handoff_bytes.labels(handoff.transport).inc(handoff.num_bytes)

    def first_token(self, waited_s: float) -> None:
        """Observe a time to first token."""
        self._first_token.observe(waited_s)

    def stepped(self, report: StepReport) -> None:
        """Count a decode step and its tokens."""
        self._step_seconds.observe(report.seconds)
        self._output_tokens.inc(sum(event.token_id is not None for event in report.events))
        self._stalled.inc(report.num_stalled)

    def requeued(self, reason: RequeueReason) -> None:
        """Count a request that waits again."""
        self._requeues.labels(reason).inc()
        self._preemptions.inc(reason == "preempted")

    def worker_died(self, worker: str) -> None:
        """Count a worker that is started again."""
        self._restarts.labels(worker).inc()

    def refused(self, what: str) -> None:
        """Count what came under a lease that had ended."""
        self._refused.labels(what).inc()

    def ended(self, request: Request, outcome: str, num_outputs: int, seconds: float) -> None:
        """Count a request that ended, and log it."""
        self._requests.labels(outcome).inc()
        self._request_seconds.observe(seconds)
        _LOG.debug(
            "request %s: %d + %d tokens, %s after %.3f s",
            request.request_id,
            len(request.prompt_token_ids),
            num_outputs,
            outcome,
            seconds,
        )
