"""Every figure that a service exports: name, kind, labels, buckets and meaning. Nothing else names a metric.

The registry refuses what is not here, and the table in docs/metrics.md, the dashboards and the alert rules are checked
against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

PREFIX = "purefill_"

# Upper bounds, in seconds. A quantile read from a histogram is off by a step at most, so steps are narrow where
# latencies are promised: milliseconds on a GPU, tenths of a second for a small model on a CPU.
_LATENCY_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60)
_REQUEST_S = (0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120, 300)
_STEP_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_HANDOFF_S = (0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 5, 30)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REQUESTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """One family of figures. Two of a name are not equal: the constants below are the only ones."""

    name: str
    """As it stands in the text format; that of a counter ends in ``_total``."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, ascending, without infinity."""

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Names of its lines in the text format."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(self.name + suffix for suffix in ("_bucket", "_sum", "_count"))


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name=PREFIX + name, kind="counter", help=text, labels=labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name=PREFIX + name, kind="gauge", help=text, labels=labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name=PREFIX + name, kind="histogram", help=text, labels=labels, buckets=buckets)


_WORKER = ("pool", "worker")

# What clients see: counted by the ApiServers.

HTTP_REQUESTS = _counter(
    "http_requests_total", "HTTP requests that were answered, by route and status.", "route", "code"
)
REJECTIONS = _counter(
    "rejections_total", "Completions and chats that were not accepted, by the label of the error.", "reason"
)
PROMPT_TOKENS = _counter("prompt_tokens_total", "Tokens of accepted prompts, once for each choice.")
TIME_TO_FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds",
    "From the arrival of a request's HTTP body to the first token of each of its sequences, at the ApiServer.",
    _LATENCY_S,
)
INTER_TOKEN = _histogram(
    "inter_token_seconds", "From a token of a sequence to the next one, at the ApiServer.", _STEP_S
)
REQUEST_SECONDS = _histogram(
    "request_seconds",
    "From the arrival of a request's HTTP body to the end of each of its sequences, at the ApiServer.",
    _REQUEST_S,
)

# The queue and the batches: counted by the scheduler.

REQUESTS = _counter(
    "requests_total",
    "Sequences that ended: stop, length, cancelled, or the label of an error.",
    "outcome",
)
LIVE_REQUESTS = _gauge("live_requests", "Sequences that have not ended, waiting ones included.")
QUEUE_REQUESTS = _gauge(
    "queue_requests",
    "Sequences that wait, by priority (-10 and 10 hold all beyond); returned: to be computed again.",
    "class",
)
QUEUE_TOKENS = _gauge("queue_tokens", "Tokens of the sequences that wait, by priority as above.", "class")
BATCHES = _counter("batches_total", "Prefill batches, by what made them leave.", "reason")
BATCH_REQUESTS = _histogram(
    "prefill_batch_requests", "Requests of a prefill batch, by what made it leave.", _REQUESTS, "reason"
)
BATCH_TOKENS = _histogram(
    "prefill_batch_tokens",
    "Tokens of a prefill batch, padding not counted, by what made it leave.",
    _TOKENS,
    "reason",
)
WAIT_SECONDS = _histogram(
    "wait_seconds",
    "How long a request waited for its prefill to be sent, by what made its batch leave.",
    _LATENCY_S,
    "reason",
)
HOLD_SECONDS = _histogram(
    "hold_seconds",
    "The part of that wait in which a prefill worker was idle and a decode worker had room: "
    "held for others to join.",
    _LATENCY_S,
    "reason",
)
PAST_DEADLINE = _counter(
    "requests_past_deadline_total",
    "Requests that left the queue after the time by which their first token was wished for.",
)
REQUEUES = _counter(
    "requeues_total", "Requests that were put back into the queue to be computed again.", "reason"
)
PREEMPTIONS = _counter(
    "preemptions_total", "Sequences that left their pages to older ones, to be computed again later."
)
LEASES_REFUSED = _counter(
    "leases_refused_total", "Writes, reads and reports (event) under a lease that had ended.", "what"
)

# The workers: told to the scheduler in the messages that they send anyway.

PREFILL_TOKENS = _counter(
    "prefill_tokens_total",
    "Tokens prefilled, padding not counted; those computed again count again.",
    *_WORKER,
)
PREFIX_QUERY_TOKENS = _counter(
    "prefix_cache_query_tokens_total",
    "Tokens of the sequences that were prefilled and might use cached KV; those computed again count again.",
    *_WORKER,
)
PREFIX_HIT_TOKENS = _counter(
    "prefix_cache_hit_tokens_total",
    "Those of them that were not computed, as their KV was in the pages already.",
    *_WORKER,
)
PADDING_TOKENS = _counter(
    "prefill_padding_tokens_total", "Token positions of prefill computed for padding.", *_WORKER
)
PREFILL_SECONDS = _histogram(
    "prefill_seconds", "Time of a prefill batch in its worker.", _LATENCY_S, *_WORKER
)
PREFILL_FLOPS = _counter(
    "prefill_flops_total",
    "Floating point operations that the model's definition needs for what was prefilled; none for padding.",
    *_WORKER,
)
PREFILL_UTILISATION = _gauge(
    "prefill_flop_utilisation_ratio",
    "Those operations per second of the worker's last prefill batch, as a share of the device's peak. "
    "Absent where the peak is not known.",
    *_WORKER,
)
PEAK_FLOPS = _gauge(
    "device_peak_flops",
    "Dense matrix operations per second that the maker of the worker's device states for its dtype. "
    "Absent where not known.",
    *_WORKER,
)
REPLAYS = _counter(
    "graph_replays_total",
    "Forward passes in a bucket: replays of its graph, on a CPU runs on its static buffers.",
    *_WORKER,
    "bucket",
)
EAGER_STEPS = _counter("eager_steps_total", "Forward passes without a graph, by reason.", *_WORKER, "reason")
HANDOFF_SECONDS = _histogram(
    "handoff_seconds",
    "What it took to bring the KV pages of a batch to their decode worker.",
    _HANDOFF_S,
    *_WORKER,
    "transport",
)
HANDOFF_BYTES = _counter(
    "handoff_bytes_total", "KV pages brought to decode workers, in bytes.", *_WORKER, "transport"
)
STEP_SECONDS = _histogram("decode_step_seconds", "Time of a decode step.", _STEP_S, *_WORKER)
STEP_SEQUENCES = _histogram(
    "decode_step_sequences", "Sequences that got a token in a decode step.", _SEQUENCES, *_WORKER
)
STALLED = _counter(
    "decode_stalled_sequences_total",
    "Times that a sequence sat a decode step out, for want of a page.",
    *_WORKER,
)
OUTPUT_TOKENS = _counter("output_tokens_total", "Tokens produced: first ones by prefill.", *_WORKER)
KV_PAGES = _gauge(
    "kv_pages",
    "KV pages: used by a sequence, reserved for those that will grow, free for new ones (cached ones included).",
    *_WORKER,
    "state",
)
PREFIX_PAGES = _gauge(
    "prefix_cache_pages",
    "KV pages that hold cached blocks of tokens, whether or not a sequence uses them.",
    *_WORKER,
)
PREFIX_EVICTED_PAGES = _counter(
    "prefix_cache_evicted_pages_total", "KV pages of cached blocks that were given to others.", *_WORKER
)
KV_LEASES = _gauge("kv_leases", "Leases on KV pages.", *_WORKER)

# The actors.

WORKERS = _gauge("workers", "Workers by pool and state: ready, draining, or dead.", "pool", "state")
WORKER_RESTARTS = _counter("worker_restarts_total", "Workers that died and were started again.", *_WORKER)
START_TIME = _gauge(
    "start_time_seconds",
    "When an actor's process began to serve, in seconds since 1970. Counters begin with the scheduler's.",
    *_WORKER,
)
JOURNAL_UP = _gauge(
    "journal_up",
    "1: the ApiServer could reach its journal the last time; also where requests are kept in memory.",
    "api_server",
)
JOURNAL_LAG = _gauge(
    "journal_lag_seconds",
    "How long the oldest token waits that is to be written into the journal.",
    "api_server",
)
UNJOURNALED = _gauge(
    "unjournaled_requests",
    "Requests that went on without the journal, as it was away, since the ApiServer started.",
    "api_server",
)
BUILD_INFO = _gauge(
    "build_info", "Always 1; the labels say what runs.", "version", "ray", "torch", "device", "dtype"
)

CATALOGUE: tuple[Metric, ...] = tuple(
    value for value in globals().copy().values() if isinstance(value, Metric)
)
"""All of them."""


def number_text(value: float) -> str:
    """Return a number as Prometheus writes it."""
    return "+Inf" if value == math.inf else repr(float(value))


CONSTANT_LABELS = ("model",)
"""Labels of every line, besides its own."""
