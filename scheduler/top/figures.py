"""What an operator wants to see, computed from what happened between two scrapes of `/metrics`. Pure.

`scheduler/api/ui/figures.js` computes the same for the page; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.top.exposition import START_TIME, Interval, Scrape

TIMES = {
    "first token": "purefill_time_to_first_token_seconds",
    "between tokens": "purefill_inter_token_seconds",
    "in the queue": "purefill_wait_seconds",
    "of that held": "purefill_hold_seconds",
    "prefill batch": "purefill_prefill_seconds",
    "handoff": "purefill_handoff_seconds",
    "decode step": "purefill_decode_step_seconds",
    "whole request": "purefill_request_seconds",
}
"""The histograms whose quantiles are shown, by their titles."""
QUANTILES = (0.5, 0.9, 0.99)
_PASSES = {
    "prefill": ("purefill_prefill_seconds", "purefill_prefill_tokens_total"),
    "decode": ("purefill_decode_step_seconds", "purefill_output_tokens_total"),
}
"""The histogram of each pool's passes, and the counter of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPages:
    """KV pages of one decode worker. None: not told."""

    worker: str
    used: float | None
    reserved: float | None
    free: float | None

    @property
    def total(self) -> float:
        """All that are told."""
        return (self.used or 0) + (self.reserved or 0) + (self.free or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One prefill or decode worker. Rates are per second. None: not told."""

    name: str
    pool: str
    busy_share: float | None
    """Of the time, 0 to 1."""
    passes: float | None
    """Prefill batches, or decode steps."""
    tokens: float | None
    """Prefilled without padding, or produced."""
    utilisation: float | None
    """Of the device's peak operations while it computes prefill: 0 to 1."""
    restarts: float | None
    """How often it died, in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The service in the interval. Rates are per second. None: the service does not tell, or nothing happened."""

    seconds: float
    """Length of the interval."""
    model: str | None
    version: str | None
    waiting_requests: float | None
    waiting_tokens: float | None
    live_requests: float | None
    requests: Mapping[str, float] | None
    """Requests that ended, by outcome."""
    rejections: Mapping[str, float] | None
    """Requests that were turned away, by reason."""
    requeues: Mapping[str, float] | None
    """Requests that had to wait again, by reason."""
    prompt_tokens: float | None
    output_tokens: float | None
    batches: Mapping[str, float] | None
    """Batches by what made them leave."""
    batch_requests: float | None
    """Mean requests of a batch."""
    batch_tokens: float | None
    """Mean tokens of a batch, without padding."""
    padding_share: float | None
    """Of all token positions that prefill computed, those that were padding: 0 to 1."""
    replays: Mapping[str, float] | None
    """Prefill passes by bucket."""
    eager_steps: Mapping[str, float] | None
    """Passes without a graph, by reason."""
    times: Mapping[str, tuple[float | None, ...]]
    """Seconds by the titles of `TIMES`: one for each of `QUANTILES`."""
    pages: tuple[PoolPages, ...]
    workers: tuple[Worker, ...]
    worker_states: Mapping[str, float] | None
    """How many workers there are in each state."""


def figures_of(interval: Interval) -> Figures:
    """Return what the service did in an interval, and its state at the end."""
    now = interval.end
    padding = interval.increase("purefill_prefill_padding_tokens_total")
    computed = interval.increase("purefill_prefill_tokens_total")
    return Figures(
        seconds=interval.seconds,
        model=_label(now, "purefill_queue_requests", "model"),
        version=_label(now, "purefill_build_info", "version"),
        waiting_requests=now.value("purefill_queue_requests"),
        waiting_tokens=now.value("purefill_queue_tokens"),
        live_requests=now.value("purefill_live_requests"),
        requests=interval.rates("purefill_requests_total", "outcome"),
        rejections=interval.rates("purefill_rejections_total", "reason"),
        requeues=interval.rates("purefill_requeues_total", "reason"),
        prompt_tokens=interval.rate("purefill_prefill_tokens_total"),
        output_tokens=interval.rate("purefill_output_tokens_total"),
        batches=interval.rates("purefill_batches_total", "reason"),
        batch_requests=interval.mean("purefill_prefill_batch_requests"),
        batch_tokens=interval.mean("purefill_prefill_batch_tokens"),
        padding_share=_share(padding, computed),
        replays=interval.rates("purefill_graph_replays_total", "bucket", pool="prefill"),
        eager_steps=interval.rates("purefill_eager_steps_total", "reason"),
        times={title: tuple(interval.quantile(name, q) for q in QUANTILES) for title, name in TIMES.items()},
        pages=_pages(now),
        workers=tuple(_worker(interval, pool, name) for pool, name in _worker_names(now)),
        worker_states=now.by("purefill_workers", "state"),
    )


def _share(part: float | None, rest: float | None) -> float | None:
    if part is None or rest is None or part + rest <= 0:
        return None
    return part / (part + rest)


def _label(scrape: Scrape, name: str, label: str) -> str | None:
    """Return the value of a label that all samples of a metric share."""
    return next((dict(key).get(label) for key in scrape.series.get(name, {})), None)


def _worker_names(scrape: Scrape) -> list[tuple[str, str]]:
    """Return pool and name of each worker that counts anything."""
    names = set()
    for metric in ("purefill_prefill_seconds_count", "purefill_decode_step_seconds_count", START_TIME):
        for key in scrape.series.get(metric, {}):
            own = dict(key)
            if own.get("pool") in _PASSES and "worker" in own:
                names.add((own["pool"], own["worker"]))
    # prefill first; prefill-2 before prefill-10
    return sorted(names, key=lambda name: (name[0] != "prefill", len(name[1]), name[1]))


def _worker(interval: Interval, pool: str, name: str) -> Worker:
    seconds, tokens = _PASSES[pool]
    own = {"pool": pool, "worker": name}
    peak = interval.end.value("purefill_device_peak_flops", **own)
    flops = interval.increase("purefill_prefill_flops_total", **own)
    computing_s = interval.increase(f"{seconds}_sum", **own)
    return Worker(
        name=name,
        pool=pool,
        busy_share=interval.rate(f"{seconds}_sum", **own),
        passes=interval.rate(f"{seconds}_count", **own),
        tokens=interval.rate(tokens, **own),
        utilisation=flops / computing_s / peak if flops is not None and computing_s and peak else None,
        restarts=interval.end.value("purefill_worker_restarts_total", **own),
    )


def _pages(scrape: Scrape) -> tuple[PoolPages, ...]:
    states: dict[str, dict[str, float]] = {}
    for labels, value in scrape.series.get("purefill_kv_pages", {}).items():
        own = dict(labels)
        states.setdefault(own.get("worker", ""), {})[own.get("state", "")] = value
    return tuple(
        PoolPages(
            worker=worker,
            used=by_state.get("used"),
            reserved=by_state.get("reserved"),
            free=by_state.get("free"),
        )
        for worker, by_state in sorted(states.items())
    )
