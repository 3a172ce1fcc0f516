"""The Scheduler actor: carries messages between `SchedulerCore` and the other actors, and owns the clock."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayError

from graphs.buckets import default_token_ladder
from scheduler.actions import (
    Action,
    ReleaseWorker,
    SendDecodeCancel,
    SendDecodeGrow,
    SendDecodeStarts,
    SendEvents,
    SendPrefill,
)
from scheduler.batching.adaptive import AdaptivePolicy
from scheduler.batching.cost_model import CostModel
from scheduler.batching.former import BatchFormer
from scheduler.batching.policies import FixedPolicy
from scheduler.core import QueueLimits, SchedulerCore
from scheduler.errors import ConfigError
from scheduler.fleet import Fleet
from scheduler.messages import (
    RAY_NAMESPACE,
    AbortReply,
    DecodeWorkerInfo,
    Figures,
    Heartbeat,
    PrefillResult,
    PrefillWorkerInfo,
    Request,
    ServiceLoad,
    ServiceStatus,
    StepReport,
    SubmitReply,
)
from scheduler.metrics import SchedulerMetrics
from scheduler.observe.logs import LogFormat, log_to_stderr
from scheduler.observe.ray_export import PERIOD_S, RayMirror
from scheduler.observe.workers import OF_WORKERS
from scheduler.readiness import ProgressWatch
from scheduler.workers import WorkerKind, WorkerTemplate

_LOG = logging.getLogger(__name__)

_STALL_S = 60.0
"""The longest prompts take a prefill worker on the CPU some ten seconds."""
_PING_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the Scheduler actor is started with."""

    batch_policy: Literal["fixed", "adaptive"]
    max_batch_requests: int
    batch_timeout_s: float
    max_batch_tokens: int | None
    queue_limits: QueueLimits
    worker_template: WorkerTemplate | None = None
    """What workers that are added later are started with; None: none can be added."""
    log_level: str = "info"
    log_format: LogFormat = "text"
    model: str = ""
    """Name of the model, for the metrics in Ray."""


class Scheduler:
    """The one owner of the queue and of every request's state. Never sees a tensor, never blocks."""

    def __init__(self, config: SchedulerConfig) -> None:
        log_to_stderr(config.log_level, config.log_format)
        self._metrics = SchedulerMetrics()
        self._mirror = RayMirror({"model": config.model})
        self._is_in_ray = False
        self._core = SchedulerCore(
            _make_former(config),
            config.queue_limits,
            self._metrics,
            # Above those of a scheduler that died: it made fewer than one lease a nanosecond.
            first_epoch=time.time_ns(),
        )
        self._handles: dict[str, Any] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._fleet = Fleet(config.worker_template)
        self._leaving: dict[str, asyncio.Future[None]] = {}
        self._progress = ProgressWatch(_STALL_S)
        self._lost: set[str] = set()
        self._pings: dict[str, asyncio.Task[bool]] = {}

    def __repr__(self) -> str:
        return "Scheduler"

    async def start(
        self, decode: tuple[DecodeWorkerInfo, ...], prefill: tuple[PrefillWorkerInfo, ...]
    ) -> None:
        """Take the workers into service; from now on requests are accepted."""
        self._fleet.begin(decode, prefill)
        for decode_info in decode:
            self._take_decode_worker(decode_info)
        for prefill_info in prefill:
            self._core.add_prefill_worker(prefill_info)

    async def add_worker(self, kind: WorkerKind) -> str:
        """Start a worker and take it into service; return its name. Raises `ConfigError` if it cannot start.

        While a decode worker joins, each prefill worker pauses to open its pool.
        """
        async with self._fleet.lock:
            if kind == "decode":
                decode_info = await self._fleet.start_decode_worker()
                self._take_decode_worker(decode_info)
                name = decode_info.name
            else:
                prefill_info = await self._fleet.start_prefill_worker()
                self._core.add_prefill_worker(prefill_info)
                name = prefill_info.name
        _LOG.info("%s joins", name)
        self._pump()
        return name

    async def remove_worker(self, name: str, *, timeout_s: float = 60.0) -> None:
        """Give a worker nothing new, and end it once nothing is left at it.

        Sequences of a decode worker that have not ended after `timeout_s` move to others: their requests wait again,
        with their tokens. Raises `ConfigError` if there is no such worker.
        """
        if name not in self._fleet:
            raise ConfigError(f"worker must be one of {', '.join(self._fleet)}, got {name}")
        left = self._leaving.setdefault(name, asyncio.get_running_loop().create_future())
        self._core.drain_worker(name)
        self._pump()
        await asyncio.wait((left,), timeout=timeout_s)
        if not left.done():
            self._core.evict_sequences(name)
            self._pump()
        await left

    async def submit(self, groups: tuple[tuple[Request, ...], ...]) -> SubmitReply:
        """Accept each group of requests whole or not at all."""
        now = time.monotonic()
        rejections = tuple(self._core.submit(group, now) for group in groups)
        queue = self._core.queue_state(now)
        self._pump()
        return SubmitReply(rejections=rejections, queue=queue)

    async def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Take in what an ApiServer did by itself. That this answers shows it that the scheduler lives."""
        self._metrics.heartbeat(heartbeat)
        if not self._is_in_ray:
            self._is_in_ray = True
            self._spawn(self._publish_to_ray())

    async def abort(self, completion_id: str, key_digest: str) -> AbortReply:
        """End all sequences of a completion that was asked for with this API key."""
        reply = self._core.abort(completion_id, key_digest, time.monotonic())
        self._pump()
        return reply

    async def load(self) -> ServiceLoad:
        """Return how much there is to do."""
        return ServiceLoad(
            num_live=self._core.num_live,
            num_waiting=self._core.num_waiting,
            num_waiting_tokens=self._core.num_waiting_tokens,
        )

    async def not_ready(self) -> str | None:
        """Return why no progress is to be expected, or None if it is."""
        dead = await self._dead_workers()
        return f"{', '.join(dead)} died" if dead else self._progress.problem(time.monotonic())

    async def cancel(self, request_ids: tuple[str, ...]) -> None:
        """End requests on their clients' wish. Ids of requests that have ended are passed over."""
        now = time.monotonic()
        for request_id in request_ids:
            self._core.cancel(request_id, now)
        self._pump()

    async def step_done(self, report: StepReport) -> None:
        """A decode worker made a step. It does not wait for the answer, so an error would be seen by nobody."""
        self._progress.progressed(time.monotonic())
        try:
            self._core.step_done(report, time.monotonic())
        except Exception:
            _LOG.exception("report %d of %s cannot be taken in", report.number, report.worker)
            raise
        self._pump()

    async def stop(self) -> None:
        """Watch nobody any more: the workers are about to be ended on purpose. Ends those that were added."""
        for task in self._tasks:
            task.cancel()
        self._fleet.stop_added()

    async def metrics(self, figures: Figures) -> Figures:
        """Take in what an ApiServer counted of late, and return all figures of the service."""
        self._metrics.add(figures)
        return self._metrics.figures(self._core)

    async def status(self) -> ServiceStatus:
        """Return what the service does, in one look."""
        return ServiceStatus(
            problem=await self.not_ready(), load=await self.load(), actors=self._metrics.actors(self._core)
        )

    async def _publish_to_ray(self) -> None:
        """Show the figures through Ray too, apart from those that the workers show themselves. Never returns."""
        while True:
            await asyncio.sleep(PERIOD_S)
            figures = self._metrics.figures(self._core, without=OF_WORKERS)
            await asyncio.to_thread(self._mirror.publish, figures)

    def _pump(self) -> None:
        """Carry out what the core wants, and call again when it next wants something."""
        now = time.monotonic()
        for action in self._core.tick(now):
            self._perform(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._progress.update(self._core.num_live, now)
        wake_at = self._core.wake_at()
        if wake_at is not None and wake_at > now:
            self._timer = asyncio.get_running_loop().call_later(wake_at - now, self._pump)

    def _perform(self, action: Action) -> None:
        match action:
            case SendPrefill():
                self._spawn(self._prefill(action))
            case SendDecodeStarts(worker=worker, starts=starts):
                self._handle(worker).add.remote(starts)
            case SendDecodeGrow(worker=worker, grants=grants):
                self._handle(worker).grow.remote(grants)
            case SendDecodeCancel(worker=worker, refs=refs):
                self._handle(worker).cancel.remote(refs)
            case SendEvents(api_server=api_server, events=events):
                self._handle(api_server).deliver.remote(events)
            case ReleaseWorker(worker=worker):
                self._spawn(self._end_worker(worker))

    async def _prefill(self, action: SendPrefill) -> None:
        """Have a batch computed, and tell the core what became of it."""
        try:
            result = await self._handle(action.worker).prefill.remote(action.batch)
        except RayActorError:
            _LOG.error("%s died with batch %d", action.worker, action.batch.batch_id)
            self._worker_lost(action.worker)
        except RayError as error:
            message = f"{action.worker} failed: {_cause(error)}"
            _LOG.exception("batch %d: %s", action.batch.batch_id, message)
            self._core.prefill_failed(action.worker, message, time.monotonic())
        else:
            self._progress.progressed(time.monotonic())
            self._core.prefill_done(result, time.monotonic())
            if result.handoff_pending:
                self._spawn(self._hand_off(result))
        self._pump()

    async def _hand_off(self, result: PrefillResult) -> None:
        """Wait until the pages of a computed batch have arrived, and tell the core."""
        try:
            handoff = await self._handle(result.worker).handed_off.remote(result.batch_id)
        except RayError as error:
            _LOG.error(
                "%s died with the pages of batch %d: %s", result.worker, result.batch_id, _cause(error)
            )
            self._worker_lost(result.worker)
        else:
            self._core.handoff_done(handoff, time.monotonic())
        self._pump()

    def _take_decode_worker(self, info: DecodeWorkerInfo) -> None:
        self._core.add_decode_worker(info)
        self._spawn(self._watch_decode(info.name))

    async def _end_worker(self, name: str) -> None:
        """End a worker at which nothing is left, and tell who waits for that."""
        async with self._fleet.lock:
            await self._fleet.end_worker(name)
        _LOG.info("%s has left", name)
        self._is_gone(name)

    def _worker_lost(self, name: str) -> None:
        """A worker died."""
        self._metrics.worker_died(name)
        self._core.worker_lost(name, time.monotonic())
        self._fleet.forget(name)
        self._lost.add(name)
        self._is_gone(name)

    def _is_gone(self, name: str) -> None:
        self._handles.pop(name, None)
        left = self._leaving.pop(name, None)
        if left is not None and not left.done():
            left.set_result(None)

    async def _watch_decode(self, worker: str) -> None:
        """Run a decode worker's loop for as long as it lives."""
        try:
            await self._handle(worker).run.remote()
        except RayError as error:
            _LOG.error("%s stopped: %s", worker, _cause(error))
            self._worker_lost(worker)
            self._pump()

    async def _dead_workers(self) -> list[str]:
        """Ask every worker for a sign of life; return those that are known to be dead.

        A busy one answers late. It gets no second question before it has answered the first.
        """
        self._pings = {name: ping for name, ping in self._pings.items() if name in self._fleet}
        for name in self._fleet:
            if name not in self._pings or self._pings[name].done():
                self._pings[name] = asyncio.create_task(self._lives(name))
        if self._pings:
            await asyncio.wait(self._pings.values(), timeout=_PING_TIMEOUT_S)
        silent = {name for name, ping in self._pings.items() if ping.done() and not ping.result()}
        return sorted(self._lost | silent)

    async def _lives(self, name: str) -> bool:
        try:
            await self._handle(name).__ray_ready__.remote()
        except (RayActorError, ValueError):  # ValueError: Ray knows no actor of that name any more
            return False
        return True

    def _handle(self, name: str) -> Any:
        if name not in self._handles:
            self._handles[name] = ray.get_actor(name, namespace=RAY_NAMESPACE)
        return self._handles[name]

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        # asyncio itself keeps no reference to a running task.
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _make_former(config: SchedulerConfig) -> BatchFormer:
    # Until a worker has measured its buckets, all tokens count the same.
    cost_model = CostModel.proportional(default_token_ladder(512))
    policy_class = FixedPolicy if config.batch_policy == "fixed" else AdaptivePolicy
    policy = policy_class(
        max_requests=config.max_batch_requests,
        timeout_s=config.batch_timeout_s,
        max_tokens=config.max_batch_tokens,
        cost_model=cost_model,
    )
    return BatchFormer(policy, cost_model)


def _cause(error: RayError) -> str:
    """Return the last line of an error from another process: its own message, without the traceback."""
    return str(error).strip().splitlines()[-1]
