"""A fleet in virtual time: `SchedulerCore` as the service runs it, and workers that take what a cost model says.

Nothing of the scheduler is written here a second time: this module carries out the core's actions and tells it what
came of them, as `scheduler.actor` does. What is simulated is the workers and the messages' time on the way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, cast

from graphs.buckets import default_token_ladder
from scheduler.actions import (
    Action,
    SendDecodeCancel,
    SendDecodeGrow,
    SendDecodeStarts,
    SendPrefill,
)
from scheduler.batching.adaptive import AdaptivePolicy
from scheduler.batching.cost_model import CostModel
from scheduler.batching.former import BatchFormer
from scheduler.batching.policies import FixedPolicy
from scheduler.core import QueueLimits, SchedulerCore
from scheduler.errors import InvalidRequestError
from scheduler.messages import (
    DecodeStart,
    DecodeWorkerInfo,
    ModelInfo,
    PoolHandle,
    PrefillBatch,
    PrefillOutcome,
    PrefillResult,
    PrefillWorkerInfo,
    Request,
    SamplingParams,
)
from scheduler.prefix.hashing import DIGEST_BYTES
from scheduler.simulate.collector import Collector, RequestTimes
from scheduler.simulate.decode_worker import VirtualDecodeWorker
from scheduler.simulate.fleet import FleetSettings
from scheduler.simulate.fleet_costs import FleetCosts
from scheduler.simulate.shared import SharedDevices
from scheduler.simulate.traces import TRACE_BLOCK_TOKENS, Arrival
from scheduler.simulate.watcher import Watcher

_API_SERVER = "api-0"


class Simulation:
    """Owns the clock, the workers, and the messages on their way. Run it once."""

    def __init__(self, settings: FleetSettings, costs: FleetCosts, collector: Collector) -> None:
        """Raises `ConfigError` if the cost model says too little for the fleet."""
        settings.check(costs)
        self._settings = settings
        self._costs = costs
        self._collector = collector
        self._watcher = Watcher(collector, costs.http_s / 2)
        self._core = SchedulerCore(
            _make_former(settings),
            QueueLimits(max_requests=settings.max_queued_requests, max_tokens=settings.max_queued_tokens),
            self._watcher,
            block_tokens=TRACE_BLOCK_TOKENS,
        )
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = count()
        self._prefill_runs: dict[str, int] = {}
        self._prefill_busy_until: dict[str, float] = {}
        """When each prefill worker is done with what it was given."""
        self._decode: dict[str, VirtualDecodeWorker] = {}
        self._planned: dict[str, float] = {}
        """When each decode worker's next event is."""
        self._changed: dict[str, VirtualDecodeWorker] = {}
        """Those whose next event may be another one now."""
        self._devices = (
            SharedDevices(costs, self._decode, at=self._at, changed=self._has_changed)
            if costs.is_device_shared
            else None
        )
        self._model = ModelInfo(
            name=costs.name,
            max_model_len=costs.max_model_len,
            vocab_size=1,
            eos_token_ids=(),
            dtype="",
            num_parameters=0,
        )
        self._may_form = False
        """A batch may be due: more happened since the last tick than that sequences got tokens."""
        self._has_news = False
        """The core was told something since the last tick."""
        self._wake_at = inf
        """When a tick is due if nothing happens before."""
        self._rng = random.Random(settings.seed)

    def run(self, arrivals: Iterator[Arrival]) -> None:
        """Play a load until its last request has ended."""
        for i in range(self._settings.decode_workers):
            self._join_decode(f"decode-{i}", 0.0)
        for i in range(self._settings.prefill_workers):
            self._join_prefill(f"prefill-{i}", 0.0)
        http_s = self._costs.http_s / 2
        events, live = self._events, self._watcher.live
        number = 0
        arrival = next(arrivals, None)
        while arrival is not None or live:
            now = inf if arrival is None else arrival.time_s + http_s
            if events and events[0][0] < now:
                now = events[0][0]
            now = min(now, self._wake_at)
            assert now < inf, "requests wait for ever"
            while arrival is not None and arrival.time_s + http_s <= now:
                self._arrive(f"r{number}", arrival, now)
                number += 1
                arrival = next(arrivals, None)
            while events and events[0][0] <= now:
                _, _, call, argument = heappop(events)
                call(argument, now)
            if self._has_news or self._wake_at <= now:
                self._tick(now)
            for worker in self._changed.values():
                self._plan(worker)
            self._changed.clear()
        self._collector.decode_busy_s += sum(worker.busy_s for worker in self._decode.values())

    def _tick(self, now: float) -> None:
        """Carry out what the core wants after what it was told, and note when it wants to be asked again."""
        may_form = self._may_form or self._core_wakes_at() <= now
        self._may_form = self._has_news = False
        for action in self._core.tick(now, may_form=may_form):
            self._perform(action, now)
        wake_at = self._core_wakes_at()
        self._wake_at = wake_at if wake_at > now else inf

    def _core_wakes_at(self) -> float:
        wake_at = self._core.wake_at()
        return inf if wake_at is None else wake_at

    def _arrive(self, request_id: str, arrival: Arrival, now: float) -> None:
        self._may_form = self._has_news = True
        request = Request(
            request_id=request_id,
            api_server=_API_SERVER,
            # The core only counts tokens, and a range of any length costs nothing.
            prompt_token_ids=cast(tuple[int, ...], range(arrival.num_prompt)),
            sampling=_sampling(arrival.num_output),
            prefix=_prefix(arrival) if self._settings.prefix_cache and arrival.hash_ids else b"",
        )
        times = RequestTimes(
            arrival_s=arrival.time_s, num_prompt=arrival.num_prompt, num_output=arrival.num_output
        )
        self._watcher.live[request_id] = times
        if request.max_total_tokens > self._costs.max_model_len:
            label = InvalidRequestError.label  # as an ApiServer has it
        else:
            rejection = self._core.submit((request,), now)
            label = "" if rejection is None else rejection.label
        self._collector.arrived(arrival.time_s, self._core.num_waiting)
        if label:
            del self._watcher.live[request_id]
            times.outcome = label
            self._collector.ended(times)

    def _perform(self, action: Action, now: float) -> None:
        match action:
            case SendPrefill(worker=name, batch=batch):
                self._compute(name, batch, now)
            case SendDecodeStarts(worker=name, starts=starts) if name in self._decode:
                worker = self._decode[name]
                if self._costs.message_s:
                    self._at(now + self._costs.message_s, self._start, (worker, starts))
                else:
                    self._start((worker, starts), now)
            case SendDecodeGrow(worker=name, grants=grants) if name in self._decode:
                worker = self._decode[name]
                for grant in grants:
                    worker.grow(grant, now)
                self._changed[name] = worker
            case SendDecodeCancel(worker=name, refs=refs) if name in self._decode:
                worker = self._decode[name]
                for ref in refs:
                    worker.cancel(ref, now)
                self._changed[name] = worker
            case _:
                pass  # What ApiServers are told, the watcher has seen; a worker that died needs nothing.

    # Prefill workers.

    def _join_prefill(self, name: str, now: float) -> None:
        self._prefill_runs[name] = self._prefill_runs.get(name, 0) + 1
        self._prefill_busy_until[name] = now
        self._core.add_prefill_worker(
            PrefillWorkerInfo(
                name=name,
                model=self._model,
                buckets=tuple(self._costs.prefill_seconds),
                graph_bytes=0,
                uses_cuda_graphs=True,
                bucket_seconds=self._costs.prefill_seconds,
                device="",
                load_seconds=0.0,
                warmup_seconds=0.0,
            )
        )
        self._fail_later(name, now)

    def _compute(self, name: str, batch: PrefillBatch, now: float) -> None:
        lengths = [item.request.num_prefill_tokens for item in batch.items]
        cached = [len(item.lease.shared_epochs) * self._costs.page_size for item in batch.items]
        seconds, padding = self._costs.prefill(lengths, self._settings.max_batch_requests, cached)
        result = PrefillResult(
            batch_id=batch.batch_id,
            worker=name,
            outcomes=tuple(
                PrefillOutcome(
                    request_id=item.request.request_id,
                    token_id=0,
                    finish_reason="length"
                    if len(item.request.output_token_ids) + 1 >= item.request.sampling.max_tokens
                    else None,
                    num_cached_tokens=num_cached,
                )
                for item, num_cached in zip(batch.items, cached, strict=True)
            ),
            num_tokens=sum(lengths) - sum(cached),
            padding_tokens=padding,
            replays={},
            seconds=seconds,
            num_query_tokens=sum(lengths),
        )
        message_s, run = self._costs.message_s, self._prefill_runs[name]
        if self._devices is None:
            # One that was sent ahead begins when the one before it is done.
            done_at = max(now + message_s, self._prefill_busy_until[name]) + seconds
            self._prefill_busy_until[name] = done_at
            self._at(done_at + message_s, self._computed, (result, run))
        else:
            self._at(now + message_s, self._begin, (result, run))

    def _begin(self, argument: tuple[PrefillResult, int], now: float) -> None:
        """Let a prefill worker compute a batch on a device that it shares."""
        result, run = argument

        def done(seconds: float, now: float) -> None:
            own = replace(result, seconds=seconds)
            self._at(now + self._costs.message_s, self._computed, (own, run))

        if self._devices is not None and self._prefill_runs[result.worker] == run:
            self._devices.begin(result.worker, result.seconds, now, done)

    def _computed(self, argument: tuple[PrefillResult, int], now: float) -> None:
        result, run = argument
        if self._prefill_runs[result.worker] != run:
            return  # It died meanwhile.
        self._may_form = self._has_news = True
        done_at = now - self._costs.message_s
        self._watcher.token_at = done_at + self._costs.http_s / 2
        for outcome in result.outcomes:
            self._watcher.prefill_token(outcome.request_id)
        self._collector.prefilled(result.num_tokens, result.padding_tokens, result.seconds, done_at)
        self._collector.looked_up(
            result.num_query_tokens, sum([outcome.num_cached_tokens for outcome in result.outcomes])
        )
        self._core.prefill_done(result, now)

    # Decode workers.

    def _join_decode(self, name: str, now: float) -> None:
        worker = self._decode[name] = VirtualDecodeWorker(name, self._costs, self._watcher)
        if self._devices is not None:
            self._devices.joined(worker, now)
        self._planned[name] = inf
        self._core.add_decode_worker(
            DecodeWorkerInfo(
                name=name,
                model=self._model,
                pool=PoolHandle(
                    decode_worker=name,
                    transport="",
                    address="",
                    incarnation=0,
                    num_pages=self._costs.num_pages + 1,
                    page_size=self._costs.page_size,
                    size_bytes=0,
                ),
                max_num_seqs=self._settings.max_num_seqs,
                device="",
                load_seconds=0.0,
                weights_bytes=0,
            )
        )
        self._fail_later(name, now)

    def _start(self, argument: tuple[VirtualDecodeWorker, tuple[DecodeStart, ...]], now: float) -> None:
        worker, starts = argument
        if self._decode.get(worker.name) is not worker:
            return  # It died meanwhile.
        for start in starts:
            worker.add(start, now)
        self._changed[worker.name] = worker

    def _step(self, argument: tuple[VirtualDecodeWorker, float], now: float) -> None:
        worker, planned_at = argument
        if self._decode.get(worker.name) is not worker or self._planned[worker.name] != planned_at:
            return
        self._planned[worker.name] = inf
        report = worker.advance(now)
        if self._devices is not None:
            self._devices.stepped(worker.name, now)
        if report is not None:
            self._has_news = True
            self._may_form |= bool(report.released) and self._core.may_lack_pages
            self._watcher.token_at = now + self._costs.http_s / 2
            self._core.step_done(report, now)
        self._changed[worker.name] = worker

    def _plan(self, worker: VirtualDecodeWorker) -> None:
        """Have a decode worker go on when its next event is."""
        at = worker.next_at()
        if at != self._planned[worker.name]:
            self._planned[worker.name] = at
            if at < inf:
                self._at(at, self._step, (worker, at))

    # Failures.

    def _fail_later(self, name: str, now: float) -> None:
        if self._settings.failures is not None:
            self._at(now + self._rng.expovariate(1 / self._settings.failures.mtbf_s), self._die, name)

    def _die(self, name: str, now: float) -> None:
        failures = self._settings.failures
        assert failures is not None
        self._collector.num_deaths += 1
        self._may_form = self._has_news = True
        if name in self._prefill_runs:
            self._prefill_runs[name] += 1
            if self._devices is not None:
                self._devices.drop(name, now)
        else:
            worker = self._decode.pop(name)
            self._changed.pop(name, None)
            if self._devices is not None:
                self._devices.stepped(name, now)
            self._core.step_done(worker.die(now), now)
            self._collector.decode_busy_s += worker.busy_s
        self._core.worker_lost(name, now, returns=True)
        self._at(now + self._rng.expovariate(1 / failures.repair_s), self._return, name)

    def _return(self, name: str, now: float) -> None:
        """Let a worker join again, as the service's crew does: no lease of its earlier life is taken for a new one."""
        self._may_form = self._has_news = True
        self._core.fence_epoch()
        if name in self._prefill_runs:
            self._join_prefill(name, now)
        else:
            self._join_decode(name, now)
            self._core.fail_what_fits_nowhere(now)

    def _has_changed(self, worker: VirtualDecodeWorker) -> None:
        self._changed[worker.name] = worker

    def _at(self, time_s: float, call: Callable[..., None], argument: object) -> None:
        heappush(self._events, (time_s, next(self._order), call, argument))


@lru_cache(4096)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def _make_former(settings: FleetSettings) -> BatchFormer:
    # As in the Scheduler actor: the first worker's buckets replace this table.
    cost_model = CostModel.proportional(default_token_ladder(512))
    policy_class = FixedPolicy if settings.batch_policy == "fixed" else AdaptivePolicy
    policy = policy_class(
        max_requests=settings.max_batch_requests,
        timeout_s=settings.batch_timeout_s,
        max_tokens=settings.max_batch_tokens,
        cost_model=cost_model,
    )
    return BatchFormer(policy, cost_model)


def _prefix(arrival: Arrival) -> bytes:
    """Return what stands for a prompt's complete blocks, as an ApiServer would hash them."""
    num_blocks = arrival.num_prompt // TRACE_BLOCK_TOKENS
    return bytes(DIGEST_BYTES) + b"".join(
        [i.to_bytes(DIGEST_BYTES, "big") for i in arrival.hash_ids[:num_blocks]]
    )
