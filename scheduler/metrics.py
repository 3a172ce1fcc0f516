"""What the scheduler counts, for itself, for the workers and for the ApiServers, and the log line of each batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from importlib.metadata import version
from typing import get_args

from scheduler.actions import RequeueReason
from scheduler.batching.former import DispatchReason, FormedBatch
from scheduler.core import SchedulerCore
from scheduler.messages import (
    ActorStatus,
    DecodeWorkerInfo,
    Figures,
    HandoffResult,
    Heartbeat,
    PrefillBatch,
    PrefillResult,
    PrefillWorkerInfo,
    Request,
    StepReport,
)
from scheduler.observe import catalogue as m
from scheduler.observe.catalogue import CATALOGUE, Metric
from scheduler.observe.registry import Registry
from scheduler.observe.workers import count_handoff, count_prefill, count_step, declare_worker

_LOG = logging.getLogger(__name__)
_MAX_CLASS = 10
"""Priorities beyond are shown as one class: each class that was ever seen is a series."""
_STATES = ("ready", "draining", "dead")
_WORKER_POOLS = ("prefill", "decode")
_SILENT_S = 5.0
"""An ApiServer that says nothing for so long is dead: it should every second."""


class SchedulerMetrics:
    """Owns the figures of the whole service; an `Observer` of the scheduler's core.

    What a worker counted stays when it dies, so that no counter falls.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since 1970."""
        self._clock = clock
        self._registry = registry = Registry()
        self._peak_flops: dict[str, float] = {}
        self._pool_of: dict[str, str] = {}
        self._dead: set[str] = set()
        self._heard_at: dict[str, float] = {}
        """By ApiServer."""
        self._classes = {"0", "returned"}
        self._evicted: dict[str, int] = {}
        """Pages that had been evicted at each decode worker at the last look."""
        registry.declare(*[x for x in CATALOGUE if x.kind != "gauge" and not x.labels])
        for reason in get_args(DispatchReason):
            registry.declare(
                m.BATCHES, m.BATCH_REQUESTS, m.BATCH_TOKENS, m.WAIT_SECONDS, m.HOLD_SECONDS, labels=(reason,)
            )
        for reason in get_args(RequeueReason):
            registry.declare(m.REQUEUES, labels=(reason,))
        for outcome in ("stop", "length", "cancelled"):
            registry.declare(m.REQUESTS, labels=(outcome,))
        for what in ("write", "read", "event"):
            registry.declare(m.LEASES_REFUSED, labels=(what,))
        registry.set(m.START_TIME, clock(), "scheduler", "scheduler")

    def figures(self, core: SchedulerCore, *, without: Collection[Metric] = ()) -> Figures:
        """Return all figures, gauges as of now, except those of some metrics."""
        registry = self._registry
        registry.set(m.LIVE_REQUESTS, core.num_live)
        self._set_queue(core)
        # What a worker that is gone had says nothing any more.
        registry.clear(m.KV_PAGES)
        registry.clear(m.KV_LEASES)
        registry.clear(m.PREFIX_PAGES)
        for pool in core.pools:
            ledger, worker = pool.ledger, ("decode", pool.name)
            registry.set(m.KV_PAGES, ledger.num_pages - ledger.free_pages, *worker, "used")
            registry.set(m.KV_PAGES, ledger.free_pages - pool.free_pages, *worker, "reserved")
            registry.set(m.KV_PAGES, pool.free_pages, *worker, "free")
            registry.set(m.KV_LEASES, ledger.num_leases, *worker)
            registry.set(m.PREFIX_PAGES, ledger.cache.num_pages, *worker)
            self._count_evicted(pool.name, ledger.cache.num_evicted_pages)
        states = self.states(core)
        for metric in (m.START_TIME, m.PREFILL_UTILISATION, m.PEAK_FLOPS):
            for kind, name in registry.values(metric):
                if kind in _WORKER_POOLS and name not in states:
                    registry.drop(metric, kind, name)
        for kind in _WORKER_POOLS:
            for state in _STATES:
                count = sum(self._pool_of[name] == kind and is_in == state for name, is_in in states.items())
                registry.set(m.WORKERS, count, kind, state)
        return registry.figures(without=without)

    def states(self, core: SchedulerCore) -> dict[str, str]:
        """Return the state of each worker, by name: ``ready``, ``draining`` or ``dead``."""
        is_draining = {pool.name: pool.is_draining for pool in core.pools} | core.draining_prefill_workers
        states = {name: "draining" if drains else "ready" for name, drains in is_draining.items()}
        return states | {name: "dead" for name in self._dead if name not in states}

    def actors(self, core: SchedulerCore) -> tuple[ActorStatus, ...]:
        """Return what is known of each actor, workers that left on purpose excepted."""
        states, now = {"scheduler": "ready", **self.states(core)}, self._clock()
        for name, heard_at in self._heard_at.items():
            states[name] = "ready" if now - heard_at < _SILENT_S else "dead"
        return tuple(
            ActorStatus(name=name, pool=pool, state=states[name], start_time=start_time)
            for (pool, name), start_time in self._registry.values(m.START_TIME).items()
            if name in states
        )

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Add what an ApiServer counted, which is alive, and remember how its journal does."""
        name, journal = heartbeat.api_server, heartbeat.journal
        self._heard_at[name] = self._clock()
        self.add(heartbeat.figures)
        if journal is not None:
            self._registry.set(m.JOURNAL_UP, journal.is_up, name)
            self._registry.set(m.JOURNAL_LAG, journal.lag_s, name)
            self._registry.set(m.UNJOURNALED, journal.num_unjournaled, name)

    def add(self, figures: Figures) -> None:
        """Add what an ApiServer counted."""
        self._registry.add(figures)

    def joined(self, info: PrefillWorkerInfo | DecodeWorkerInfo) -> None:
        """Show a worker from now on."""
        registry = self._registry
        kind = "prefill" if isinstance(info, PrefillWorkerInfo) else "decode"
        self._pool_of[info.name] = kind
        self._dead.discard(info.name)
        declare_worker(registry, kind, info.name)
        registry.declare(m.WORKER_RESTARTS, labels=(kind, info.name))
        registry.set(m.START_TIME, self._clock(), kind, info.name)
        registry.set(
            m.BUILD_INFO,
            1,
            *(version(package) for package in ("purefill", "ray", "torch")),
            info.device,
            info.model.dtype,
        )
        if isinstance(info, PrefillWorkerInfo) and info.peak_flops is not None:
            self._peak_flops[info.name] = info.peak_flops
            registry.set(m.PEAK_FLOPS, info.peak_flops, kind, info.name)

    def worker_died(self, worker: str) -> None:
        """Count a worker that is started again."""
        self._dead.add(worker)
        self._registry.inc(m.WORKER_RESTARTS, self._pool_of[worker], worker)

    def batch_formed(self, batch: PrefillBatch, worker: str, formed: FormedBatch) -> None:
        """Count a batch, and log it."""
        registry, reason = self._registry, formed.reason
        registry.inc(m.BATCHES, reason)
        registry.observe(m.BATCH_REQUESTS, len(batch.items), reason)
        registry.observe(m.BATCH_TOKENS, formed.num_tokens, reason)
        registry.inc(m.PAST_DEADLINE, by=formed.num_past_deadline)
        longest_s = 0.0
        for item in batch.items:
            waited_s = item.queued_s + item.held_s
            longest_s = max(longest_s, waited_s)
            registry.observe(m.WAIT_SECONDS, waited_s, reason)
            registry.observe(m.HOLD_SECONDS, item.held_s, reason)
        _LOG.info(
            "batch %d to %s: %d requests, %d tokens, %s, oldest waited %.1f ms",
            batch.batch_id,
            worker,
            len(batch.items),
            formed.num_tokens,
            reason,
            1000 * longest_s,
        )

    def prefilled(self, result: PrefillResult) -> None:
        """Count what a batch cost. The core tells of its pages apart."""
        count_prefill(self._registry, result, self._peak_flops.get(result.worker))

    def handed_off(self, handoff: HandoffResult) -> None:
        """Count pages that arrived, and what it took."""
        count_handoff(self._registry, handoff)

    def stepped(self, report: StepReport) -> None:
        """Count a decode step and its tokens."""
        count_step(self._registry, report)

    def requeued(self, reason: RequeueReason) -> None:
        """Count a request that waits again."""
        self._registry.inc(m.REQUEUES, reason)
        self._registry.inc(m.PREEMPTIONS, by=reason == "preempted")

    def refused(self, what: str) -> None:
        """Count what came under a lease that had ended."""
        self._registry.inc(m.LEASES_REFUSED, what)

    def ended(self, request: Request, outcome: str, num_outputs: int, seconds: float) -> None:
        """Count a request that ended, and log it."""
        self._registry.inc(m.REQUESTS, outcome)
        _LOG.debug(
            "request %s: %d + %d tokens, %s after %.3f s",
            request.request_id,
            len(request.prompt_token_ids),
            num_outputs,
            outcome,
            seconds,
        )

    def _count_evicted(self, worker: str, num_pages: int) -> None:
        """Count what was evicted since the last look; a worker that came back begins at 0."""
        known = self._evicted.get(worker, 0)
        self._registry.inc(
            m.PREFIX_EVICTED_PAGES,
            "decode",
            worker,
            by=num_pages - known if num_pages >= known else num_pages,
        )
        self._evicted[worker] = num_pages

    def _set_queue(self, core: SchedulerCore) -> None:
        requests, tokens = dict.fromkeys(self._classes, 0), dict.fromkeys(self._classes, 0)
        for priority, (num_requests, num_tokens) in core.waiting_by_class.items():
            name = str(max(-_MAX_CLASS, min(priority, _MAX_CLASS)))
            requests[name] = requests.get(name, 0) + num_requests
            tokens[name] = tokens.get(name, 0) + num_tokens
        requests["returned"] = core.num_waiting - sum(requests.values())
        tokens["returned"] = core.num_waiting_tokens - sum(tokens.values())
        self._classes |= requests.keys()
        for name, count in requests.items():
            self._registry.set(m.QUEUE_REQUESTS, count, name)
            self._registry.set(m.QUEUE_TOKENS, tokens[name], name)
